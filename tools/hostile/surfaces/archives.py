"""Forged archives under `pic store pull`: what came into the store must be whole, and nothing else written."""

from __future__ import annotations

import io
import json
import random
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zstandard
from commands.run import write

from hostile.judge import Case, Step, fine
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import forge, healing, zstd_bomb
from hostile.values import dumps, mutate_bytes, mutate_tree, text

_TYPES = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
    tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, b"V", b"\xff",
)  # fmt: skip
_SIZES = (0, 1, 511, 512, 8**11 - 1, 1 << 32, 1 << 40, (1 << 63) - 1)


@dataclass
class Member:
    """A member of a tar, as it is written: `stated` is the size in its header, if that is not true."""

    name: str
    content: bytes
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    stated: int | None = None
    pax: dict[str, str] = field(default_factory=dict)


def members_of(archive: bytes) -> list[Member]:
    data = zstandard.ZstdDecompressor().decompressobj().decompress(archive)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [Member(info.name, content.read()) for info in tar if (content := tar.extractfile(info))]


def tar_of(members: list[Member]) -> bytes:
    out = io.BytesIO()
    for member in members:
        info = tarfile.TarInfo(member.name)
        info.type, info.linkname, info.mode = member.kind, member.link, 0o644
        info.size = len(member.content) if member.stated is None else member.stated
        info.pax_headers = member.pax
        out.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        out.write(member.content + bytes(-len(member.content) % 512))
    return out.getvalue() + bytes(1024)


def old_sparse(name: str, size: int) -> bytes:
    """A GNU sparse member of nothing but a hole of `size` bytes."""
    info = tarfile.TarInfo(name)
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 0
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:410] = _number(size) + _number(0)
    block[483:495] = _number(size)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _number(value: int) -> bytes:
    """A number of 12 bytes as GNU tar writes large ones."""
    return b"\x80" + value.to_bytes(11, "big")


# Forgeries of members


def member_kind(members: list[Member], draw: random.Random) -> str:
    member = draw.choice(members)
    member.kind, member.link = (
        draw.choice(_TYPES),
        draw.choice(("../../outside/victim", "/dev/zero", "archive.json", "x")),
    )
    if draw.random() < 0.5:
        member.content = b""
    return f"{member.name[:12]} of type {member.kind!r}"


def member_name(members: list[Member], draw: random.Random) -> str:
    member = draw.choice(members)
    member.name = (
        draw.choice(
            (
                f"../{member.name}",
                f"../../outside/{member.name}",
                f"/{member.name}",
                f"./{member.name}",
                member.name.upper(),
                text(draw)[:200],
            )
        )
        .encode("utf-8", "replace")
        .decode()
    )
    return f"named {member.name[:30]!r}"


def member_size(members: list[Member], draw: random.Random) -> str:
    member = draw.choice(members)
    member.stated = draw.choice((*_SIZES, len(member.content) + 1, max(0, len(member.content) - 1)))
    return f"{member.name[:12]} states {member.stated} bytes"


def member_pax(members: list[Member], draw: random.Random) -> str:
    member = draw.choice(members)
    name = draw.choice(
        (
            "size",
            "path",
            "linkpath",
            "GNU.sparse.map",
            "GNU.sparse.size",
            "GNU.sparse.realsize",
            "mtime",
            "uid",
            "hdrcharset",
            "x",
        )
    )
    value = draw.choice(
        (str(draw.choice(_SIZES)), "-1", "1e400", "nan", "../../outside/x", "0,4294967296", "BINARY", "x" * 100_000)
    )
    member.pax = {name: value}
    if name.startswith("GNU.sparse"):
        member.pax = {
            "GNU.sparse.major": draw.choice("01"),
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": member.name,
            **member.pax,
        }
    return f"pax {name}={value[:20]}"


def order(members: list[Member], draw: random.Random) -> str:
    kind = draw.choice(("doubled", "removed", "shuffled", "many"))
    member = draw.choice(members)
    if kind == "doubled":
        members.insert(draw.randrange(len(members) + 1), member)
    elif kind == "removed":
        members.remove(member)
    elif kind == "shuffled":
        draw.shuffle(members)
    else:
        members += [Member(f"{i:064x}.kvo", b"") for i in range(2000)]
    return f"members {kind}"


def manifest(members: list[Member], draw: random.Random) -> str:
    listed = next((member for member in members if member.content.startswith(b"{")), None)
    try:
        tree = json.loads(listed.content) if listed else None
    except (ValueError, RecursionError):  # it was forged before
        tree = None
    if listed is None or not isinstance(tree, dict) or not isinstance(tree.get("keys"), list):
        return "nothing"
    if draw.random() < 0.3:
        tree["keys"] = draw.choice(
            ([], tree["keys"] * 2, tree["keys"][:1], [*tree["keys"], "f" * 64], ["a" * 64] * 10_000)
        )
        what = "keys"
    else:
        what = mutate_tree(tree, draw)
    listed.content = dumps(tree).encode("utf-8", "surrogatepass")
    return f"manifest: {what}"


def forged_object(members: list[Member], draw: random.Random) -> str:
    objects = [member for member in members if b"pictool.kvo" in member.content[:100_000]]
    if not objects:
        return "nothing"
    member = draw.choice(objects)
    member.content, what = forge(member.content, draw)
    return what


def zeros(members: list[Member], draw: random.Random) -> str:
    """Content that is megabytes of nothing."""
    member = draw.choice(members)
    member.content = bytes(draw.choice((1 << 20, 1 << 24)))
    return f"{member.name[:12]} of {len(member.content):,d} zeros"


FORGERIES: tuple[Callable[[list[Member], random.Random], str], ...] = (
    member_kind, member_name, member_size, member_pax, order, manifest, manifest, forged_object, forged_object, zeros,
)  # fmt: skip


# Forgeries of what is around the tar


def compress(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """The tar as an archive: mostly honest, else in another form."""
    honest = zstandard.ZstdCompressor(level=3, write_checksum=True).compress
    kind = draw.choice(
        ("honest",) * 10 + ("two frames", "plain", "gzip", "skippable", "trailing", "trailing frame", "bad checksum")
    )
    if kind == "two frames":
        return honest(data[:700]) + honest(data[700:]), kind
    if kind == "plain":
        return data, kind
    if kind == "gzip":
        import gzip

        return gzip.compress(data, mtime=0), kind
    if kind == "skippable":
        return struct.pack("<II", 0x184D2A50, draw.choice((8, 1 << 31))) + bytes(8) + honest(data), kind
    if kind == "trailing":
        return honest(data) + draw.randbytes(40), kind
    if kind == "trailing frame":
        return honest(data) + zstd_bomb(1 << 32), kind
    packed = honest(data)
    return (packed, "") if kind == "honest" else (packed[:-1] + bytes([packed[-1] ^ 1]), kind)


def bomb(keys: list[str], draw: random.Random) -> tuple[bytes, str]:
    """A small file that stands for gigabytes: a huge member, a sparse one, or a huge manifest."""
    size, kind = (
        draw.choice((1 << 30, 1 << 32, 1 << 36)),
        draw.choice(("member", "sparse", "manifest", "nothing but zeros", "window")),
    )
    listed = dumps({"format": "pictool.archive", "keys": keys, "version": "1"}).encode()
    if kind == "sparse":
        tar = tar_of([Member("archive.json", listed)])[:-1024] + old_sparse(f"{keys[0]}.kvo", size) + bytes(1024)
        return zstandard.ZstdCompressor().compress(tar), f"a bomb: {kind} of {size:,d} bytes"
    if kind == "window":
        frame = bytearray(zstandard.ZstdCompressor().compress(tar_of([Member("archive.json", listed)])))
        frame[4:6] = b"\xc0\xf8"
        return bytes(frame), "a window of terabytes"
    name, content = ("archive.json", b"") if kind == "manifest" else (f"{keys[0]}.kvo", listed)
    head = tar_of([Member("archive.json", content)])[:-1024] if kind == "member" else b""
    info = tarfile.TarInfo(name)
    info.size = size
    head += b"" if kind == "nothing but zeros" else info.tobuf(tarfile.GNU_FORMAT)
    return zstandard.ZstdCompressor().compress(head) + zstd_bomb(1 << 32), f"a bomb: {kind} of {size:,d} bytes"


class Archives(Surface):
    """A forged archive is imported into a store that holds one of its objects."""

    name, weight = "archives", 15

    def make(self, draw: random.Random) -> Case:
        scene = self.scene
        scene.write_texts()
        files = scene.write_store("none")
        removed = [path for path in sorted(files) if draw.random() < 0.6]
        for path in removed:
            path.unlink()
        what = self._write(draw)
        kept = {path.absolute(): content for path, content in files.items() if path not in removed}
        importing = ("store", "pull", "x.kva", "--store", "st", *(("--json",) if draw.random() < 0.3 else ()))
        whole = Step(("store", "verify", "--store", "st"), (), fine, must_answer=True)
        steps = [Step(importing, ("x.kva", "st")), whole]
        if draw.random() < 0.3:
            steps.append(healing(scene, "none"))
        return Case(what, tuple(steps), kept, ("st",))

    def _write(self, draw: random.Random) -> str:
        kind, path = draw.random(), Path("x.kva")
        if kind < 0.03:
            return put_something_else(path, draw, self.scene.root / "outside")
        if kind < 0.12:
            data, what = mutate_bytes(self.scene.archive, draw)
        elif kind < 0.25:
            data, what = bomb([Path(name).stem for name in self.scene.objects["none"]], draw)
        else:
            data, what = self._forged(draw)
        write(path, data)
        return what

    def _forged(self, draw: random.Random) -> tuple[bytes, str]:
        members = members_of(self.scene.archive)
        done = [
            draw.choice(FORGERIES)(members, draw) for _ in range(draw.choice((0, 1, 1, 1, 1, 2))) if len(members) > 1
        ]
        tar = tar_of(members)
        if draw.random() < 0.1:
            tar, damage = mutate_bytes(tar, draw)
            done.append(f"tar {damage}")
        data, around = compress(tar, draw)
        return data, ", ".join([*done, around])

"""Forged objects, most with checksums that hold, in a store and as files, under every command that reads them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from commands.run import write

from hostile.judge import Case, Check, Outcome, Step, fine
from hostile.scene import CODECS, HYBRID, Scene
from hostile.surfaces.base import Surface, put_something_else
from hostile.values import NUMBERS, TEXTS, dumps, mutate_bytes, mutate_tree, nearby, text, value
from pictool.store.objects.format import checksum

RLE_BLOCK = 1 << 17  # bytes that one block of a zstd frame stands for


@dataclass
class Anatomy:
    """An object taken apart. `parts` are the bytes of every tensor, in data order."""

    metadata: dict[str, Any]
    checksums: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    parts: dict[str, bytes]
    ensure_ascii: bool = False
    keeps_checksums: bool = False
    edits: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)  # of the header, before it is sealed

    @classmethod
    def of(cls, data: bytes) -> Anatomy:
        start = 8 + struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8:start])
        metadata = header.pop("__metadata__")
        tensors = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
        spans = {name: entry["data_offsets"] for name, entry in tensors.items()}
        parts = {name: data[start + a : start + b] for name, (a, b) in spans.items()}
        return cls(metadata, json.loads(metadata["checksums"]), tensors, parts)

    def build(self) -> bytes:
        """The file, whose checksums hold (but for what `edits` make impossible)."""
        offset = 0
        for name, part in self.parts.items():
            self.tensors[name]["data_offsets"] = [offset, offset + len(part)]
            offset += len(part)
        if not self.keeps_checksums:
            self._reseal_parts()
        self.metadata["checksums"] = dumps(self.checksums, sort_keys=True)
        header = {"__metadata__": self.metadata, **self.tensors}
        for edit in self.edits:
            edit(header)
        return sealed(header, self.ensure_ascii) + b"".join(self.parts.values())

    def _reseal_parts(self) -> None:
        layers: dict[str, list[bytes]] = {}
        states: dict[str, list[bytes]] = {}
        for name, part in self.parts.items():
            if name in ("tokens", "text", "fixups"):
                self.checksums[name] = checksum(part)
            else:
                of = states if name.startswith("states.") else layers
                of.setdefault(name.rpartition(".")[0], []).append(part)
        self.checksums["layers"] = [checksum(*parts) for parts in layers.values()]
        if states:
            self.checksums["states"] = [checksum(*parts) for parts in states.values()]


def sealed(header: dict[str, Any], ensure_ascii: bool = False) -> bytes:
    """A header with its length, whose own checksum holds, whatever is in it."""
    metadata = header.get("__metadata__")

    def raw(seal: str) -> bytes:
        if isinstance(metadata, dict) and "header" in metadata:
            metadata["header"] = seal
        out = dumps(header, ensure_ascii, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
        return out + b" " * (-len(out) % 8)

    data = raw(checksum(raw("")))
    return struct.pack("<Q", len(data)) + data


def zstd_bomb(size: int) -> bytes:
    """A zstd frame of a few bytes that states `size` and decodes to so many zeros."""
    frame = (
        b"\x28\xb5\x2f\xfd" + bytes([0xC0, 0x38]) + struct.pack("<Q", size)
    )  # content size of 8 bytes, 128 KB window
    full, rest = divmod(size, RLE_BLOCK)
    sizes = [RLE_BLOCK] * full + ([rest] if rest or not full else [])
    for index, length in enumerate(sizes):
        frame += struct.pack("<I", length << 3 | 1 << 1 | (index == len(sizes) - 1))[:3] + b"\0"
    return frame


# Forgeries: each changes an object that was taken apart, and returns what it did


def field_of_metadata(anatomy: Anatomy, draw: random.Random) -> str:
    name = draw.choice([name for name in anatomy.metadata if name not in ("checksums", "header")])
    old = anatomy.metadata[name]
    new = draw.choice((text, value, lambda d: str(d.choice(NUMBERS)), lambda d: nearby(old, d)))(draw)
    anatomy.metadata[name] = new
    anatomy.ensure_ascii = draw.random() < 0.4
    return f"{name} = {str(new)[:30]!r}"


def fields_of_metadata(anatomy: Anatomy, draw: random.Random) -> str:
    name = draw.choice(sorted(anatomy.metadata))
    if draw.random() < 0.5:
        del anatomy.metadata[name]
        return f"{name} removed"
    other = draw.choice(("parent", "fixups", "extra", *TEXTS[:5]))
    anatomy.metadata[other] = text(draw)
    return f"{other!r} added"


def lone_surrogate(anatomy: Anatomy, draw: random.Random) -> str:
    name = draw.choice(("architecture", "model", "tokenizer", "key", "codec", "dtype", "fixups", "parent"))
    anatomy.metadata[name] = anatomy.metadata.get(name, "")[: draw.choice((0, 60))] + draw.choice(("\ud800", "\udc41x"))
    anatomy.ensure_ascii = draw.random() < 0.7
    return f"a surrogate in {name}"


def checksums(anatomy: Anatomy, draw: random.Random) -> str:
    anatomy.keeps_checksums = True
    return "checksums: " + mutate_tree(anatomy.checksums, draw)


def header_tree(anatomy: Anatomy, draw: random.Random) -> str:
    seed = draw.random()

    def edit(header: dict[str, Any]) -> None:
        mutate_tree(header, random.Random(seed))

    anatomy.edits.append(edit)
    return "the header's tree"


def tensor_entry(anatomy: Anatomy, draw: random.Random) -> str:
    name = draw.choice(sorted(anatomy.tensors))
    kind, new = draw.choice(("data_offsets", "shape", "dtype")), value(draw)
    if kind == "data_offsets" and draw.random() < 0.8:
        new = [draw.choice(NUMBERS), draw.choice(NUMBERS)]
    elif kind == "shape" and draw.random() < 0.8:
        new = [draw.choice(NUMBERS) for _ in anatomy.tensors[name]["shape"]]
    anatomy.edits.append(lambda header: header[name].update({kind: new}))
    return f"{name}'s {kind} = {str(new)[:40]}"


def overlapping(anatomy: Anatomy, draw: random.Random) -> str:
    """Tensors that share bytes, or leave a hole."""
    name, by = draw.choice(sorted(anatomy.tensors)), draw.choice((-8, -1, 1, 8, 4096))

    def edit(header: dict[str, Any]) -> None:
        header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]

    anatomy.edits.append(edit)
    return f"{name} moved by {by} bytes"


def tensors(anatomy: Anatomy, draw: random.Random) -> str:
    name = draw.choice(sorted(anatomy.parts))
    if draw.random() < 0.4:
        del anatomy.parts[name], anatomy.tensors[name]
        return f"{name} removed"
    other = draw.choice(("layers.003.key", "layers.-01.kv", "fixups", "zzz", *TEXTS))
    anatomy.parts[other], anatomy.tensors[other] = anatomy.parts[name], dict(anatomy.tensors[name])
    if draw.random() < 0.5:
        del anatomy.parts[name], anatomy.tensors[name]
    return f"{name} as {other[:20]!r}"


def kv_not_finite(anatomy: Anatomy, draw: random.Random) -> str:
    """Numbers among the KV or the states that are none; of a codec, its scales.

    (An infinite key may be one that nothing attends to, so that its answer is wrong. So may be that of any forged
    number: checksums hold, and the key is of the tokens.)
    """
    name = draw.choice([name for name in anatomy.parts if name.startswith(("layers.", "states."))])
    bad = float("nan") if not name.endswith("value") else draw.choice((float("nan"), float("inf"), float("-inf")))
    part = bytearray(anatomy.parts[name])
    if anatomy.metadata["codec"] == "none":
        at = draw.randrange(len(part) // 4) * 4
        part[at : at + 4] = struct.pack("<f", bad)
    else:
        part = bytearray(_recoded(bytes(part), 2 if anatomy.metadata["codec"] == "zstd" else 1))
    anatomy.parts[name] = bytes(part)
    return f"{bad} in {name}"


def _recoded(data: bytes, count: int) -> bytes:
    """The frames of a coded layer, the last ones (high bytes of numbers, or of scales) of ones only."""
    import zstandard

    frames, offset = list[bytes](), 0
    while offset < len(data):
        (length,) = struct.unpack_from("<I", data, offset)
        frames.append(data[offset + 4 : offset + 4 + length])
        offset += 4 + length
    for index in range(len(frames) - count, len(frames)):
        size = zstandard.frame_content_size(frames[index])
        frames[index] = zstandard.ZstdCompressor().compress(b"\xff" * size)
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def bomb(anatomy: Anatomy, draw: random.Random) -> str:
    """A few bytes that stand for gigabytes, as the header says or as it does not."""
    size = draw.choice((1 << 20, 1 << 28, 1 << 30, 1 << 31, 1 << 32, 10**13))
    frame = (
        zstd_bomb(min(size, 1 << 32))
        if size <= 1 << 32
        else zstd_bomb(1 << 20).replace(struct.pack("<Q", 1 << 20), struct.pack("<Q", size))
    )
    for name in [name for name in anatomy.parts if name.startswith("layers.")]:
        del anatomy.parts[name], anatomy.tensors[name]
    codec = draw.choice(("zstd", "int8", "int4", "fp8"))
    tokens = draw.choice((1, 16, 1024))
    frames = {"zstd": 4, "int8": 3, "fp8": 3, "int4": 5}[codec]
    channels = max(1, size // (4 * tokens * 2) if codec == "zstd" else size // (2 * tokens))
    if draw.random() < 0.6:
        channels = min(channels, 1 << 20)
    heads = draw.choice((1, channels))
    anatomy.metadata |= {
        "codec": codec,
        "kv_heads": str(heads),
        "head_dim": str(channels // heads),
        "tokens": str(tokens),
        "layers": "1",
    }
    each = {
        "zstd": 2 * tokens * channels,
        "int8": 2 * tokens * channels,
        "fp8": 2 * tokens * channels,
        "int4": tokens * channels,
    }[codec]
    if draw.random() < 0.8:
        frame = zstd_bomb(each) if each <= 1 << 32 else frame
    anatomy.parts = {
        "tokens": bytes(4 * tokens),
        "layers.000.kv": (struct.pack("<I", len(frame)) + frame) * frames,
        "text": anatomy.parts["text"],
    }
    anatomy.tensors = {
        "tokens": {"dtype": "I32", "shape": [tokens]},
        "layers.000.kv": {"dtype": "U8", "shape": [len(anatomy.parts["layers.000.kv"])]},
        "text": {"dtype": "U8", "shape": [len(anatomy.parts["text"])]},
    }
    return f"a bomb of {size:,d} bytes in {codec}, {channels} channels, {tokens} tokens"


def geometry(anatomy: Anatomy, draw: random.Random) -> str:
    """Another shape that needs as many bytes, or a count that is huge."""
    heads, dim = int(anatomy.metadata["kv_heads"]), int(anatomy.metadata["head_dim"])
    factor = draw.choice((2, 4, 8, dim))
    heads, dim = (heads * factor, dim // factor) if draw.random() < 0.5 else (1, heads * dim)
    anatomy.metadata |= {"kv_heads": str(heads), "head_dim": str(dim)}
    tokens = int(anatomy.metadata["tokens"])
    for name, entry in anatomy.tensors.items():
        if name.startswith("layers.") and entry["dtype"] != "U8":
            entry["shape"] = [heads, tokens, dim]
    return f"{heads} heads of {dim}"


def fewer_layers(anatomy: Anatomy, draw: random.Random) -> str:
    kept = draw.choice((1, 2))
    for name in [name for name in anatomy.parts if name.startswith("layers.") and int(name[7:10]) >= kept]:
        del anatomy.parts[name], anatomy.tensors[name]
    anatomy.metadata["layers"] = str(kept)
    return f"{kept} layers"


def other_tokens(anatomy: Anatomy, draw: random.Random) -> str:
    ids = np.frombuffer(anatomy.parts["tokens"], dtype="<i4").copy()
    ids[draw.randrange(len(ids))] = draw.choice((-1, -(2**31), 2**31 - 1, 320, 1000, 5))
    anatomy.parts["tokens"] = ids.tobytes()
    return "another token"


def other_text(anatomy: Anatomy, draw: random.Random) -> str:
    new = draw.choice((b"\xff\xfe", b"", b"x" * 300_000, text(draw).encode("utf-8", "surrogatepass")))
    anatomy.parts["text"] = new
    anatomy.tensors["text"]["shape"] = [len(new)]
    return f"text {new[:20]!r}"


def table(anatomy: Anatomy, draw: random.Random) -> str:
    """A table, as version 0.3 made them, that no compile made."""
    count = int(anatomy.metadata["tokens"])
    bad = draw.choice((float("nan"), float("inf"), float("-inf"), -1.0, 65504.0, 0.0))
    numbers = np.full(count, 0.5, dtype=np.float16)
    numbers[:: draw.choice((1, 3))] = bad
    anatomy.parts = {
        **{n: p for n, p in anatomy.parts.items() if n not in ("text", "fixups")},
        "fixups": numbers.tobytes(),
        "text": anatomy.parts["text"],
    }
    anatomy.tensors |= {"fixups": {"dtype": "F16", "shape": [count]}}
    anatomy.metadata["fixups"] = draw.choice(("self-2x60", "self-8x60", text(draw)))
    return f"a table of {bad}"


def raw_header(anatomy: Anatomy, draw: random.Random) -> str:
    """A header that is sealed, but not in the canonical form; or no JSON at all."""
    kind, seed = draw.choice(("spaces", "a name twice", "deep", "huge number")), draw.random()

    def edit(header: dict[str, Any]) -> None:
        if kind == "huge number":
            header["__metadata__"]["tokens"] = "<<raw:" + "9" * 5000 + ">>"
        elif kind == "deep":
            header["text"] = "<<raw:" + "[" * 100_000 + "]" * 100_000 + ">>"
        elif kind == "a name twice":
            header["tokens"] = '<<raw:{\\"dtype\\":\\"I32\\"},\\"tokens\\":{\\"dtype\\":\\"I32\\"}>>'
        else:
            header["__metadata__"]["tokens"] = random.Random(seed).choice((" 5", "5 ", "+5", "0x5", "5_0", "٥", "1e1"))

    anatomy.edits.append(edit)
    return f"the header: {kind}"


FORGERIES: tuple[Callable[[Anatomy, random.Random], str], ...] = (
    field_of_metadata, field_of_metadata, field_of_metadata, fields_of_metadata, lone_surrogate, checksums, header_tree,
    tensor_entry, tensor_entry, overlapping, tensors, kv_not_finite, bomb, geometry, fewer_layers, other_tokens,
    other_text, table, raw_header,
)  # fmt: skip


def forge(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """An object that says or holds something else, with checksums that hold."""
    forgery = draw.choice(FORGERIES)
    try:
        anatomy = Anatomy.of(data)
        what = forgery(anatomy, draw)
        if draw.random() < 0.1:
            what += ", " + draw.choice(FORGERIES[:9])(anatomy, draw)
        return anatomy.build(), f"{forgery.__name__}: {what}"
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):  # two that do not go together
        return mutate_bytes(data, draw)


class Objects(Surface):
    """The object of a.txt is replaced by a forged one; that of b.txt and of the head stay."""

    name, weight = "objects", 45

    def make(self, draw: random.Random) -> Case:
        scene, codec = self.scene, draw.choice((*CODECS, HYBRID))
        scene.write_texts()
        files, key = scene.write_store(codec), scene.keys[codec]["a.txt"]
        commands = COMMANDS if codec != HYBRID else COMMANDS[: -len(OF_ATTENTION)]
        path = Path("st/objects", key[:2], f"{key}.kvo")
        what, kept = self._spoil(path, files, draw), {p: c for p, c in files.items() if p != path}
        names = (key[:12], "a.kvo", "a.txt", "objects are damaged", "--first")
        steps = [draw.choice(commands)(scene, codec, key, kept) for _ in range(draw.choice((1, 2, 2, 3)))]
        if any(step.arguments[0] == "compile" or step.arguments[0] == "link" for step in steps) or draw.random() < 0.4:
            steps.append(healing(scene, codec))
        is_honest, stays = what == "another object", what == "a full directory"  # which nobody removes
        steps = [
            replace(
                step,
                names=step.names or names,
                check=fine if is_honest and "a.kvo" in step.arguments else step.check,
                must_answer=step.must_answer and not (stays and step.arguments[0] == "link"),
            )
            for step in steps
        ]
        return Case(f"{codec}: {what}", tuple(steps), {p.absolute(): c for p, c in kept.items()}, ("st",))

    def _spoil(self, path: Path, files: dict[Path, bytes], draw: random.Random) -> str:
        """Forge the object at `path`, in the store and as the file a.kvo."""
        data, kind = files[path], draw.random()
        if kind < 0.05:
            what = put_something_else(path, draw, self.scene.root / "outside")
            if draw.random() < 0.5:
                put_something_else(Path("a.kvo"), draw, self.scene.root / "outside")
            return what
        if kind < 0.1:
            other = draw.choice([content for other, content in sorted(files.items()) if other != path])
            new, what = other, "another object"
        elif kind < 0.2:
            new, what = mutate_bytes(data, draw)
        else:
            new, what = forge(data, draw)
        write(path, new)
        write("a.kvo", new)
        return what


# The commands


Make = Callable[[Scene, str, str, dict[Path, bytes]], Step]


def healing(scene: Scene, codec: str) -> Step:
    """A link from texts: it compiles what is damaged, and its answer is the honest one."""
    return Step(scene.link(codec), (), lambda outcome: scene.check_answer(codec, outcome), must_answer=True)


def linked(*more: object, as_file: bool = False) -> Make:
    """A link of the forged object itself, by key or as a file."""

    def make(scene: Scene, codec: str, key: str, _: dict[Path, bytes]) -> Step:
        arguments = scene.link(codec, "a.kvo" if as_file else key, "b.txt", more=more)
        return Step(arguments, (), fine if more else lambda outcome: scene.check_answer(codec, outcome))

    return make


def command(*arguments: object, with_key: bool = False, with_model: bool = False, with_store: bool = True) -> Make:
    def make(scene: Scene, codec: str, key: str, _: dict[Path, bytes]) -> Step:
        named = [key if argument == "KEY" else argument for argument in arguments]
        model = ("-m", scene.model_of(codec)) if with_model else ()
        return Step((*named, *model, *(("--store", "st") if with_store else ())), (), check_json(arguments))

    return make


def listing(scene: Scene, codec: str, key: str, kept: dict[Path, bytes]) -> Step:
    """`ls` must list the others, whatever the forged one is."""

    def check(outcome: Outcome) -> str | None:
        listed = {entry["key"]: entry for entry in json.loads(outcome.out)}
        missing = [path.stem for path in kept if listed.get(path.stem, {"problem": "not listed"})["problem"]]
        return f"does not list {missing}" if missing else None

    return Step(("store", "ls", "--json", "--store", "st"), (), check, must_answer=True)


def check_json(arguments: tuple[object, ...]) -> Check:
    def check(outcome: Outcome) -> str | None:
        def refuse(name: str) -> None:
            raise ValueError(f"{name} is no JSON")

        try:
            json.loads(outcome.out, parse_constant=refuse)
        except ValueError as error:
            return f"--json: {error}"
        return None

    return check if "--json" in arguments else fine


OF_ATTENTION: tuple[Make, ...] = (  # refused for a hybrid
    command("plan", "a.kvo", "b.txt", with_model=True),
    command("plan", "KEY", "--json", with_model=True),
    linked("--algo", "cacheblend-30"),
)
COMMANDS: tuple[Make, ...] = (
    listing,
    listing,
    command("store", "ls"),
    command("inspect", "KEY"),
    command("inspect", "KEY", "--json"),
    command("store", "ls", "--stats"),
    command("store", "ls", "--stats", "--json"),
    command("store", "verify"),
    command("store", "verify", "--json"),
    command("store", "verify", "--repair"),
    command("store", "verify", "--repair"),
    command("store", "gc", "--max-size", "1G"),
    command("store", "push", "all", "-o", "x.kva", "--force"),
    command("store", "push", "KEY", "-o", "x.kva", "--force"),
    command("store", "push", "all", "--remote", "far"),
    command("store", "push", "KEY", "--remote", "far"),
    command("store", "pin", "KEY"),
    command("store", "gc", "KEY", "--force"),
    command("store", "pull", "KEY", "--remote", "far"),
    command("inspect", "KEY"),
    command("inspect", "KEY", "--text", "--json"),
    command("inspect", "a.kvo"),
    command("inspect", "a.kvo", "--text"),
    command("compile", "a.txt", with_model=True),
    command("compile", "a.txt", "--force", with_model=True),
    linked(),
    linked(),
    linked(as_file=True),
    linked(as_file=True),
    linked("--compare"),
    lambda scene, codec, key, _: healing(scene, codec),
    linked("--algo", "legolink-4"),
    *OF_ATTENTION,
)

"""Signed objects that are forged, swapped, replayed, truncated or mixed, under `--require-signed`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from commands.run import pic, write

from hostile.judge import Case, Outcome, Step
from hostile.scene import Scene
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import Anatomy, forge
from hostile.values import mutate_bytes
from pictool.store.signatures import SigningKey, sign_object_file

SIGNERS = "signers"
HONEST, REPLAYED = "signed as it is", "the object of an old version"
OLD = "An old version of the document, which was signed, too.\n"


class Signed(Surface):
    """The object of a.txt, or its sidecar, is hostile; those of b.txt and of the head are honest, and signed.

    Whatever became of it: an answer is the honest one, or there is none.
    """

    name, weight = "signed", 15

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        root = scene.root / "signed"
        self._own, self._other, self._revoked = (SigningKey.new(root / name) for name in ("own", "other", "revoked"))
        self._signers = f"{self._own.public} own\nrevoked {self._revoked.public} old\n{self._revoked.public} old\n"
        self._files = {Path("st", name): content for name, content in scene.objects["none"].items()}
        self._old = self._compile_old(root)

    def _compile_old(self, root: Path) -> bytes:
        write(root / "a.txt", OLD)
        done = pic("compile", root / "a.txt", "-m", self.scene.model, "--store", root / "st", "-o", root / "old.kvo")
        assert done.code == 0, done.err
        return (root / "old.kvo").read_bytes()

    def make(self, draw: random.Random) -> Case:
        scene = self.scene
        scene.write_texts()
        write(SIGNERS, self._signers).chmod(0o600)
        for path, content in self._files.items():
            write(path, content)
            sign_object_file(self._own, path)
        key = scene.keys["none"]["a.txt"]
        path = Path("st/objects", key[:2], f"{key}.kvo")
        what = draw.choice(ATTACKS)(self, path, draw)
        write("a.kvo", path.read_bytes() if path.is_file() else b"")
        sidecar = Path(f"{path}.sig")
        if sidecar.is_file() and not sidecar.is_symlink():
            write("a.kvo.sig", sidecar.read_bytes())
        names = (key, key[:16]) if what == REPLAYED else (key, key[:16], "a.kvo")  # a file's name binds no text
        steps = [self._step(draw.choice(names), must_answer=what == HONEST)]
        if draw.random() < 0.5:
            steps.append(self._step("a.txt", must_answer=True))
        return Case(what, tuple(steps), {}, ("st",))

    def _step(self, document: str, must_answer: bool = False) -> Step:
        """A link of a document and b.txt. From a text there is an answer: what does not count is compiled again."""
        arguments = self.scene.link("none", document, "b.txt", more=(f"--require-signed={SIGNERS}",))
        return Step(arguments, (), self._check, must_answer=must_answer)

    def _check(self, outcome: Outcome) -> str | None:
        return self.scene.check_answer("none", outcome)

    def honest(self, path: Path, draw: random.Random) -> str:
        """Nothing, so that a surface which refuses all is noticed."""
        return HONEST

    # Attacks: each spoils the object at `path`, or its sidecar, and returns what it did

    def forged(self, path: Path, draw: random.Random) -> str:
        data, what = forge(path.read_bytes(), draw)
        path.write_bytes(data)
        return self._by_a_stranger(path, draw, what)

    def planted(self, path: Path, draw: random.Random) -> str:
        """Finite KV of the right tokens with other values in one layer: nothing but the signature tells."""
        anatomy = Anatomy.of(path.read_bytes())
        name = draw.choice([name for name in anatomy.parts if name.startswith("layers.")])
        numbers = np.frombuffer(anatomy.parts[name], dtype="<f4") * np.float32(draw.choice((0.0, 1.01, -1.0, 3.0)))
        anatomy.parts[name] = numbers.tobytes()
        path.write_bytes(anatomy.build())
        return self._by_a_stranger(path, draw, f"other values in {name}")

    def _by_a_stranger(self, path: Path, draw: random.Random, what: str) -> str:
        """Keep the old signature, or add one of a key that does not count, if it is an object at all."""
        for key, who in ((self._other, "a stranger"), (self._revoked, "a revoked key")):
            if draw.random() < 0.4:
                try:
                    sign_object_file(key, path)
                except Exception:  # whatever the forgery made of it
                    continue
                what += f", signed by {who}"
        return what

    def swapped(self, path: Path, draw: random.Random) -> str:
        """The sidecar of another object, or two exchanged."""
        other = draw.choice([other for other in sorted(self._files) if other != path])
        own, theirs = Path(f"{path}.sig").read_bytes(), Path(f"{other}.sig").read_bytes()
        self.planted(path, draw) if draw.random() < 0.7 else None
        Path(f"{path}.sig").write_bytes(theirs + (own if draw.random() < 0.5 else b""))
        return "the sidecar of another"

    def replayed(self, path: Path, draw: random.Random) -> str:
        """A signed object of the document before it changed, under the name of the one after."""
        path.write_bytes(self._old)
        if draw.random() < 0.5:
            anatomy, key = Anatomy.of(self._old), path.stem
            anatomy.metadata["key"] = key
            path.write_bytes(anatomy.build())
        else:
            sign_object_file(self._own, path)
        return REPLAYED

    def truncated(self, path: Path, draw: random.Random) -> str:
        target = draw.choice((path, Path(f"{path}.sig")))
        data = target.read_bytes()
        target.write_bytes(data[: draw.randrange(len(data))])
        return f"{target.suffix} truncated"

    def mixed(self, path: Path, draw: random.Random) -> str:
        """The header of one object, and data of others."""
        anatomy, other = Anatomy.of(path.read_bytes()), Anatomy.of(self._old)
        for name in draw.sample(sorted(anatomy.parts), draw.choice((1, 2, 3))):
            size = len(anatomy.parts[name])
            anatomy.parts[name] = (other.parts[name] * (size // len(other.parts[name]) + 1))[:size]
        anatomy.keeps_checksums = draw.random() < 0.5
        path.write_bytes(anatomy.build())
        return self._by_a_stranger(path, draw, "data of another object")

    def sidecar(self, path: Path, draw: random.Random) -> str:
        """Bytes of the sidecar that nobody wrote, beside planted values."""
        what = self.planted(path, draw)
        target = Path(f"{path}.sig")
        kind = draw.choice(("mutated", "something else", "many lines", "lines of bits", "gone"))
        if kind == "something else":
            return f"{put_something_else(target, draw, self.scene.root / 'outside')} as sidecar, {what}"
        if kind == "mutated":
            data = mutate_bytes(target.read_bytes(), draw)[0]
        elif kind == "many lines":
            data = target.read_bytes() * draw.choice((2, 40, 1000))
        else:
            data = bytes(b ^ (1 << draw.randrange(7)) if draw.random() < 0.01 else b for b in target.read_bytes())
        target.unlink(missing_ok=True)
        if kind != "gone":
            target.write_bytes(data)
        return f"sidecar {kind}, {what}"

    def whole_by_a_stranger(self, path: Path, draw: random.Random) -> str:
        """An honest object that no trusted key signed, or another key's public key before a trusted signature."""
        target = Path(f"{path}.sig")
        own = target.read_text()
        target.unlink()
        if draw.random() < 0.5:
            key = draw.choice((self._other, self._revoked))
            target.write_text(own.replace(self._own.public, key.public))
        elif draw.random() < 0.5:
            sign_object_file(self._other, path)
        return "signed by nobody who counts"


Attack = Callable[[Signed, Path, random.Random], str]
ATTACKS: tuple[Attack, ...] = (
    Signed.honest, Signed.forged, Signed.planted, Signed.planted, Signed.swapped, Signed.replayed, Signed.truncated,
    Signed.mixed, Signed.sidecar, Signed.whole_by_a_stranger,
)  # fmt: skip

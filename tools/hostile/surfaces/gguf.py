"""GGUF files that are damaged, forged or hostile, under compile and link, with llama.cpp (`make test-llamacpp`)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import tiny

from hostile.judge import Case, Step, fine
from hostile.scene import QUERY, Scene, inside
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.models import TEMPLATES
from hostile.values import mutate_bytes

_LENGTHS = (b"\xff" * 8, b"\xff" * 7 + b"\x7f", (1 << 40).to_bytes(8, "little"))
_NUMBERS = (0, 1, 2, 3, 7, 255, 1 << 20, (1 << 31) - 1, (1 << 32) - 1)
_LIMIT_S = 60.0
_FLOATS = (0.0, -1.0, 1e-38, 1e38, float("nan"), float("inf"))


def damage(data: bytes, draw: random.Random) -> bytes:
    """Cut, overwritten in the metadata or the list of tensors, or with another number in place of a length."""
    changed = bytearray(data)
    kind = draw.choice(("cut", "header", "numbers", "middle", "long"))
    if kind == "cut":
        return bytes(changed[: draw.randrange(4, len(changed))])
    if kind == "long":
        at = draw.randrange(8, 400) // 8 * 8
        changed[at : at + 8] = draw.choice(_LENGTHS)
    limit = {"header": 24, "numbers": 3000}.get(kind, len(changed) // 3)
    for _ in range(draw.randint(1, 6)):
        changed[draw.randrange(4, limit)] = draw.randrange(256)
    return bytes(changed)


def forge(path: Path, draw: random.Random) -> str:
    """Another value of one field of the metadata, in place: what no damage of bytes would give."""
    from gguf import GGUFReader

    fields = {name: field for name, field in GGUFReader(path, "r+").fields.items() if not name.startswith("GGUF.")}
    name = draw.choice(sorted(fields))
    part: Any = fields[name].parts[draw.choice(fields[name].data)]
    new = draw.choice(_FLOATS if part.dtype.kind == "f" else _NUMBERS)
    part[draw.randrange(len(part))] = np.array(new).astype(part.dtype)
    part.flush()
    return f"{name} = {new}"


class Gguf(Surface):
    """A spoilt copy of a tiny model's file. What llama.cpp aborts on, or torch cannot load, must end in one line."""

    name, weight = "gguf", 1

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        import gguf_files

        with inside(scene.root / "gguf"):
            module, path = gguf_files.random_module("llama"), Path("m.gguf")
            self._honest = gguf_files.write_gguf(
                path, module, tiny.tokenizer(), template=gguf_files.TEMPLATE
            ).read_bytes()  # fmt: skip
            self._templates = [
                gguf_files.write_gguf(path, module, tiny.tokenizer(), template=text).read_bytes()
                for text in TEMPLATES if text
            ]  # fmt: skip

    def make(self, draw: random.Random) -> Case:
        self.scene.write_texts()
        path = Path("spoilt.gguf")
        path.write_bytes(self._honest)
        kind = draw.choice(("damage", "damage", "bytes", "field", "field", "field", "template", "else"))
        if kind == "field":
            kind = forge(path, draw)
        elif kind == "else":
            kind = put_something_else(path, draw, self.scene.root / "outside")
        else:
            spoilt = {
                "damage": lambda: damage(self._honest, draw), "bytes": lambda: mutate_bytes(self._honest, draw)[0],
                "template": lambda: draw.choice(self._templates),
            }[kind]()  # fmt: skip
            path.write_bytes(spoilt)
        link = ("link", "a.txt", "b.txt", "-q", QUERY, "-m", path, "--store", "st", "--max-new-tokens", 2)
        commands = (("compile", "a.txt", "-m", path, "--store", "st"), link, (*link, "--algo", "naive", "--compare"))
        by = draw.choice(((), ("--engine", "torch")))
        names = ("spoilt", "a.txt", "no tokens", "the query")
        return Case(kind, (Step((*draw.choice(commands), *by), names, fine, limit_s=_LIMIT_S),), {}, ("st",))

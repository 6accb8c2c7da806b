"""Forged traces, with checksums that hold, under the commands that read them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from commands.run import write
from safetensors.numpy import load, save

from hostile.judge import Case, Step
from hostile.scene import POLICIES
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import check_json
from hostile.values import dumps, mutate_bytes, mutate_tree, text, value
from pictool.trace.format import _checksum

Tensors = dict[str, np.ndarray[Any, Any]]
Metadata = dict[str, str]
_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "bool", "float16", "float32", "float64")
_JSON = ("report", "target", "texts", "chunks", "pieces", "generated", "top")


def split(data: bytes) -> tuple[Tensors, Metadata]:
    length = int.from_bytes(data[:8], "little")
    return dict(load(data)), json.loads(data[8 : 8 + length])["__metadata__"]


def sealed(tensors: Tensors, metadata: Metadata) -> bytes:
    metadata = {name: held for name, held in metadata.items() if name != "checksum"}
    return save(tensors, metadata | {"checksum": _checksum(tensors, metadata)})


def a_tree(tensors: Tensors, metadata: Metadata, draw: random.Random) -> str:
    name = draw.choice((*_JSON, "report", "report", "target"))
    tree = json.loads(metadata[name])
    what = " and ".join(mutate_tree(tree, draw) for _ in range(draw.choice((1, 1, 2))))
    metadata[name] = dumps(tree, sort_keys=True)
    return f"{name}: {what}"


def a_whole_tree(tensors: Tensors, metadata: Metadata, draw: random.Random) -> str:
    name, new = draw.choice(_JSON), value(draw)
    metadata[name] = dumps(new) if draw.random() < 0.7 else text(draw).encode("utf-8", "replace").decode()
    return f"{name} = {metadata[name][:30]!r}"


def a_name(tensors: Tensors, metadata: Metadata, draw: random.Random) -> str:
    name = draw.choice(sorted(metadata))
    del metadata[name]
    return f"{name} removed"


def numbers(tensors: Tensors, metadata: Metadata, draw: random.Random) -> str:
    name = draw.choice(sorted(tensors))
    flat = tensors[name].copy().reshape(-1)
    bad: Any = draw.choice((-1, 2**31 - 1, -(2**31), 0, 1000))
    if flat.dtype == np.float32:
        bad = draw.choice((np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-40))
    for _ in range(draw.choice((1, 1, len(flat)))):
        flat[draw.randrange(len(flat))] = bad
    tensors[name] = flat.reshape(tensors[name].shape)
    return f"{bad} in {name}"


def a_shape(tensors: Tensors, metadata: Metadata, draw: random.Random) -> str:
    name = draw.choice(sorted(tensors))
    kind, old = (
        draw.choice(("flat", "one more", "cut", "empty", "scalar", "dtype", "removed", "doubled", "scores")),
        tensors[name],
    )
    changes: dict[str, Callable[[], Any]] = {
        "flat": lambda: old.reshape(-1),
        "one more": lambda: old[None],
        "cut": lambda: old[:-1],
        "empty": lambda: old[:0],
        "scalar": lambda: old.reshape(-1)[0].reshape(()),
        "doubled": lambda: np.concatenate([old, old]),
        "dtype": lambda: old.astype(draw.choice(_DTYPES)),
    }
    if kind == "removed":
        del tensors[name]
    elif kind == "scores":
        tensors["scores"] = np.full(tensors["rows"].shape[1], draw.choice((np.nan, np.inf, -1.0)), dtype=np.float32)
    else:
        with np.errstate(invalid="ignore"):
            tensors[name] = np.ascontiguousarray(changes[kind]())
    return f"{name} {kind}"


def no_tokens(tensors: Tensors, metadata: Metadata, draw: random.Random) -> str:
    """A trace of nothing: every tensor and list is empty, and they agree."""
    kind = draw.choice(("no layers", "no generated", "no chunks", "no vocabulary"))
    if kind == "no layers":
        tensors["rows"] = tensors["rows"][:0]
        target = json.loads(metadata["target"])
        target["geometry"]["layers"] = 0
        metadata["target"] = dumps(target)
    elif kind == "no generated":
        metadata["generated"] = metadata["top"] = "[]"
    elif kind == "no chunks":
        metadata["chunks"] = "[]"
        texts = json.loads(metadata["texts"])
        metadata["texts"] = dumps([texts[0], texts[-1]])
        tensors["starts"] = tensors["starts"][[0, -1]]
    else:
        tensors["logits"] = tensors["logits"][:0]
    return kind


FORGERIES: tuple[Callable[[Tensors, Metadata, random.Random], str], ...] = (
    a_tree, a_tree, a_tree, a_tree, a_tree, a_whole_tree, a_name, numbers, numbers, a_shape, a_shape, no_tokens,
)  # fmt: skip


def forge(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    tensors, metadata = split(data)
    forgery = draw.choice(FORGERIES)
    what = forgery(tensors, metadata, draw)
    if draw.random() < 0.1:  # a header that safetensors reads itself
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        what = "header: " + mutate_tree(header, draw)
        raw = dumps(header).encode("utf-8", "surrogatepass")
        return len(raw).to_bytes(8, "little") + raw + data[8 + length :], what
    return sealed(tensors, metadata), what


class Traces(Surface):
    """a.trace is forged, b.trace honest."""

    name, weight = "traces", 15

    def make(self, draw: random.Random) -> Case:
        scene, policies = self.scene, sorted(POLICIES)
        scene.write_texts()
        data = scene.traces[draw.choice(policies)]
        write("b.trace", scene.traces[draw.choice(policies)])
        kind = draw.random()
        if kind < 0.03:
            what = put_something_else(Path("a.trace"), draw, scene.root / "outside")
        else:
            new, what = mutate_bytes(data, draw) if kind < 0.12 else forge(data, draw)
            write("a.trace", new)
        scene.write_store("none")
        model = ("-m", scene.model, "--store", "st")
        commands: tuple[tuple[object, ...], ...] = (
            ("inspect", "a.trace"),
            ("inspect", "a.trace", "--text"),
            ("inspect", "a.trace", "--json"),
            ("inspect", "a.trace", "--text", "--json"),
            ("inspect", "--diff", "a.trace", "b.trace"),
            ("inspect", "--diff", "b.trace", "a.trace"),
            ("inspect", "--diff", "a.trace", "b.trace", "--json"),
            ("inspect", "--diff", "a.trace", "a.trace"),
            ("inspect", "a.trace", "b.trace"),
            ("inspect", "a.trace", "--attention", *model),
            ("inspect", "a.trace", "--against", "full", *model),
            ("inspect", "a.trace", "--attention", "--json", *model),
            ("inspect", "a.trace", "--plot", "x.svg"),
            ("inspect", "a.trace", "--against", "full", "--json", "--store", "st"),
            ("link", "a.trace", "-q", "x", *model),
        )
        weights = (6, 4, 6, 4, 4, 3, 4, 2, 2, 1, 1, 1, 0.2, 1, 0.3)
        chosen = draw.choices(commands, weights, k=draw.choice((1, 2, 2)))
        names = ("a.trace", "b.trace", "objects and traces", "--plot", "not a directory, and not found")
        steps = [Step(arguments, names, check_json(arguments)) for arguments in chosen]
        return Case(what, tuple(steps), {Path("b.trace").absolute(): Path("b.trace").read_bytes()}, ("st",))

"""Variations of model directories: every field of every file mutated, the weights damaged, files replaced."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], object]

# What a field is replaced by; texts that json does not write (10**400, 1e999) are put in by `_Raw`.
_REMOVED = object()


@dataclass(frozen=True)
class _Raw:
    """A value that is written as it is, whether JSON or not."""

    text: str


VALUES: tuple[Any, ...] = (
    _REMOVED, None, True, 0, -1, 1, 3, 7, 10**6, 10**12, 2**63, -(2**70), 0.5, -0.5, 1e-300, 1e308, _Raw("1e999"),
    _Raw("NaN"), _Raw("-Infinity"), _Raw("9" * 400), _Raw("9" * 5000), "", "x", "3", "\ud800", "../x", "a\nb",
    "A" * 100_000, [], [1], ["x"], [[]], [None] * 50, {}, {"x": 1}, {"rope_type": "default"},
)  # fmt: skip
# What a file is replaced by.
CONTENTS: dict[str, bytes] = {
    "empty": b"", "space": b" \n", "no JSON": b"{", "null": b"null", "a list": b"[]", "an object": b"{}",
    "a number": b"7",
    "a text": b'"x"', "NUL": b"\0" * 100, "no UTF-8": b"\xff\xfe{}", "UTF-16": '{"a": 1}'.encode("utf-16"),
    "deep": b"[" * 100_000, "deep objects": b'{"a":' * 50_000, "many": b"[" + b"{}," * 100_000 + b"{}]",
    "huge number": b"9" * 100_000, "NaN": b"NaN",
}  # fmt: skip


@dataclass(frozen=True)
class Variation:
    """A change of a model directory. Its name says what it does."""

    name: str
    spoil: Spoil


def variations(model: Path) -> Iterator[Variation]:
    """Every variation of a model directory, whose files are only read."""
    for name in sorted(path.name for path in model.iterdir()):
        yield from of_file(name)
        if name.endswith(".json"):
            yield from _of_json(name, json.loads((model / name).read_bytes()))
    yield from _of_header()


def sample(model: Path, count: int, seed: int) -> list[Variation]:
    """`count` of the variations, chosen at random."""
    listed = list(variations(model))
    return random.Random(seed).sample(listed, min(count, len(listed)))


def of_file(name: str) -> Iterator[Variation]:
    """What may happen to a file of a directory, whatever it holds."""
    for title, content in CONTENTS.items():
        yield Variation(f"{name} is {title}", lambda root, content=content: (root / name).write_bytes(content))  # type: ignore[misc]
    for share in (0.01, 0.3, 0.9, 0.999):
        yield Variation(f"{name} is cut at {share}", lambda root, share=share: _cut(root / name, share))  # type: ignore[misc]
    yield Variation(f"{name} is gone", lambda root: (root / name).unlink())
    yield Variation(f"{name} is a directory", lambda root: _instead(root / name, os.mkdir))
    yield Variation(f"{name} is a pipe", lambda root: _instead(root / name, os.mkfifo))
    yield Variation(
        f"{name} is /dev/zero", lambda root: _instead(root / name, lambda path: path.symlink_to("/dev/zero"))
    )
    yield Variation(f"{name} links to itself", lambda root: _instead(root / name, lambda path: path.symlink_to(name)))
    yield Variation(f"{name} is huge", lambda root: os.truncate(root / name, 1 << 40))
    for seed in range(12):
        yield Variation(f"{name} has flipped bytes ({seed})", lambda root, seed=seed: _flip(root / name, seed))  # type: ignore[misc]


def _cut(path: Path, share: float) -> None:
    os.truncate(path, int(share * path.stat().st_size))


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _flip(path: Path, seed: int) -> None:
    draw, data = random.Random(seed), bytearray(path.read_bytes())
    for _ in range(1 + seed):
        data[draw.randrange(len(data) if seed % 2 else min(len(data), 1500))] = draw.randrange(256)
    path.write_bytes(data)


def _of_json(name: str, value: Any) -> Iterator[Variation]:
    for title, text in mutations(value):
        yield Variation(f"{name}: {title}", lambda root, text=text: (root / name).write_text(text))  # type: ignore[misc]


def mutations(value: Any) -> Iterator[tuple[str, str]]:
    """A JSON value with one of its values replaced, in every place by everything in `VALUES`: a title, and the text."""
    for place in _places(value):
        for new in VALUES:
            shown = "removed" if new is _REMOVED else str(new)[:20]
            yield f"{'.'.join(map(str, place))} is {shown!r}", _replaced(value, place, new)


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the values of a JSON file are; of long lists and objects (a vocabulary) the first and the last two."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, inner in items if len(items) < 40 else items[:2] + items[-2:]:
        yield (*place, key)
        yield from _places(inner, (*place, key))


def _replaced(value: Any, place: tuple[str | int, ...], new: Any) -> str:
    whole = json.loads(json.dumps(value))
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    if new is _REMOVED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = f"@raw {new.text}@" if isinstance(new, _Raw) else new
    text = json.dumps(whole)
    return text.replace(f'"@raw {new.text}@"', new.text) if isinstance(new, _Raw) else text


def _of_header() -> Iterator[Variation]:
    """The header of the weights: entries with other types, shapes and places."""
    changes: dict[str, Any] = {
        "dtype": ["F64", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "X", "", 3, None],
        "shape": [[], [0], [-1], [1], [10**12], [10**12, 10**12], [0.5], "x", None, [True], [2**63]],
        "data_offsets": [
            [0, 0], [0, 1], [0], [], [1, 0], [-4, 4], [0, 10**15], [2**64, 2**64], "x", None, [0.5, 1],
            _Raw("[0,1e400]"), [None, None],
        ],
    }  # fmt: skip
    for field, values in changes.items():
        for value in (*values, _REMOVED):
            for index in (0, 5, -1):
                shown = "removed" if value is _REMOVED else value
                yield Variation(
                    f"weights: {field} of tensor {index} is {shown}",
                    lambda root, change=(index, field, value): _rewrite(root, *change),  # type: ignore[misc]
                )
    for length in (0, 1, 7, 2**31, 2**62, 2**64 - 1):
        yield Variation(f"weights: header of {length} bytes", lambda root, length=length: _set_length(root, length))  # type: ignore[misc]
    for index in (0, 5, -1):
        for name in (None, "x"):
            yield Variation(
                f"weights: tensor {index} is called {name}",
                lambda root, change=(index, name): _rename(root, *change),  # type: ignore[misc]
            )
    yield Variation("weights: NaN", lambda root: _fill(root, b"\xff\xff\xff\xff"))
    yield Variation("weights: infinite", lambda root: _fill(root, b"\x00\x00\x80\x7f"))
    yield Variation("weights: huge", lambda root: _fill(root, b"\xff\xff\x7f\x7f"))


def _weights(root: Path) -> Path:
    return min(root.glob("*.safetensors"))


def _split(root: Path) -> tuple[dict[str, Any], bytes]:
    data = _weights(root).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def _join(root: Path, header: str, body: bytes) -> None:
    _weights(root).write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + body)


def _rewrite(root: Path, index: int, field: str, value: Any) -> None:
    header, body = _split(root)
    entry = header[sorted(header.keys() - {"__metadata__"})[index]]
    if value is _REMOVED:
        del entry[field]
    else:
        entry[field] = f"@raw {value.text}@" if isinstance(value, _Raw) else value
    text = json.dumps(header)
    _join(root, text if not isinstance(value, _Raw) else text.replace(f'"@raw {value.text}@"', value.text), body)


def _rename(root: Path, index: int, name: str | None) -> None:
    header, body = _split(root)
    entry = header.pop(sorted(header.keys() - {"__metadata__"})[index])
    _join(root, json.dumps(header if name is None else header | {name: entry}), body)


def _fill(root: Path, word: bytes) -> None:
    header, body = _split(root)
    _join(root, json.dumps(header), word * (len(body) // 4))


def _set_length(root: Path, length: int) -> None:
    path = _weights(root)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])

"""Hostile values, and mutations of JSON trees, texts and bytes: pure functions of a `random.Random`.

A number that Python's `json` cannot write (`1e400`), or a name that is there twice, is a `RAW` text: `dumps` writes
what is in it as it is.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
Path = tuple[Any, ...]  # to a value within a tree: names and indices
_RAW = "<<raw:{}>>"
_SIDES = (
    "\u202e",
    "\ufeff",
    "\x00",
    "\x1b[2J\x1b]0;own\x07",
    "\x9b31m",
    "\ud800",
    "\udfff",
    "\r\n",
    "\n",
    "\u2028",
    "[/]",
)

TEXTS = (
    "", " ", "x", "0", "-1", "1.5", "NaN", "None", "null", "none", "zstd", "int4", "nosuch", "../../outside/escape",
    "/etc/passwd", "~/x", "%s%n", "{query}", "{{7*7}}", "${HOME}", "'; DROP TABLE objects", "9" * 30, "9" * 5000,
    "a" * 64, "é" * 40, "\U0001f642" * 9, "[bold red]x[/]", "[/nosuch]", "con", "a/b", "a\\b", "x" * 70_000,
    *_SIDES, *(f"a{side}b" for side in _SIDES),
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63),
    0.0, -0.0, 0.5, -0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), _RAW.format("1e400"),
    _RAW.format("-1e400"), _RAW.format("9" * 5000), True, False,
)  # fmt: skip
SHAPES: tuple[Any, ...] = (
    None,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [[[[[[]]]]]],
    [0] * 1000,
    {"a": {"a": {}}},
    _RAW.format("[" * 5000 + "]" * 5000),
    _RAW.format('{"a":' * 3000 + "1" + "}" * 3000),
    _RAW.format('{"a":1,"a":2}'),
)


def dumps(tree: Any, ensure_ascii: bool = True, **style: Any) -> str:
    """The JSON of a tree, with its raw texts as they are."""
    text = json.dumps(tree, ensure_ascii=ensure_ascii, **style)
    return re.sub(r'"<<raw:(.*?)>>"', lambda found: json.loads(f'"{found[1]}"'), text)


def text(draw: random.Random) -> str:
    return draw.choice(TEXTS)


def value(draw: random.Random) -> Any:
    """A hostile value of any kind, which a caller may change."""
    return copy.deepcopy(draw.choice(draw.choice((TEXTS, NUMBERS, SHAPES))))


def places(tree: Any, above: Path = ()) -> Iterator[Path]:
    """The paths of all values within a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, item in items:
        yield (*above, name)
        yield from places(item, (*above, name))


def mutate_tree(tree: Any, draw: random.Random) -> str:
    """Change one place of a JSON tree; returns what was done."""
    path = draw.choice(list(places(tree)) or [()])
    if not path:
        return "nothing"
    holder = tree
    for name in path[:-1]:
        holder = holder[name]
    name, where = path[-1], "/".join(map(str, path))
    kind = draw.randrange(8)
    if kind == 0:
        del holder[name]
        return f"{where} removed"
    if kind == 1 and isinstance(holder, dict):
        other = text(draw)
        holder[other] = holder.pop(name)
        return f"{where} renamed {other[:20]!r}"
    if kind == 2 and isinstance(holder, list):
        holder.insert(name, json.loads(json.dumps(holder[name])))
        return f"{where} doubled"
    holder[name] = nearby(holder[name], draw) if kind == 3 else value(draw)
    return f"{where} = {str(holder[name])[:40]!r}"


def nearby(old: Any, draw: random.Random) -> Any:
    """A value of the same type that differs a little."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return draw.choice((old + 1, old - 1, -old, old * 2, old << 20, 0))
    if isinstance(old, float):
        return draw.choice((-old, old * 1e30, old / 1e30, 0.0))
    if isinstance(old, str):
        at = draw.randrange(len(old) + 1)
        return draw.choice((old[:at], old[:at] + text(draw) + old[at:], old[::-1], old * 50, old.upper()))
    if isinstance(old, list):
        return draw.choice((old[:-1], old * 2, old[::-1], [old]))
    return value(draw)


def mutate_bytes(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Damage without knowledge of the format."""
    size, changed = max(len(data), 1), bytearray(data or b"\0")
    kind = draw.choice(("flip", "cut", "lengthen", "move", "fill", "empty", "noise", "text"))
    if kind == "flip":
        for _ in range(draw.choice((1, 1, 3, 20))):
            changed[draw.randrange(size)] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[draw.randrange(size) :]
    elif kind == "lengthen":
        changed += draw.randbytes(draw.choice((1, 8, 4096)))
    elif kind == "move":
        start, to = draw.randrange(size), draw.randrange(size)
        changed[to:to] = changed[start : start + draw.randrange(1, 64)]
    elif kind == "fill":
        start, byte = draw.randrange(size), draw.choice((0, 0xFF, 0x20))
        changed[start : start + draw.choice((1, 8, 64))] = bytes([byte]) * 8
    else:
        changed = bytearray({"empty": b"", "noise": draw.randbytes(200), "text": b"hello\n"}[kind])
    return bytes(changed), f"bytes: {kind}"


def mutate_text(old: str, draw: random.Random) -> tuple[str, str]:
    """Damage to a text that may still be of its language."""
    at = draw.randrange(len(old) + 1)
    end = min(len(old), at + draw.randrange(1, 12))
    done: dict[str, Callable[[], str]] = {
        "insert": lambda: old[:at] + text(draw) + old[at:],
        "remove": lambda: old[:at] + old[end:],
        "double": lambda: old[:end] + old[at:],
        "swap": lambda: old[:at] + old[at:end][::-1] + old[end:],
    }
    kind = draw.choice(sorted(done))
    return done[kind](), f"text: {kind} at {at}"


def encode(text: str) -> bytes:
    """UTF-8, with lone surrogates as three bytes each (which is not UTF-8)."""
    return text.encode("utf-8", "surrogatepass")

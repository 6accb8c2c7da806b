"""JSON schemas of clients: nested, long, chains of references, patterns, numbers at the edges (`tests/following.py`).

Each is refused, or an answer that ends is of it, within a bound of time and memory; no process but its own ends.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from following import follow

from hostile.judge import Case, Step
from hostile.surfaces.base import Surface
from hostile.values import NUMBERS, SHAPES, dumps, mutate_tree

LIMIT_S = 12.0  # a trial's and the answer's: the judge says what is longer, so it may be reached
Schema = dict[str, Any]
_EDGES = (
    *(number for number in NUMBERS if isinstance(number, int | float) and abs(number) < float("inf")),
    *(2**53, 2**53 - 1, 1 - 2**53, 2**62 + 1, -(2**62), 1 - 2**63, 0.1, 1 / 3, 1e15, 1e16, 1e23, 1e-7, 5e-324, 99, 7),
)
_PATTERNS = (
    "^[a-z]{1,8}$", r"^\d{4}-\d{2}-\d{2}$", r"^\S+@\S+\.\w+$", "a|b", "", "^$", "é+", "[^a]{3}", "(?i)abc", "x{0,300}",
    "a{1000}", ".*a.{20}", ".*a.{2000}", ".*b.{3}", "(((a|ab|abc)*.{0,30})*x.{30})*y", "((a{0,50}){0,50}b){0,50}",
    r"(\p{L}|\p{N}\w*.{0,100})*\p{Lu}", "(?=a)b", r"\bword\b", r"(a)\1", "(", "[z-a]", "a{2,1}", "a{99999999}", "\\",
    "^a^b$",
)  # fmt: skip
_FORMATS = ("date", "date-time", "uuid", "ipv4", "email", "uri", "nonsense", "")
_WORDS = ("a", "b", "name", "minimum", "$ref", "é", "x y", '"', "\\", "", "\x7f", "a/b", "~0")


def _leaf(draw: random.Random) -> Schema:
    kind = draw.choice(("number", "number", "text", "text", "enum", "const", "null"))
    if kind == "number":
        keys = draw.sample(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), draw.choice((0, 1, 1, 2))
        )
        return {"type": draw.choice(("integer", "number")), **{key: draw.choice(_EDGES) for key in keys}}
    if kind == "text":
        bounds = {
            key: draw.choice((0, 1, 5, 300, 10**6, 2**63))
            for key in draw.sample(("minLength", "maxLength"), draw.choice((0, 0, 1)))
        }
        own = draw.choice(
            (
                {},
                {"pattern": draw.choice(_PATTERNS)},
                {"pattern": draw.choice(_PATTERNS)},
                {"format": draw.choice(_FORMATS)},
            )
        )
        return {"type": "string", **bounds, **own}
    values = [draw.choice((*_WORDS, *_EDGES, True, None, [1, 2], {"a": 0.5})) for _ in range(draw.choice((1, 2, 9)))]
    return {"enum": values} if kind == "enum" else {"const": values[0]} if kind == "const" else {"type": "null"}


def _nested(draw: random.Random, depth: int) -> Schema:
    """A schema of a few kinds of parts, so deep."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice((_leaf(draw), _leaf(draw), {"$ref": f"#/$defs/{draw.choice('ab')}"}, {"$ref": "#"}, {}))
    inner = [_nested(draw, depth - 1) for _ in range(draw.choice((1, 2, 3)))]
    names = draw.sample(_WORDS, len(inner))
    named = dict(zip(names, inner, strict=True))
    kinds: tuple[Schema, ...] = (
        {"type": "object", "properties": named, "required": names[:1], "additionalProperties": False},
        {"type": "object", "properties": named, "required": names[: draw.choice((0, 9))]},
        {"type": "object", "properties": named}, {"type": "object", "additionalProperties": inner[0]},
        {"type": "object", "patternProperties": {draw.choice(_PATTERNS[:4]): inner[0]}, "additionalProperties": False},
        {"type": "array", "items": inner[0], "minItems": draw.choice((0, 1, 3)), "maxItems": draw.choice((3, 10**9))},
        {"type": "array", "prefixItems": inner, "items": False}, {"anyOf": inner}, {"anyOf": inner}, {"allOf": inner},
        {"oneOf": inner}, {"not": inner[0]},
    )  # fmt: skip
    return draw.choice(kinds)


def _tree(draw: random.Random) -> Schema:
    defs = {"a": _nested(draw, 1), "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 3}}
    return _nested(draw, draw.choice((1, 2, 3, 4, 8))) | {"$defs": defs}


def _chain(draw: random.Random) -> Schema:
    """Definitions that each refer to the next."""
    links: tuple[Callable[[Schema], Schema], ...] = (
        lambda ref: ref, lambda ref: {"type": "array", "items": ref, "maxItems": 1}, lambda ref: {"allOf": [ref]},
        lambda ref: {"anyOf": [ref, {"type": "null"}]}, lambda ref: {"anyOf": [ref, ref]}, lambda ref: {"oneOf": [ref]},
        lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]}, lambda ref: {"allOf": [ref, ref]},
        lambda ref: {"type": "object", "properties": {"a": ref, "b": ref}}, lambda ref: {"items": [ref]},
        lambda ref: {"type": "object", "patternProperties": {"^a": ref}},
    )  # fmt: skip
    size, some = draw.choice((2, 20, 80, 126, 254, 300, 1500)), draw.sample(links, draw.choice((1, 1, 2)))
    key, base = draw.choice(("$defs", "definitions")), draw.choice(("", "", "", "http://x/y"))
    defs = {f"a{i}": draw.choice(some)({"$ref": f"{base}#/{key}/a{i + 1}"}) for i in range(size)}
    end = draw.choice((_leaf(draw), {"$ref": f"#/{key}/a0"}, {"$ref": "#"}))
    return ({"$id": base} if base else {}) | {"$ref": f"#/{key}/a0", key: defs | {f"a{size}": end}}


def _patterned(draw: random.Random) -> Schema:
    """Several patterns of one text, or of several."""
    size = draw.choice((1, 2, 3, 6, 12, 20))
    tail = draw.choice(("", ".{2}", ".{20}", ".{200}", "(x|y)*z", "[^q]{5}$"))
    texts = [{"type": "string", "pattern": f".*{chr(97 + i)}{tail}"} for i in range(size)]
    if draw.random() < 0.3:
        return {"type": "object", "properties": {f"p{i}": text for i, text in enumerate(texts)}, "required": ["p0"]}
    return {draw.choice(("allOf", "anyOf")): texts}


def _large(draw: random.Random) -> Schema:
    """Many parts in one place."""
    size, kind = draw.choice((10, 400, 600, 1900, 2100, 9000)), draw.choice(("optional", "required", "enum", "anyOf"))
    if kind == "enum":
        return {"enum": [f"value {i}" for i in range(size)]}
    if kind == "anyOf":
        return {
            "anyOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(size)]
        }
    parts = {f"p{i}": _leaf(draw) if size < 500 else {"type": "boolean"} for i in range(size)}
    return {"type": "object", "properties": parts, "required": [*parts] if kind == "required" else []}


class Schemas(Surface):
    """Generated schemas; some are changed somewhere, to what a schema cannot be."""

    name: ClassVar[str] = "schemas"
    weight: ClassVar[int] = 2

    def make(self, draw: random.Random) -> Case:
        make = draw.choice((_tree, _tree, _tree, _tree, _leaf, _leaf, _chain, _patterned, _large))
        schema, what = make(draw), make.__name__.strip("_")
        if draw.random() < 0.15:
            what += f" {mutate_tree(schema, draw)}"
        elif draw.random() < 0.03:
            schema = draw.choice(SHAPES)
        Path("schema.json").write_text(dumps(schema))
        step = Step((follow.__name__, "schema.json", "--seed", draw.randrange(99)), ("schema",), limit_s=LIMIT_S)
        return Case(f"{what}: {json.dumps(schema, default=str)[:1500]}", (step,))

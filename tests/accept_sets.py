"""Schemas, and texts that an answer of each may be, or may not: ours (llguidance), and vLLM's default (xgrammar).

`tests/serve/structured_test.py` holds ours against it, `tests/in_vllm/structured_test.py` both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A schema, and texts of JSON by who accepts them."""

    schema: Schema
    both: Sequence[str]
    none: Sequence[str]
    ours: Sequence[str] = ()
    theirs: Sequence[str] = ()


def texts(*values: Any) -> list[str]:
    return [json.dumps(value, ensure_ascii=False) for value in values]


def text(**more: Any) -> Schema:
    return {"type": "string"} | more


def fields(required: str = "ab", **more: Any) -> Schema:
    return {"type": "object", "properties": {"a": {"type": "integer"}, "b": text()}, "required": [*required]} | more


WHOLE: Schema = {"type": "integer"}
CLOSED: Schema = {"additionalProperties": False}
TREE = {
    "type": "object", **CLOSED, "required": ["v", "n"],
    "properties": {"v": WHOLE, "n": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
}  # fmt: skip
PETS = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, field: WHOLE}, "required": ["kind", field]}
        for kind, field in (("cat", "lives"), ("dog", "age"))
    ]
}
FORMATS = {  # texts that are of a format, and that are not
    "date": (["2024-02-29"], ["2024-2-9", "x"]), "time": (["12:30:45Z", "12:30:45+01:00"], ["25:00:00Z", "x"]),
    "date-time": (["2024-02-29T12:30:45Z"], ["2024-02-29"]), "duration": (["P3DT4H"], ["x"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["x"]), "email": (["a@b.co"], ["a", "@"]),
    "ipv4": (["127.0.0.1"], ["256.1.1.1", "x"]), "ipv6": (["::1", "2001:db8::1"], ["x"]),
    "uri": (["https://a.b/c"], ["not a uri"]), "hostname": (["a.example.com"], ["-a-", "a b"]),
}  # fmt: skip
CASES = [
    # Escapes that JSON can do without are theirs alone
    Case(text(), [*texts("", "a", "é\n", "\\", '"')], [*texts(1, None), '"\t"', '"\\x"', "'a'", '"a'],
         theirs=['"\\u0041"', '"\\/"', '"\\ud83d\\ude00"']),
    Case(text(minLength=2, maxLength=3), texts("ab", "abc", "éé", "😀😀"), texts("a", "abcd")),
    Case(text(pattern="^[a-z]{2,3}$"), texts("ab", "abc"), texts("a", "abcd", "AB")),
    # A pattern may be anywhere in a text, as JSON Schema has it
    Case(text(pattern="[0-9]+"), texts("5", "55"), texts("ab"), ours=texts("a5b")),
    Case(text(pattern="^[a-z]+$", maxLength=2), texts("a", "ab"), texts("abc", "A")),
    Case(text(pattern=r"^(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}$"), texts("555-1212", "(888)555-1212"), texts("555")),
    *(Case(text(format=name), texts(*good), texts(*bad)) for name, (good, bad) in FORMATS.items()),
    Case(WHOLE, [*texts(0, 1, -1, 10), "12345678901234567890123"], [*texts(1.5, "1"), "01", "1.0", "1e3", "+1"],
         ours=["-0"]),
    Case(WHOLE | {"minimum": 0, "maximum": 120}, texts(0, 7, 120), texts(121, -1)),
    Case(WHOLE | {"exclusiveMinimum": 0, "exclusiveMaximum": 10}, texts(1, 9), texts(0, 10)),
    Case({"type": "number"}, [*texts(0, 1.5, -2.25), "1e5", "1E-5", "-0.0"], [".5", "5.", "01.5", "NaN"]),
    Case({"type": "number", "minimum": 0, "maximum": 1}, [*texts(0, 0.5, 1), "0.0", "1.0"], texts(1.01, -0.1)),
    Case({"type": "boolean"}, texts(True, False), [*texts(None, 0), "True"]),
    Case({"type": "null"}, texts(None), texts(0, "null")),
    Case({"type": ["string", "null"]}, texts(None, "a"), texts(1)),
    # White space within a value that is given
    Case({"enum": ["a", 1, None, {"k": 1}, [1]]}, [*texts("a", 1, None, [1]), '{"k":1}'], texts("b", 2),
         ours=['{"k": 1}']),
    Case({"const": "x"}, texts("x"), texts("y")),
    # White space but for a blank after a comma or colon is theirs alone
    Case(fields(**CLOSED), [*texts({"a": 1, "b": "x"}), '{"a":1,"b":"x"}'],
         [*texts({"b": "x", "a": 1}, {"a": 1}, {"a": 1, "b": "x", "c": 1}, {"a": "1", "b": "x"}),
          '{"a":1,"b":"x",}', '{"a":1,"a":1,"b":"x"}'],
         theirs=['{\n  "a": 1,\n  "b": "x"\n}', '{"a":  1,"b":"x"}', '{ "a" : 1 , "b" : "x" }']),
    Case(fields(), texts({"a": 1, "b": "x"}), texts({"a": 1}, {"a": 1, "b": "x", "c": 1})),
    Case(fields("a"), texts({"a": 1}, {"a": 1, "b": "x"}), texts({}, {"b": "x"})),
    Case(fields(""), texts({}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}), texts({"c": 1})),
    Case(fields("b"), texts({"b": "x"}, {"a": 1, "b": "x"}), texts({"a": 1})),
    Case(fields(additionalProperties={"type": "boolean"}),
         texts({"a": 1, "b": "x"}, {"a": 1, "b": "x", "c": True, "d": False}), texts({"a": 1, "b": "x", "c": 1})),
    Case({"type": "object", "properties": {}}, texts({}), texts({"a": 1}), theirs=["{ }"]),
    Case({"type": "object", "additionalProperties": WHOLE}, texts({}, {"x": 1, "y": 2}), texts({"x": "1"})),
    Case({"type": "object"}, texts({}, {"x": [1, {"y": None}]}), texts([], 1)),
    Case({"type": "object", "properties": {"in": fields("")}, "required": ["in"]},
         texts({"in": {"a": 1}}), texts({"in": {"c": 1}}, {})),
    # A name that must be there, and has no schema: theirs leaves it out
    Case({"type": "object", "required": ["z"], "properties": {}}, [], [], ours=texts({"z": 1}), theirs=texts({})),
    Case({"type": "array"}, texts([], [1, "a", None, {}]), texts({})),
    Case({"type": "array", "items": WHOLE}, [*texts([], [1, 2, 3]), "[1,2]"], [*texts(["1"]), "[1,]"],
         theirs=["[ 1 , 2 ]"]),
    Case({"type": "array", "items": WHOLE, "minItems": 1, "maxItems": 2}, texts([1], [1, 2]), texts([], [1, 2, 3])),
    Case({"type": "array", "prefixItems": [text(), WHOLE], "items": False},
         texts(["a", 1], ["a"], []), texts(["a", 1, 2], [1, "a"])),
    # More items than are named
    Case({"type": "array", "prefixItems": [text(), WHOLE]},
         texts(["a", 1], ["a"]), texts([1]), ours=texts(["a", 1, 2])),
    Case({"anyOf": [text(), WHOLE]}, texts("a", 1), texts(None, 1.5)),
    Case({"anyOf": [fields(), {"type": "null"}]}, texts({"a": 1, "b": "x"}, None), texts({"a": 1, "b": "x", "c": 1})),
    Case({"oneOf": [text(), WHOLE]}, texts("a", 1), texts(None)),
    Case(PETS, texts({"kind": "cat", "lives": 9}, {"kind": "dog", "age": 3}), texts({"kind": "cat", "age": 3})),
    Case({"allOf": [fields(**CLOSED)]}, texts({"a": 1, "b": "x"}), texts({"a": 1})),
    Case({"allOf": [text(), {"enum": ["yes", "no"]}]}, texts("yes", "no"), texts("maybe", 1)),
    Case({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
         texts({"v": 1, "n": None}, {"v": 1, "n": {"v": 2, "n": None}}), texts({"v": 1}, {"v": 1, "n": {}})),
    Case({"type": "object", "properties": {"k": {"$ref": "#/definitions/p"}}, "required": ["k"],
          "definitions": {"p": {"enum": ["x", "y"]}}}, texts({"k": "x"}), texts({"k": "z"})),
    Case({}, texts(1, "a", None, [], {}, [1, {"a": 2}]), []),
    Case(WHOLE | {"multipleOf": 5}, texts(0, 5, 10), texts(7)),
    Case({"type": "object", "properties": {"a": text(description="d", title="t", default="x", examples=["y"])},
          "required": ["a"], "$schema": "https://json-schema.org/draft/2020-12/schema"}, texts({"a": "x"}), texts({})),
    # Theirs takes the pattern for one of names that no other text may follow
    Case({"type": "object", "patternProperties": {"^x_": WHOLE}, **CLOSED}, texts({}), texts({"y": 1}, {"x_a": "1"}),
         ours=texts({"x_a": 1})),
]  # fmt: skip
# Schemas that ours refuses. With what theirs accepts of them, though it is not of the schema; None: refused there too.
REFUSED: list[tuple[Schema, str | None]] = [
    ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}, "4"),
    ({"not": text()}, '"a"'), ({"if": text(), "then": {"minLength": 2}}, '"a"'),
    (fields("", dependentRequired={"a": ["b"]}), '{"a": 1}'),
    ({"type": "array", "items": WHOLE, "uniqueItems": True}, None), ({"type": "array", "contains": WHOLE}, None),
    (text(format="path"), None),
]  # fmt: skip

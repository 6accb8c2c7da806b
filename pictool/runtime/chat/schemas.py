"""JSON schemas of others: their bounds, their grammars, and the process that tries a grammar before it is used here.

llguidance compiles a schema. It recurses as deep as the schema does, and some patterns take it minutes or gigabytes, so
a bounded process (`bounded_process.py`), which is this module too, compiles each schema first and chooses a few tokens
by it. A request has `schema`; a reply `problem`, or null.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import resource
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import unquote

from pictool.bounded_process import BoundedProcess, ProcessFailure, serve_requests
from pictool.errors import InputError
from pictool.needs import require_extra

MAX_SCHEMA = 1 << 18  # characters
MAX_DEPTH = 256  # schemas within each other, those of a $ref included
MAX_PROPERTIES = 2000  # of all objects together
MAX_PATTERNS, MAX_PATTERN_CHARS = 500, 1 << 15  # in all
MAX_NUMBER = 2**53 - 1  # llguidance has floats: of larger whole numbers it takes another (RFC 8259 §6)
Schema = dict[str, Any]
LIMIT_S, LIMIT_BYTES = 3.0, 256 << 20  # of one trial
_STACK = 2 << 20  # bytes, a quarter of what a thread of the server has
_TRIAL_TOKENS = 32
_MAX_VERDICTS = 4096  # schemas that are known to be followed, or not
_process = BoundedProcess("pictool.runtime.chat.schemas", LIMIT_S, LIMIT_BYTES)
_verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # what is wrong with a schema, by its digest
# White space is at most a blank after `,` and `:`: a small model prints it for ever. A schema cannot say otherwise.
_OPTIONS: Any = {
    "whitespace_flexible": False, "whitespace_pattern": None, "item_separator": ", ?", "key_separator": ": ?",
    "lenient": False, "coerce_one_of": False,
}  # fmt: skip
# Beside these, properties that an object's schema does not name may be those of another schema.
_OPEN = {*"additionalProperties patternProperties unevaluatedProperties minProperties anyOf oneOf $ref".split()}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # what has schemas by name, and one or a list:
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")  # schemas of the same value
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBERS = (*_BOUNDS, "multipleOf", "const", "enum")
_TOO_COMPLEX = "its patterns are too complex, singly or together"
_PLAIN = {
    "NoExtension": "no value fits it", "Current row has": "too many optional properties or alternatives in one place",
    "Unable to determine if regex is empty": _TOO_COMPLEX, "too many expressions": _TOO_COMPLEX,
    "lexer error": _TOO_COMPLEX, "regex parse error:\n    -": "a number has too many digits",
}  # fmt: skip


def is_tried(schema: str) -> bool:
    """Whether `require_schema` knows the answer."""
    return _digest(schema) in _verdicts


def require_schema(schema: str) -> None:
    """Refuse a schema that cannot be followed, or is not followed here. It may take `LIMIT_S`, in another process.

    Raises:
        InputError: it is invalid, too large, takes too long, or has what llguidance does not know; or that is not
            installed.
    """
    require_extra("structured", "a JSON schema", "llguidance")
    digest = _digest(schema)
    if digest not in _verdicts:
        grammar_of(schema)  # its bounds
        try:
            problem = _process.ask({"schema": schema})["problem"]
        except ProcessFailure as error:
            raise refused(str(error)) from error
        _verdicts[digest] = problem
        if len(_verdicts) > _MAX_VERDICTS:
            _verdicts.popitem(last=False)
    if (found := _verdicts[digest]) is not None:
        raise InputError(found)


def _digest(schema: str) -> bytes:
    return hashlib.sha256(schema.encode()).digest()


def grammar_of(schema: str) -> str:
    """The grammar of the JSON values that are of a schema.

    Raises:
        InputError: it is no schema, or crosses a bound, which the error names.
    """
    from llguidance import LLMatcher

    if len(schema) > MAX_SCHEMA:
        raise InputError(f"schema too large: {len(schema)} characters, but at most {MAX_SCHEMA} are allowed")
    try:
        read = json.loads(schema)
        if isinstance(read, dict):
            _require_bounds(read)
        closed = read if '"allOf"' in schema else _closed(read)
        return str(LLMatcher.grammar_from_json_schema(json.dumps(closed), overrides=_OPTIONS))
    except (ValueError, RecursionError) as error:
        raise refused(str(error)) from error


def refused(problem: str) -> InputError:
    """The error for a schema that llguidance does not follow, without what it says of its own state."""
    said = problem.partition("\n<state>")[0].partition("<grammar>")[0]
    plain = next((text for sign, text in _PLAIN.items() if sign in said), None)
    if plain is None and "\nerror: " in said:  # of a pattern, which is printed first
        plain = f"a pattern: {said.rpartition('error: ')[2]}"
    return InputError(f"unsupported schema: {' '.join((plain or said).split())[:300]}")


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern of a schema matches somewhere in a text, in time that is linear in the text."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer(), _pattern_grammar(pattern), log_level=0)
    value = json.dumps(text, ensure_ascii=False).encode(errors="replace")
    return bool(matcher.consume_tokens(tokenizer().tokenize_bytes(value)) and matcher.is_accepting())


@lru_cache(256)
def _pattern_grammar(pattern: str) -> str:
    return grammar_of(json.dumps({"type": "string", "pattern": pattern}))


@lru_cache(1)
def tokenizer() -> Any:
    """llguidance's form of the embedded model's tokenizer: grammars are tried with the same one for every model."""
    from llguidance import LLTokenizer

    return LLTokenizer(str(Path(__file__).parents[2] / "models" / "base" / "tokenizer.json"))


# Bounds


def _require_bounds(schema: Schema) -> None:
    """Refuse a schema that is too deep, has too many parts, or numbers that would not be followed exactly."""
    parts, heights = dict[int, Schema](), dict[int, int]()  # schemas, and how many are within each other there, by id
    stack = [(schema, False)]
    while stack:
        part, is_measured = stack.pop()
        inner = list(_within(part, schema)) if is_measured or id(part) not in parts else []
        if is_measured:  # of what it is within itself ($ref) there is no height yet
            heights[id(part)] = 1 + max((heights.get(id(child), 0) for child in inner), default=0)
        elif id(part) not in parts:
            parts[id(part)] = part
            stack += [(part, True), *((child, False) for child in inner)]
    patterns = [pattern for part in parts.values() for pattern in _patterns(part)]
    for most, count, what in (
        (MAX_DEPTH, heights[id(schema)], "schemas within each other (through $ref, too)"),
        (MAX_PROPERTIES, sum(len(_named(part, "properties")) for part in parts.values()), "properties"),
        (MAX_PATTERNS, len(patterns), "patterns"),
        (MAX_PATTERN_CHARS, sum(map(len, patterns)), "characters in its patterns"),
    ):
        if count > most:
            raise InputError(f"schema too complex: {count} {what}, but at most {most} are allowed")
    for part in parts.values():
        _require_exact(part)
    for group in _groups(parts, schema):
        _require_exclusive(group)


def _within(schema: Schema, root: Schema, keys: Sequence[str] = (*_MAPS, *_INNER, "$ref")) -> Iterator[Schema]:
    """The schemas in a schema, and that of its $ref."""
    for key in keys:
        value = schema.get(key)
        if key == "$ref":
            value = _resolved(value, root) if isinstance(value, str) else None
        elif isinstance(value, dict) and key in _MAPS:
            value = [*value.values()]
        yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, dict))


def _groups(parts: Mapping[int, Schema], root: Schema) -> list[list[Schema]]:
    """Schemas that may be of the same value, together."""
    groups = {name: [part] for name, part in parts.items()}
    for part in parts.values():
        for child in _within(part, root, _IN_PLACE):
            small, large = sorted((groups[id(part)], groups[id(child)]), key=len)
            if small is not large:
                large += small
                groups.update((id(other), large) for other in small)
    return [*{id(group): group for group in groups.values()}.values()]


def _named(schema: Schema, key: str) -> dict[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def _resolved(ref: str, root: Schema) -> Any:
    """What a JSON pointer within the schema points at; None for another reference, or one to nothing."""
    document, _, pointer = ref.partition("#")
    found: Any = None if document else root
    for step in unquote(pointer).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and len(step) < 7 and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found


def _patterns(schema: Schema) -> list[str]:
    own = schema.get("pattern")
    return [*_named(schema, "patternProperties"), *([own] if isinstance(own, str) else [])]


def _require_exact(schema: Schema) -> None:
    """Refuse numbers that llguidance would change."""
    for key in _NUMBERS:
        values = [schema.get(key)]
        while values:
            value = values.pop()
            if isinstance(value, list | dict):
                values += value.values() if isinstance(value, dict) else value
            elif _is_number(value) and abs(value) > MAX_NUMBER:
                raise InputError(f"the schema has {str(value)[:40]} in {key}; use numbers up to ±{MAX_NUMBER}")


def _require_exclusive(schemas: Sequence[Schema]) -> None:
    """Refuse an exclusive bound that is whole beside one within 1 of it: llguidance allows the 0 of 0 < x < 0.5."""
    bounds = [bound for schema in schemas for key in _BOUNDS if _is_number(bound := schema.get(key)) and bound % 1]
    near = {round_(bound) for bound in bounds for round_ in (math.floor, math.ceil)}
    for schema in schemas:
        for key in _BOUNDS[2:]:
            plain = key.removeprefix("exclusive").lower()
            bound = schema.get(plain) if schema.get(key) is True else schema.get(key)  # so draft 4 says it
            if _is_number(bound) and bound in near:
                raise InputError(f"the schema has {bound} in {key}, within 1 of another bound; use {plain}")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name: a model may add some for ever. vLLM's default does so."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    named, required = schema.get("properties"), schema.get("required", [])
    inner = ("items", "prefixItems", "additionalProperties", *(() if named else ("anyOf", "oneOf")))
    closed = schema | {key: _closed(schema[key]) for key in inner if key in schema}
    for key in ("properties", "$defs", "definitions"):
        if isinstance(parts := schema.get(key), dict):
            closed[key] = {name: _closed(part) for name, part in parts.items()}
    if isinstance(named, dict) and isinstance(required, list) and not _OPEN & schema.keys():
        closed |= {} if {*map(str, required)} - named.keys() else {"additionalProperties": False}
    return closed


# The process


def try_schema(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request: why a schema is not followed, or None."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer(), grammar_of(request["schema"]), log_level=0)
    except InputError as error:
        return {"problem": str(error)}
    draw, num_tokens = random.Random(0), 0
    while num_tokens < _TRIAL_TOKENS and not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        if not matcher.is_error():
            matcher.consume_token(_drawn(mask, draw))
        num_tokens += 1
    return {"problem": str(refused(matcher.get_error())) if matcher.is_error() else None}


def _drawn(mask: bytes, draw: random.Random) -> int:
    """A token of a mask, that has at least one."""
    size, start = 8 * len(mask), draw.randrange(8 * len(mask))
    return next(i % size for i in range(start, start + size) if mask[i % size // 8] >> i % 8 & 1)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    serve_requests(try_schema, float(sys.argv[1]), int(sys.argv[2]))

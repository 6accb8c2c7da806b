"""The process that parses answers (`bounded_process.py`), which `parsing.py` starts: `transformers`' response parser.

A template has patterns, which come with a model and may take for ever. A request has `id`, of an answer, and `text`,
more of it; its first one also `start` (`template`, `prefix`, `tools`, `takes_calls`), its last one `end` (the text of
the end token, or null). A reply has `parts`, each `[kind, value]`: "text", "reasoning", "call" with `[name, JSON]`; and
`held`, how many characters at the end of the text no part has yet. Or `failure`.

An answer is read by characters, so that its parts do not depend on how it was cut.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from pictool.bounded_process import serve_requests
from pictool.reading import require_shape
from pictool.runtime.schemas import matches

MAX_ANSWERS = 4096  # that are parsed at once; more, and the oldest is given up
_KINDS = {"content": "text", "thinking": "reasoning", "reasoning": "reasoning", "reasoning_content": "reasoning"}
_CALLS = "tool_calls"
_BROKEN = (ValueError, KeyError, TypeError, RecursionError)  # of a call
_MAX_STEPS = 100_000  # of the validation of one call: keywords, and their parts and those of the value
Part = list[Any]  # kind and value


class AnswerParts:
    """One answer, from its text to its parts.

    A call that is not closed, is broken, not of the schema of its strict tool, or that nobody offered, is text. Blanks
    around a region are dropped.
    """

    def __init__(self, template: Any, prefix: str, tools: list[Any] | None, takes_calls: bool) -> None:
        self._template, self._tools, self._takes_calls = load_response_template(template), tools, takes_calls
        self._strict = {tool["function"]["name"]: _Arguments(tool) for tool in tools or () if _is_strict(tool)}
        self._raw = self._blanks = ""  # what no part has yet; blanks that may end a region
        self._region: str | None = None
        self._met, self._has_text = set[str](), False  # kinds with a text; whether the region has one
        anchors = [found.end() for found in self._template.start_anchor_re.finditer(prefix)]
        self._parser = self._begin(prefix[anchors[-1] :] if anchors else "")
        for event in self._parser.initial_events:
            self._region = event["field"] if event["type"] != "region_close" else None

    @property
    def num_held(self) -> int:
        return len(self._raw)

    def feed(self, text: str) -> Iterator[Part]:
        for char in text:
            self._raw += char
            try:
                events = self._parser.feed(char)
            except _BROKEN:  # the call that ends here is broken
                yield from self._give_up()
                continue
            for event in events:
                yield from self._part(event)
            if self._region != _CALLS and any(event["type"] != "region_chunk" for event in events):
                self._raw = "" if events[-1]["type"] != "region_chunk" else self._raw

    def end(self, end: str | None) -> Iterator[Part]:
        """The rest, once the text has ended: by an end token with this text, else it was cut."""
        field = self._template.fields.get(self._region or "")
        if field is not None and field.close_re is not None and end and field.close_re.search(end):
            yield from self.feed(end)
        elif self._region == _CALLS:
            assert field is not None
            if end is None or (field.close_re is not None and not field.close_re.search(self._raw)):
                yield from self._give_up()
                return
        try:
            _, events = self._parser.finalize()
        except _BROKEN:
            yield from self._give_up()
            return
        for event in events:
            yield from self._part(event)
        if not self._met and self._raw:
            yield ["text", self._raw]

    def _begin(self, prefix: str = "") -> ResponseParser:
        return ResponseParser(self._template, prefix=prefix, tools=self._tools)

    def _give_up(self) -> Iterator[Part]:
        """What has no part yet is text, and a new region begins."""
        if self._raw:
            self._met.add("text")
            yield ["text", self._raw]
        self._raw, self._region, self._parser = "", None, self._begin()

    def _part(self, event: Mapping[str, Any]) -> Iterator[Part]:
        name = event["field"]
        if event["type"] == "region_open":
            self._region, self._has_text, self._blanks = name, False, ""
        elif event["type"] == "region_close":
            self._region = None
            if name == _CALLS:
                yield from self._calls(event["value"])
        elif name != _CALLS:
            self._raw = self._raw[len(event["text"]) :] if self._has_text else ""
            if name in _KINDS:
                yield from self._text(name, event["text"])

    def _text(self, name: str, text: str) -> Iterator[Part]:
        field, kind = self._template.fields[name], _KINDS[name]
        if field.content_args.get("strip", True):
            text = self._blanks + text if self._has_text else text.lstrip()
            kept = text.rstrip()
            self._blanks, text = text[len(kept) :], kept
        if not text:
            return
        if not self._has_text and kind in self._met and field.join:
            text = field.join + text
        self._has_text = True
        self._met.add(kind)
        yield [kind, text]

    def _calls(self, value: Any) -> Iterator[Part]:
        calls = [self._call(entry) for entry in (value if isinstance(value, list) else [value])]
        if not self._takes_calls or None in calls:
            yield from self._give_up()
            return
        self._met.add("call")
        self._raw = ""
        yield from (["call", call] for call in calls)

    def _call(self, value: Any) -> Part | None:
        """A call; None if it is none."""
        call = _call(value)
        if call is None or call[0] not in self._strict:
            return call
        return call if self._strict[call[0]].are(json.loads(call[1])) else None


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("strict") is True


class _TooManyStepsError(Exception):
    """The validation of a call is given up."""


class _Arguments:
    """What the arguments of a strict tool's calls must be, by a schema of a client's.

    Its patterns are llguidance's, not Python's, whose time may be exponential; and branches (`anyOf` of `$ref`) that
    double at each level are given up after `_MAX_STEPS`. No schema is fetched from elsewhere.
    """

    def __init__(self, tool: Any) -> None:
        from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]
        from referencing import Registry

        schema = tool["function"].get("parameters") or {"type": "object"}
        kind = validator_for(schema)
        own = {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional}
        keywords = {name: self._counted(check) for name, check in (kind.VALIDATORS | own).items()}
        self._validator, self._steps = extend(kind, keywords)(schema, registry=Registry()), 0

    def are(self, value: Any) -> bool:
        self._steps = 0
        try:
            return bool(self._validator.is_valid(value))
        except (_TooManyStepsError, RecursionError):  # a $ref that is within itself, with nothing between
            return False

    def _counted(self, check: Any) -> Any:
        def counted(validator: Any, keyword: Any, value: Any, schema: Any) -> Any:
            self._steps += 1 + sum(len(part) for part in (keyword, value) if isinstance(part, str | list | dict))
            if self._steps > _MAX_STEPS:
                raise _TooManyStepsError
            return check(validator, keyword, value, schema)

        return counted


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError  # type: ignore[import-untyped]

    if isinstance(value, str) and not matches(pattern, value):
        yield ValidationError(pattern)


def _pattern_properties(validator: Any, schemas: dict[str, Any], value: Any, schema: Any) -> Iterator[Any]:
    for pattern, part in schemas.items():
        for name in filter(partial(matches, pattern), value if isinstance(value, dict) else ()):
            yield from validator.descend(value[name], part, path=name)


def _additional(validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[Any]:
    patterns = schema.get("patternProperties", {})
    for name in value.keys() - schema.get("properties", {}).keys() if isinstance(value, dict) else ():
        if not any(matches(pattern, name) for pattern in patterns):
            yield from validator.descend(value[name], rest, path=name)


def _call(value: Any) -> Part | None:
    """The name and the arguments of a call; None if it is none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        require_shape(text.encode(errors="replace"))
    except ValueError:  # deeper than clients may send it back
        return None
    return [name, text]


_answers: OrderedDict[str, AnswerParts] = OrderedDict()


def parse(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request."""
    name = request["id"]
    try:
        if "start" in request:
            _answers[name] = AnswerParts(**request["start"])
            if len(_answers) > MAX_ANSWERS:
                _answers.popitem(last=False)
        answer = _answers.get(name)
        if answer is None:
            return {"failure": "its beginning is lost"}
        parts = list(answer.feed(request["text"]))
        if "end" in request:
            del _answers[name]
            parts += answer.end(request["end"])
    except MemoryError:
        raise
    except Exception as error:  # a template can be anything
        _answers.pop(name, None)
        return {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {"parts": parts, "held": 0 if "end" in request else answer.num_held}


if __name__ == "__main__":
    serve_requests(parse, float(sys.argv[1]), int(sys.argv[2]))

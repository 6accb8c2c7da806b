"""Calls and reasoning in a model's text, by its `response_template`: `transformers`' response parser.

An answer is read by characters, so that its parts do not depend on how it was cut. The patterns of a template come with
the model; those of clients' schemas are llguidance's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pictool.reading import require_shape
from pictool.runtime.chat.schemas import matches

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

_log = logging.getLogger("pictool.serve")
_KINDS: dict[str, Literal["text", "reasoning"]] = {
    "content": "text", "thinking": "reasoning", "reasoning": "reasoning", "reasoning_content": "reasoning"
}  # fmt: skip
_CALLS = "tool_calls"
_BROKEN = (ValueError, KeyError, TypeError, RecursionError)  # of a call
_MAX_STEPS = 100_000  # of the validation of one call: keywords, and their parts and those of the value


@dataclass(frozen=True)
class AnswerPart:
    """A piece of text or of reasoning, or a whole call: `text` is the object of its arguments, in JSON."""

    kind: Literal["text", "reasoning", "call"]
    text: str
    name: str = ""


class AnswerParser:
    """Turns the text of one answer into parts, as it comes. Nothing of the text is lost: what cannot be parsed is text.

    Args:
        template: of `transformers`' chat_parsing. prefix: the end of the prompt, which may have begun the answer.
        tools: that were offered, with the types of their arguments. takes_calls: whether calls may be made.
    """

    def __init__(
        self, template: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]], takes_calls: bool
    ) -> None:
        self._begin = partial(_AnswerParts, template, prefix, list(tools), takes_calls)
        self._answer: _AnswerParts | None = None
        self._held, self._is_broken = "", False

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that have become certain with more text."""
        return self._parts(text, lambda answer: answer.feed(text))

    def end(self, end: str | None) -> list[AnswerPart]:
        """The other parts, once the text has ended: by an end token with this text, else (None) it was cut."""
        return self._parts("", lambda answer: answer.end(end))

    def _parts(self, text: str, read: Callable[[_AnswerParts], Iterator[AnswerPart]]) -> list[AnswerPart]:
        self._held += text
        if not self._is_broken:
            try:
                self._answer = self._answer or self._begin()
                parts = list(read(self._answer))
            except Exception as error:  # a template can be anything
                said = " ".join(str(error).split())[:200]
                _log.warning("pic: an answer is not parsed: %s: %s", type(error).__name__, said)
                self._is_broken = True
            else:
                self._held = self._held[len(self._held) - self._answer.num_held :]
                return parts
        text, self._held = self._held, ""
        return [AnswerPart("text", text)] if text else []


class _AnswerParts:
    """One answer, from its text to its parts.

    A call that is not closed, is broken, not of the schema of its strict tool, or that nobody offered, is text. Blanks
    around a region are dropped.
    """

    def __init__(self, template: Any, prefix: str, tools: list[Any] | None, takes_calls: bool) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

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

    def feed(self, text: str) -> Iterator[AnswerPart]:
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

    def end(self, end: str | None) -> Iterator[AnswerPart]:
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
            yield AnswerPart("text", self._raw)

    def _begin(self, prefix: str = "") -> ResponseParser:
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=prefix, tools=self._tools)

    def _give_up(self) -> Iterator[AnswerPart]:
        """What has no part yet is text, and a new region begins."""
        if self._raw:
            self._met.add("text")
            yield AnswerPart("text", self._raw)
        self._raw, self._region, self._parser = "", None, self._begin()

    def _part(self, event: Mapping[str, Any]) -> Iterator[AnswerPart]:
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

    def _text(self, name: str, text: str) -> Iterator[AnswerPart]:
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
        yield AnswerPart(kind, text)

    def _calls(self, value: Any) -> Iterator[AnswerPart]:
        calls = [self._call(entry) for entry in (value if isinstance(value, list) else [value])]
        if not self._takes_calls or None in calls:
            yield from self._give_up()
            return
        self._met.add("call")
        self._raw = ""
        yield from filter(None, calls)

    def _call(self, value: Any) -> AnswerPart | None:
        """A call; None if it is none."""
        call = _call(value)
        if call is None or call.name not in self._strict:
            return call
        return call if self._strict[call.name].are(json.loads(call.text)) else None


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


def _call(value: Any) -> AnswerPart | None:
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
    return AnswerPart("call", text, name)

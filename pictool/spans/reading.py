"""Reading and writing span queries as JSON or YAML: spnl's own form, and what its docs write but its parser refuses.

    query   := message | join | call | {"monad": query} | {"zip": {"first": query, "second": query}} | ours
    message := {"system": text} | {"user": text} | {"assistant": text}
    join    := {"seq": [query…]} | {"par": […]} | {"cross": […]} | {"plus": […]}
    call    := {"g": {"model": text, "input": query, "max_tokens"?: n, "temperature"?: t, own…}}
             | {"repeat": {"n": n, "g": {…}}} | {"map": {"metadata": {"model": …}, "inputs": [text…]}}
             | {"augment": {"embedding_model": text, "body": query, "doc": [name, {"Text": text}]}}
    ours    := {"chat": {as "g"}} | {"retrieve": {"from": path or […], "query": query, "k"?: n, "chunk_tokens"?: n}}
             | {"file": path} | {"ask": text} | {"print": text}
    own     := "top_p"?: p, "stop"?: text or [text…]

Leniently: a list as `input` is a ⋈ of its items, `repeat` takes `query: {"g": …}` for `g`, `zip` takes a pair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pictool.errors import InputError
from pictool.reading import parse_json, shown
from pictool.spans import query as nodes
from pictool.spans.query import (
    MAX_DEPTH,
    MAX_STOP_BYTES,
    MAX_STOPS,
    MAX_TOKENS,
    ROLES,
    TEMPERATURE,
    Call,
    Checkpoint,
    Path,
    Query,
    no_checkpoint,
    path_text,
)

MAX_NODES = 100_000
YAML_NODES = 5  # of a query's node: its mapping, its key, its value's own mapping and keys
MAX_REPEAT = 255  # as of spnl
_JOINS = {join.kind: join for join in nodes.JOINS}
_CALL_FIELDS = ("max_tokens", "temperature", "top_p", "stop")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},]', re.DOTALL)


def read_query(
    text: str, name: str = "query", is_yaml: bool | None = None, checkpoint: Checkpoint = no_checkpoint
) -> Query:
    """The query that a text describes.

    Args:
        name: of the file, for messages.
        is_yaml: whether the text is YAML or JSON; None: JSON if it begins with a brace.
        checkpoint: called with every node that is read.

    Raises:
        InputError: one line with the name, the path to the node, and what it must be.
    """
    if is_yaml is None:
        is_yaml = not text.lstrip().startswith("{")
    try:
        data = _load_yaml(text, name) if is_yaml else _load_json(text, name)
    except RecursionError as error:
        raise _Reader(name).fail(_deep_path(text), f"is nested deeper than {MAX_DEPTH} levels; flatten it") from error
    return _Reader(name, checkpoint).read(data, ())


def to_data(query: Query) -> dict[str, Any]:
    """A query as spnl's JSON. Its sugar that spnl has no word for is written in our own words."""
    match query:
        case nodes.Message(role, text):
            return {role: text}
        case nodes.Join():
            return {query.kind: [to_data(part) for part in query.parts]}
        case nodes.Generate() | nodes.Chat():
            return {query.kind: {**query.call.to_data(), "input": to_data(query.input)}}
        case nodes.Repeat():
            return {"repeat": {"n": query.n, **to_data(query.input)}}
        case nodes.Map(call, inputs):
            return {"map": {"metadata": call.to_data(), "inputs": list(inputs)}}
        case nodes.Monad():
            return {"monad": to_data(query.input)}
        case nodes.Zip(first, second):
            return {"zip": {"first": to_data(first), "second": to_data(second)}}
        case nodes.Augment():
            doc = [query.name, {"Text": query.text}]
            return {"augment": {"embedding_model": query.embedding_model, "body": to_data(query.input), "doc": doc}}
        case nodes.Retrieve():
            more = {"k": query.k, "chunk_tokens": query.chunk_tokens}
            stated = {key: value for key, value in more.items() if value is not None}
            return {"retrieve": {"from": list(query.sources), "query": to_data(query.input), **stated}}
        case nodes.Fragment(source, None):
            return {"file": source}
        case nodes.Fragment(_, text):
            return {"user": text}
        case nodes.Ask(text) | nodes.Print(text):
            return {query.kind: text}
    raise AssertionError(f"no JSON for {type(query).__name__}")


def to_json(query: Query, indent: int | None = None) -> str:
    """As `to_data`, as text; the same query gives the same text."""
    return json.dumps(to_data(query), ensure_ascii=False, indent=indent)


class _Reader:
    """Turns parsed JSON or YAML into nodes. Every error names the path."""

    def __init__(self, name: str, checkpoint: Checkpoint = no_checkpoint) -> None:
        self._name, self._count, self._checkpoint = name, 0, checkpoint

    def fail(self, path: Path, problem: str) -> InputError:
        return InputError(f"{self._name}: {path_text(path)}: {problem}")

    def _too_many(self, path: Path) -> InputError:
        return self.fail(path, f"the query has more than {MAX_NODES} nodes; split it")

    def read(self, data: Any, path: Path, depth: int = 1) -> Query:
        self._checkpoint()
        self._count += 1
        if self._count > MAX_NODES:
            raise self._too_many(path)
        if depth > MAX_DEPTH:
            raise self.fail(path, f"is nested deeper than {MAX_DEPTH} levels; flatten it")
        if not isinstance(data, Mapping) or len(data) != 1:
            raise self.fail(path, f"must be a mapping with one key, an operator, not {_shown(data)}")
        ((kind, value),) = data.items()
        return replace(self._node(kind, value, path, depth), origin=path)

    def _node(self, kind: Any, value: Any, path: Path, depth: int) -> Query:
        if kind in ROLES:
            return nodes.Message(kind, self._text(value, (*path, kind)))
        if kind in _JOINS:
            return self._join(kind, value, path, depth)
        if kind not in _READERS:
            known = ", ".join([*ROLES, *_JOINS, *_READERS])
            raise self.fail(path, f"unknown operator {kind!r}; known are {known}")
        return _READERS[kind](self, value, (*path, kind), depth + 1)

    def _join(self, kind: str, value: Any, path: Path, depth: int) -> Query:
        if not isinstance(value, list):
            raise self.fail((*path, kind), f"must be a list of queries, not {_shown(value)}")
        return _JOINS[kind](tuple(self.read(item, (*path, kind, index), depth + 1) for index, item in enumerate(value)))

    def _input(self, value: Any, path: Path, depth: int) -> Query:
        """A query; a list of queries is a ⋈ of them."""
        if not isinstance(value, list):
            return self.read(value, path, depth)
        items = tuple(self.read(item, (*path, index), depth + 1) for index, item in enumerate(value))
        return items[0] if len(items) == 1 else nodes.Cross(items, origin=path)

    def _fields(self, value: Any, path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Any:
        """A mapping that has the required keys, and no others than these and the optional ones."""
        if not isinstance(value, Mapping):
            raise self.fail(path, f"must be a mapping with {', '.join(required)}, not {_shown(value)}")
        for key in required:
            if key not in value:
                raise self.fail(path, f"has no {key}")
        for key in value:
            if key not in required + optional:
                raise self.fail(path, f"unknown key {key!r}; known are {', '.join(required + optional)}")
        return value

    def _text(self, value: Any, path: Path) -> str:
        if not isinstance(value, str):
            raise self.fail(path, f"must be a text, not {_shown(value)}; put it in quotes")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.fail(path, f"is not Unicode text at character {error.start}") from error
        return value

    def _whole(self, value: Any, path: Path, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.fail(path, f"must be a whole number from {low} to {high}, not {_shown(value)}")
        return value

    def _call(self, value: Mapping[str, Any], path: Path) -> Call:
        tokens, temperature = value.get("max_tokens", MAX_TOKENS), value.get("temperature", TEMPERATURE)
        if tokens is not None:
            tokens = self._whole(tokens, (*path, "max_tokens"), 0, 2**31 - 1)
        is_number = type(temperature) in (int, float) and 0 <= temperature <= 1000
        if temperature is not None and not is_number:
            problem = f"must be a number from 0 to 1000, not {_shown(temperature)}"
            raise self.fail((*path, "temperature"), problem)
        top_p = value.get("top_p")
        if top_p is not None and not (type(top_p) in (int, float) and 0 < top_p <= 1):
            raise self.fail((*path, "top_p"), f"must be a number above 0, and 1 at most, not {_shown(top_p)}")
        stop = self._stops(value.get("stop"), (*path, "stop"))
        return Call(self._text(value["model"], (*path, "model")), tokens, temperature, top_p, stop)

    def _stops(self, value: Any, path: Path) -> tuple[str, ...]:
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        if len(listed) > MAX_STOPS:
            raise self.fail(path, f"has {len(listed)} texts; {MAX_STOPS} at most")
        stops = tuple(self._text(text, (*path, index)) for index, text in enumerate(listed))
        if not all(stops):
            raise self.fail(path, "has an empty text, at which every output would end; leave it out")
        if sum(len(text.encode()) for text in stops) > MAX_STOP_BYTES:
            raise self.fail(path, f"has more than {MAX_STOP_BYTES} bytes of text; shorten it")
        return stops

    def generate(self, value: Any, path: Path, depth: int) -> nodes.Generate:
        call, over = self._over_call(value, path, depth)
        return nodes.Generate(over, call)

    def chat(self, value: Any, path: Path, depth: int) -> Query:
        call, over = self._over_call(value, path, depth)
        return nodes.Chat(over, call)

    def _over_call(self, value: Any, path: Path, depth: int) -> tuple[Call, Query]:
        value = self._fields(value, path, ("model", "input"), _CALL_FIELDS)
        call = self._call(value, path)
        return call, self._input(value["input"], (*path, "input"), depth)

    def repeat(self, value: Any, path: Path, depth: int) -> Query:
        inner = "query" if isinstance(value, Mapping) and "query" in value else "g"
        value = self._fields(value, path, ("n", inner))
        n = self._whole(value["n"], (*path, "n"), 0, MAX_REPEAT)
        if inner == "g":
            return nodes.Repeat(self.generate(value["g"], (*path, "g"), depth + 1), n)
        over = self.read(value["query"], (*path, "query"), depth)
        if not isinstance(over, nodes.Generate):
            raise self.fail((*path, "query"), "must be a g, what is repeated")
        return nodes.Repeat(over, n)

    def map(self, value: Any, path: Path, depth: int) -> Query:
        value = self._fields(value, path, ("metadata", "inputs"))
        metadata = self._fields(value["metadata"], (*path, "metadata"), ("model",), _CALL_FIELDS)
        if not isinstance(value["inputs"], list):
            raise self.fail((*path, "inputs"), f"must be a list of texts, not {_shown(value['inputs'])}")
        self._count += len(value["inputs"])
        if self._count > MAX_NODES:
            raise self._too_many(path)
        texts = [self._text(text, (*path, "inputs", index)) for index, text in enumerate(value["inputs"])]
        return nodes.Map(self._call(metadata, (*path, "metadata")), tuple(texts))

    def monad(self, value: Any, path: Path, depth: int) -> Query:
        return nodes.Monad(self.read(value, path, depth))

    def zip(self, value: Any, path: Path, depth: int) -> Query:
        if isinstance(value, list) and len(value) == 2:
            value = {"first": value[0], "second": value[1]}
        value = self._fields(value, path, ("first", "second"))
        first, second = (self.read(value[key], (*path, key), depth) for key in ("first", "second"))
        return nodes.Zip(first, second)

    def augment(self, value: Any, path: Path, depth: int) -> Query:
        value = self._fields(value, path, ("embedding_model", "body", "doc"))
        doc, at = value["doc"], (*path, "doc")
        if not isinstance(doc, list) or len(doc) != 2:
            raise self.fail(at, 'must be a pair: a name and {"Text": "…"}')
        if not isinstance(doc[1], Mapping) or list(doc[1]) != ["Text"]:
            raise self.fail((*at, 1), 'must be {"Text": "…"}; a binary document has to be converted first')
        body = self.read(value["body"], (*path, "body"), depth)
        model = self._text(value["embedding_model"], (*path, "embedding_model"))
        return nodes.Augment(body, model, self._text(doc[0], (*at, 0)), self._text(doc[1]["Text"], (*at, 1, "Text")))

    def retrieve(self, value: Any, path: Path, depth: int) -> Query:
        value = self._fields(value, path, ("from", "query"), ("k", "chunk_tokens"))
        sources = value["from"] if isinstance(value["from"], list) else [value["from"]]
        if not sources:
            raise self.fail((*path, "from"), "is empty; name files or a folder")
        names = [self._text(source, (*path, "from", index)) for index, source in enumerate(sources)]
        k, chunk_tokens = (
            None if value.get(key) is None else self._whole(value[key], (*path, key), 1, 2**31 - 1)
            for key in ("k", "chunk_tokens")
        )
        return nodes.Retrieve(self.read(value["query"], (*path, "query"), depth), tuple(names), k, chunk_tokens)

    def file(self, value: Any, path: Path, depth: int) -> Query:
        return nodes.Fragment(self._text(value, path))

    def ask(self, value: Any, path: Path, depth: int) -> Query:
        return nodes.Ask(self._text(value, path))

    def print(self, value: Any, path: Path, depth: int) -> Query:
        return nodes.Print(self._text(value, path))


_READERS: dict[str, Callable[[_Reader, Any, Path, int], Query]] = {
    "g": _Reader.generate, "repeat": _Reader.repeat, "map": _Reader.map, "monad": _Reader.monad, "zip": _Reader.zip,
    "augment": _Reader.augment, "chat": _Reader.chat, "retrieve": _Reader.retrieve, "file": _Reader.file,
    "ask": _Reader.ask, "print": _Reader.print,
}  # fmt: skip


def _shown(value: Any) -> str:
    """A wrong value, for messages."""
    if isinstance(value, Mapping):
        return f"a mapping with {len(value)} keys"
    return f"a list of {len(value)}" if isinstance(value, list) else shown(value)


def _load_json(text: str, name: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}: is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    except ValueError as error:  # a number that is not finite, or of thousands of digits
        raise InputError(f"{name}: is not JSON ({error})") from error


def _load_yaml(text: str, name: str) -> Any:
    from pictool import strict_yaml

    try:
        return strict_yaml.load(text, YAML_NODES * MAX_NODES, max_depth=None, has_aliases=True)
    except RecursionError:
        raise
    except Exception as error:  # YAMLError; PyYAML raises others where a tag and a value do not go together
        raise InputError(f"{name}: is not YAML ({strict_yaml.problem(error)})") from error


def _deep_path(text: str) -> Path:
    """The path to the first node of a JSON text that is deeper than allowed; its parser gave up."""
    steps: list[str | int] = []  # a list's index, or an object's last key
    for token in _TOKEN.findall(text):
        if token in "[{":
            if len(steps) == 2 * MAX_DEPTH:  # an operator and its list
                return tuple(steps)
            steps.append(0 if token == "[" else "")
        elif token in "]}":
            del steps[-1:]
        elif steps and isinstance(steps[-1], int):
            steps[-1] += token == ","
        elif steps and token != ",":
            steps[-1] = token[1:-1]
    return ()

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
from collections.abc import Callable
from functools import partial
from typing import Any

from pictool.errors import InputError
from pictool.reading import parse_json
from pictool.spans.operators.calls import Chat, Generate, Map, Repeat
from pictool.spans.operators.flow import Ask, Monad, Print, Zip
from pictool.spans.operators.joins import JOINS
from pictool.spans.operators.messages import ROLES, Message
from pictool.spans.operators.retrieve import Augment, Fragment, Retrieve
from pictool.spans.query import MAX_DEPTH, MAX_NODES, Checkpoint, Path, Query, no_checkpoint
from pictool.spans.reader import QueryReader

YAML_NODES = 5  # of a query's node: its mapping, its key, its value's own mapping and keys
OPERATORS: tuple[Any, ...] = (*JOINS, Generate, Repeat, Map, Monad, Zip, Augment, Chat, Retrieve, Fragment, Ask, Print)
_READERS: dict[str, Callable[..., Query]] = {
    **{role: partial(Message.read, role) for role in ROLES},
    **{operator.kind: operator.read for operator in OPERATORS},
}
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
    reader = QueryReader(name, _READERS, checkpoint)
    try:
        data = _load_yaml(text, name) if is_yaml else _load_json(text, name)
    except RecursionError as error:
        raise reader.fail(_deep_path(text), f"is nested deeper than {MAX_DEPTH} levels; flatten it") from error
    return reader.query(data, ())


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

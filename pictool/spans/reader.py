"""What the operators read their JSON or YAML with. Every error names the path to the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pictool.errors import InputError
from pictool.reading import shown
from pictool.spans.query import MAX_DEPTH, MAX_NODES, Checkpoint, Path, Query, path_text


class QueryReader:
    """Turns parsed JSON or YAML into nodes.

    Args:
        name: of the file, for messages.
        operators: by their keys, what reads an operator's value: called with this reader, the value, the path to it,
            and the depth of the queries in it.
        checkpoint: called with every node.
    """

    def __init__(self, name: str, operators: Mapping[str, Callable[..., Query]], checkpoint: Checkpoint) -> None:
        self._name, self._operators, self._checkpoint, self._count = name, operators, checkpoint, 0

    def fail(self, path: Path, problem: str) -> InputError:
        return InputError(f"{self._name}: {path_text(path)}: {problem}")

    def count(self, path: Path, number: int = 1) -> None:
        """Count nodes. Raises InputError: too many."""
        self._count += number
        if self._count > MAX_NODES:
            raise self.fail(path, f"the query has more than {MAX_NODES} nodes; split it")

    def query(self, data: Any, path: Path, depth: int = 1) -> Query:
        """A node, and all below it."""
        self._checkpoint()
        self.count(path)
        if depth > MAX_DEPTH:
            raise self.fail(path, f"is nested deeper than {MAX_DEPTH} levels; flatten it")
        if not isinstance(data, Mapping) or len(data) != 1:
            raise self.fail(path, f"must be a mapping with one key, an operator, not {shown_value(data)}")
        ((kind, value),) = data.items()
        if kind not in self._operators:
            raise self.fail(path, f"unknown operator {kind!r}; known operators: {', '.join(self._operators)}")
        return replace(self._operators[kind](self, value, (*path, kind), depth + 1), origin=path)

    def queries(self, value: Any, path: Path, depth: int) -> tuple[Query, ...]:
        """A list of queries."""
        if not isinstance(value, list):
            raise self.fail(path, f"must be a list of queries, not {shown_value(value)}")
        return tuple(self.query(item, (*path, index), depth) for index, item in enumerate(value))

    def fields(self, value: Any, path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Any:
        """A mapping that has the required keys, and no others than these and the optional ones."""
        if not isinstance(value, Mapping):
            raise self.fail(path, f"must be a mapping with {', '.join(required)}, not {shown_value(value)}")
        for key in required:
            if key not in value:
                raise self.fail(path, f"is missing {key}")
        for key in value:
            if key not in required + optional:
                raise self.fail(path, f"unknown key {key!r}; known keys: {', '.join(required + optional)}")
        return value

    def text(self, value: Any, path: Path) -> str:
        """A text that can be written as UTF-8."""
        if not isinstance(value, str):
            raise self.fail(path, f"must be a string, not {shown_value(value)}; put it in quotes")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.fail(path, f"is not valid Unicode at character {error.start}") from error
        return value

    def texts(self, value: list[Any], path: Path) -> tuple[str, ...]:
        """The texts of a list."""
        return tuple(self.text(text, (*path, index)) for index, text in enumerate(value))

    def whole(self, value: Any, path: Path, low: int = 0, high: int = 2**31 - 1) -> int:
        """A whole number within bounds."""
        if type(value) is not int or not low <= value <= high:
            raise self.fail(path, f"must be a whole number from {low} to {high}, not {shown_value(value)}")
        return value


def shown_value(value: Any) -> str:
    """A wrong value, for messages."""
    if isinstance(value, Mapping):
        return f"a mapping with {len(value)} keys"
    return f"a list of {len(value)}" if isinstance(value, list) else shown(value)

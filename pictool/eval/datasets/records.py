"""Files of JSON records: one object per line (jsonl), or a list of objects. Every error names file, line and key."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictool.errors import InputError
from pictool.reading import parse_json, read_file

MAX_FILE_BYTES = 512 << 20


@dataclass(frozen=True)
class Record:
    """One object of a file, whose values are read by key and type.

    Fields:
        place: where it is in the file: "line 3" of a jsonl file, "record 3" of a list.
        number: counts from 1.
        prefix: of an object inside a record, where it is in the record (`ctxs[0].`).
    """

    path: Path
    place: str
    number: int
    values: Mapping[str, Any]
    prefix: str = ""

    def error(self, problem: str) -> InputError:
        """What is wrong with this record, to be raised."""
        return InputError(f"{self.path}: {self.place}: {problem}")

    def key_error(self, key: str, problem: str) -> InputError:
        """What is wrong with one of its values, to be raised."""
        return self.error(f"{self.prefix}{key} {problem}")

    def text(self, key: str, allow_blank: bool = False) -> str:
        """A text.

        Raises:
            InputError: missing, no text, blank (unless allowed), or not Unicode (half of a surrogate pair).
        """
        return self._text(key, self._value(key), allow_blank)

    def text_or_none(self, key: str) -> str | None:
        """A text that may be blank, or None if the key is missing or null."""
        return None if self.values.get(key) is None else self.text(key, allow_blank=True)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, at least one; a list inside it (CacheBlend's aliases) gives its texts.

        Raises:
            InputError: anything else.
        """
        items = [text for item in self._list(key) for text in (item if isinstance(item, list) else [item])]
        if not items:
            raise self.key_error(key, "is an empty list")
        return tuple(self._text(f"{key}[{i}]", item, True) for i, item in enumerate(items))

    def whole_number_or_none(self, key: str) -> int | None:
        """A whole number of 0 or more, or None if the key is missing or null."""
        value = self.values.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self.key_error(key, "must be a whole number of 0 or more")
        return value

    def id(self, key: str) -> str:
        """A text or number that names the record; its number in the file if the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return str(self.number)
        return str(value) if type(value) is int else self.text(key)

    def items(self, key: str) -> list[tuple[str, Any]]:
        """The members of a list, each with its name (`documents[0]`)."""
        return [(f"{key}[{i}]", item) for i, item in enumerate(self._list(key))]

    def inner(self, name: str, value: Any) -> Record:
        """An object inside this record, as a record of its own."""
        if not isinstance(value, dict):
            raise self.key_error(name, "must be an object")
        return Record(self.path, self.place, self.number, value, f"{self.prefix}{name}.")

    def _value(self, key: str) -> Any:
        if key not in self.values:
            raise self.key_error(key, "is missing")
        return self.values[key]

    def _list(self, key: str) -> list[Any]:
        value = self._value(key)
        if not isinstance(value, list):
            raise self.key_error(key, "must be a list")
        return value

    def _text(self, name: str, value: Any, allow_blank: bool) -> str:
        if not isinstance(value, str):
            raise self.key_error(name, "must be a string")
        if not allow_blank and not value.strip():
            raise self.key_error(name, "is blank")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.key_error(name, "contains an unpaired surrogate, which is not a character") from error
        return value


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in order; blank lines are skipped.

    Raises:
        InputError: missing, unreadable, without records, not UTF-8, not JSON, or a record that is no object.
    """
    try:
        data = read_file(path, MAX_FILE_BYTES).removeprefix(codecs.BOM_UTF8)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error
    if not data.strip():
        raise InputError(f"{path}: is empty; it must contain records (JSON)")
    is_list = data.lstrip()[:1] == b"["
    yield from _of_list(path, data) if is_list else _of_lines(path, data)


def first_record(path: Path) -> Record:
    """The first record of a file.

    Raises:
        InputError: see `read_records`.
    """
    return next(read_records(path))


def _of_lines(path: Path, data: bytes) -> Iterator[Record]:
    number = 0
    for line, text in enumerate(data.split(b"\n"), 1):  # not `splitlines`: a JSON text may hold U+2028 as it is
        if text.strip():
            number += 1
            yield _record(path, f"line {line}", number, _parse(path, text, line))


def _of_list(path: Path, data: bytes) -> Iterator[Record]:
    values = _parse(path, data, 1)
    if not values:
        raise InputError(f"{path}: is an empty list; it must contain records")
    for number, value in enumerate(values, 1):
        yield _record(path, f"record {number}", number, value)


def _record(path: Path, place: str, number: int, value: Any) -> Record:
    if not isinstance(value, dict):
        raise InputError(f"{path}: {place}: must be a JSON object")
    return Record(path, place, number, value)


def _parse(path: Path, data: bytes, line: int) -> Any:
    """The JSON value of bytes that begin at a line of the file."""
    try:
        return parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise InputError(f"{path}: line {line}: is not UTF-8; convert it first (iconv -t utf-8)") from error
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        raise InputError(f"{path}: line {line}: is not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists in lists in lists
        raise InputError(f"{path}: line {line}: is not readable JSON ({error})") from error

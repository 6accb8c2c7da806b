"""Plain jsonl: what a user writes by hand, as in `fixtures/queries.jsonl`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pictool.compiler.chunking import needs_reader, read_text
from pictool.documents.reading import read_whole
from pictool.errors import InputError
from pictool.eval.datasets.base import Case, FileDataset
from pictool.eval.datasets.records import Record
from pictool.eval.metrics import METRICS


@dataclass(frozen=True)
class Plain(FileDataset):
    """A record has `documents` (paths from the file's folder, texts, or `{"text": …}`), `query` and `answers`.

    A string that names no file is a text if it has several words and does not end like the name of a file. It may have
    `head`, `kind`, `id` (the record's number), `metric`, `max_new_tokens` (those of the dataset) and `stop`.
    """

    name: ClassVar[str] = "plain"
    reference: ClassVar[str] = "fixtures/queries.jsonl"
    marks: ClassVar[tuple[str, ...]] = ("documents", "query")
    metric: str = "f1"
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise InputError(f"plain: metric={self.metric} must be one of {', '.join(METRICS)}")
        if self.max_new_tokens < 1:
            raise InputError(f"plain: max_new_tokens={self.max_new_tokens} must be 1 or more")

    def case(self, record: Record) -> Case:
        metric = record.text_or_none("metric") or self.metric
        if metric not in METRICS:
            raise record.key_error("metric", f"must be one of {', '.join(METRICS)}")
        return Case(
            id=record.id("id"),
            documents=tuple(_document(record, name, value) for name, value in record.items("documents")),
            query=record.text("query"),
            answers=record.texts("answers"),
            kind=record.text_or_none("kind") or "",
            head=record.text_or_none("head"),
            metric=metric,
            max_new_tokens=record.whole_number_or_none("max_new_tokens") or self.max_new_tokens,
            stop=record.texts("stop") if record.values.get("stop") is not None else (),
        )


def _document(record: Record, name: str, value: Any) -> str:
    if isinstance(value, dict):
        return record.inner(name, value).text("text")
    if not isinstance(value, str) or not value:
        raise record.key_error(name, 'must be a path, a string, or {"text": …}')
    path = Path(record.path).parent / value
    if not _is_there(path):
        if len(value.split()) > 1 and ("\n" in value or not re.search(r"\.\w{1,8}$", value)):  # no name of a file
            return record.inner(name, {"text": value}).text("text")
        raise record.key_error(name, f'({value[:200]}: no such file; write a text as {{"text": …}})')
    try:
        return read_whole(path) if needs_reader(path) else read_text(path)
    except (InputError, ValueError) as error:  # ValueError: a path with a zero byte
        raise record.key_error(name, f"({error})") from error


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, or a zero byte
        return False

"""Where objects came from, for people: a table of the names of the files and models that they were made of.

A key follows from content alone, so an object does not know what its text's file was called. Of a tenant's objects
(salted ones) nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pictool.errors import StoreError
from pictool.store.database import reading, writing

_MAX_LENGTH = 1000  # characters of a name
_WAIT_S = 1.0


@dataclass(frozen=True)
class Source:
    """What an object was last compiled from: the file as it was named, and the model as it was called."""

    source: str
    model: str


def add_sources(root: Path, sources: Mapping[str, Source]) -> None:
    """Keep where objects came from, by key. In a store that cannot be written nothing is kept."""
    rows = [(key, one.source[:_MAX_LENGTH], one.model[:_MAX_LENGTH]) for key, one in sources.items()]
    with suppress(StoreError), writing(root, _WAIT_S) as db:
        db.executemany("INSERT OR REPLACE INTO sources VALUES (?, ?, ?)", rows)


def read_sources(root: Path, on_problem: Callable[[str], None] = lambda problem: None) -> dict[str, Source]:
    """Where objects came from, by key, as far as it is known; `on_problem` is called with why it cannot be read."""
    try:
        with reading(root, _WAIT_S) as db:
            return {key: Source(str(source), str(model)) for key, source, model in db.execute("SELECT * FROM sources")}
    except StoreError as error:
        on_problem(f"{error}; the objects are listed without their files and models")
        return {}

"""What public reports say that readers of documents lose is read, or named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from reader_cases import CASES

from pictool.documents.reading import FileReader


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    with FileReader(limit_s=30) as reader:
        yield reader


@pytest.mark.parametrize("name", CASES)
def test_it_is_read_or_named(name: str, reader: FileReader) -> None:
    case = CASES[name]
    path = Path(case.name)
    path.write_bytes(case.make())
    document = reader.read(path)
    assert case.problem in document.problem and bool(document.problem) == bool(case.problem), document.problem
    text, at = "\n".join(section.text for section in document.sections), 0
    for part in case.has:
        assert part in text[at:], text[:500]
        at = text.index(part, at) + len(part)
    notes = "; ".join(document.notes)
    assert not [part for part in case.lacks if part in text + notes], text[:500] + notes
    assert case.places in (None, tuple(section.place for section in document.sections))
    assert all(part in notes for part in case.notes) and bool(notes) == bool(case.notes), notes

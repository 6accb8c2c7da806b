"""What was read is not read again by the next process: by content, within bounds, and never for a tenant."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import folders
import pytest
from serve.live import DOCS, tiny_model

from pictool.documents import reading
from pictool.documents.library import Library, LibraryReader
from pictool.documents.reading import FileReader
from pictool.runtime.model import Model
from pictool.store import readings
from pictool.store.database import DATABASE
from pictool.store.readings import Readings
from pictool.store.store import Store
from pictool.store.upkeep import gc


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read by the process that reads."""
    names, ask = list[str](), FileReader._ask

    def spied(reader: FileReader, path: Path) -> dict[str, Any]:
        names.append(path.name)
        return ask(reader, path)

    monkeypatch.setattr(FileReader, "_ask", spied)
    return names


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    contents = {"a.pdf": folders.pdf([DOCS[0], DOCS[1]]), "b.md": b"# Words\n\nand more", "c.bin": bytes(range(256))}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    return [tmp_path / name for name in contents]


def read(model: Model, store: Store, files: list[Path]) -> Library:
    with LibraryReader(model, store=store) as reader:
        return reader.read(files)


def new_store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.ensure_store()
    return store


def test_a_file_is_read_once_and_its_copy_not_at_all(files: list[Path], asked: list[str], tmp_path: Path) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    first = read(model, store, files)
    assert asked == ["a.pdf", "b.md", "c.bin"]
    again = read(model, store, files)
    assert again == first and len(asked) == 3 and again.problems[0].problem == "is binary"
    files[0].rename(tmp_path / "moved.pdf")
    moved = read(model, store, [tmp_path / "moved.pdf", *files[1:]])
    assert len(asked) == 3 and moved.passages[0].source.endswith("moved.pdf, p. 1")
    files[1].write_bytes(b"# Other words\n")
    read(model, store, files[1:])
    assert asked[3:] == ["b.md"]


def test_nothing_is_kept_for_a_tenant_or_of_a_command(files: list[Path], asked: list[str], tmp_path: Path) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    for _ in range(2):
        read(model.with_salt("mine"), store, files)
    assert len(asked) == 6 and not (store.root / DATABASE).exists()
    for text in ("one", "two"):
        with LibraryReader(model, command=f"sh -c 'echo {text}; : {{}}'", store=store) as reader:
            assert text in reader.read(files[2:]).passages[0].text


def test_other_code_or_libraries_read_again(
    files: list[Path], asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    read(model, store, files)
    monkeypatch.setattr(reading, "_versions", lambda: ["another"])
    read(model, store, files)
    assert len(asked) == 6


@pytest.mark.parametrize("reply", [b"no zlib", b'{"reader": 1}', b'{"reader": "PDF", "sections": [["a"]]}', b"[1]"])
def test_what_is_damaged_is_read_again(files: list[Path], asked: list[str], tmp_path: Path, reply: bytes) -> None:
    import zlib

    model, store = tiny_model(), new_store(tmp_path)
    first = read(model, store, files)
    with closing(sqlite3.connect(store.root / DATABASE)) as db, db:
        db.execute("UPDATE readings SET reply = ?", (zlib.compress(reply) if reply != b"no zlib" else reply,))
    assert read(model, store, files) == first and len(asked) == 6
    (store.root / DATABASE).unlink()
    assert read(model, store, files) == first and len(asked) == 9
    assert read(model, store, files) == first and len(asked) == 9, "it is made anew"


def test_it_is_bounded_and_forgets_what_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, day = new_store(tmp_path), 86400.0
    monkeypatch.setattr(readings, "_MAX_BYTES", 3000)
    for number in range(10):
        monkeypatch.setattr(time, "time", lambda number=number: number * day)
        kept = Readings(store.root)
        kept.get("0")
        kept.add(str(number), {"unreadable": os.urandom(400).hex()})
        kept.flush()
    there = [str(number) for number in range(10) if Readings(store.root).get(str(number)) is not None]
    assert "0" in there and "9" in there and 3 <= len(there) <= 7, "what was used last stays"
    monkeypatch.setattr(time, "time", lambda: 38.5 * day)
    gc(store)
    assert [name for name in there if Readings(store.root).get(name) is not None] == [
        name for name in there if name in "089"
    ]

"""What was read, cut and tokenized is not read, cut and tokenized again by the next process: by content, within bounds,
and never for a tenant."""

from __future__ import annotations

import os
import re
import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import folders
import pytest
from serve.live import DOCS, tiny_model

from pictool.documents import reading
from pictool.documents.library import Library, LibraryReader
from pictool.documents.passages import Passage
from pictool.documents.reading import FileReader
from pictool.errors import InputError, UnwritableStoreError
from pictool.reading import FileState, read_file
from pictool.runtime.encoder import Encoder
from pictool.runtime.model import Model
from pictool.store import readings
from pictool.store.database import DATABASE
from pictool.store.readings import Readings
from pictool.store.signatures import Signers, Trust
from pictool.store.store import Store
from pictool.store.upkeep import gc


class Done:
    """What was done: names of files that were hashed, and read by the process that reads; texts that became tokens."""

    def __init__(self) -> None:
        self.hashed, self.read, self.encoded = list[str](), list[str](), list[str]()

    def take(self) -> tuple[list[str], list[str], int]:
        """Files that were hashed and read, and the number of texts that were tokenized, since the last call."""
        taken = sorted(self.hashed), sorted(self.read), len(self.encoded)
        self.__init__()  # type: ignore[misc]
        return taken


NOTHING: tuple[list[str], list[str], int] = ([], [], 0)
NAMES = ["a.pdf", "b.md", "c.bin"]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """Files are settled at once."""
    done, ask, encoded = Done(), FileReader._ask, Encoder._encoded

    def spied(reader: FileReader, path: Path) -> dict[str, Any]:
        done.read.append(path.name)
        return ask(reader, path)

    def hashing(path: Path, max_bytes: int) -> bytes:
        done.hashed.append(path.name)
        return read_file(path, max_bytes)

    def encoding(encoder: Encoder, text: Any, has_offsets: bool) -> Any:
        done.encoded.append(str(text))
        return encoded(encoder, text, has_offsets)

    monkeypatch.setattr(FileReader, "_ask", spied)
    monkeypatch.setattr(readings, "read_file", hashing)
    monkeypatch.setattr(Encoder, "_encoded", encoding)
    monkeypatch.setattr(FileState, "is_settled", True)
    return done


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    contents = {
        "a.pdf": folders.pdf([DOCS[0], "", DOCS[1]]),
        "b.md": b"# Words\n\nand more",
        "c.bin": bytes(range(256)),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    return [tmp_path / name for name in contents]


Seen = tuple[list[Passage], list[str], list[str], list[tuple[Passage, float]]]


def seen(library: Library) -> Seen:
    """All that there is to see of a library."""
    found = [(found.passage, found.score) for found in library.find("the harbour, and more words", 3, 500)]
    assert found and library.num_documents == 2
    assert library.sizes == [passage.num_tokens for passage in library.passages]
    problems, partial = ([str(document) for document in of] for of in (library.problems, library.partial))
    return list(library.passages), problems, partial, found


def read(model: Model, store: Store | None, files: list[Path], passage_tokens: int = 256) -> Seen:
    with LibraryReader(fresh(model), passage_tokens, store=store) as reader:
        return seen(reader.read(files))


def fresh(model: Model) -> Model:
    """As in another process: nothing is known of a text."""
    model.encoder.kept._values.clear()
    model.encoder.kept.num_bytes = 0
    return model


def new_store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.ensure_store()
    return store


@contextmanager
def database(store: Store) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(store.root / DATABASE)) as db, db:
        yield db


def test_a_second_question_opens_no_file_and_makes_no_tokens(files: list[Path], done: Done, tmp_path: Path) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    first = read(model, store, files)
    hashed, were_read, encoded = done.take()
    assert (hashed, were_read) == (NAMES, NAMES) and encoded
    assert read(model, store, files) == first and done.take() == NOTHING
    assert first[1][0].endswith("c.bin: is binary") and "p. 2" in first[2][0], "what was said is said again"
    assert all(passage.tokens == model.encode(passage.text) for passage in first[0])
    done.take()
    with LibraryReader(fresh(model), store=store) as reader:
        libraries = [reader.read(files), reader.read(files)]
        assert libraries[0] is libraries[1] and done.take() == NOTHING


def test_a_changed_file_costs_itself_and_a_moved_one_nothing(files: list[Path], done: Done, tmp_path: Path) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    read(model, store, files), done.take()
    files[1].write_bytes(b"# Other words\n\nand more of them")
    other = read(model, store, files)
    assert done.take()[:2] == (["b.md"], ["b.md"]) and other[0][-1].text == "# Other words\n\nand more of them\n"
    assert read(model, store, files) == other and done.take() == NOTHING
    os.utime(files[1], (1, 1))
    assert read(model, store, files) == other and done.take() == (["b.md"], [], 0), "touched, and the same"
    moved = [files[0].rename(tmp_path / "moved.pdf"), *files[1:]]
    (first, *_) = read(model, store, moved)[0]
    assert first.source.endswith("moved.pdf, p. 1") and done.take() == (["moved.pdf"], [], 0)
    moved[0].unlink()
    assert len(read_some(model, store, moved[1:])) == 1 and done.take() == NOTHING


def read_some(model: Model, store: Store, files: list[Path]) -> list[Passage]:
    with LibraryReader(fresh(model), store=store) as reader:
        return list(reader.read(files).passages)


def test_a_file_whose_times_may_hide_a_change_is_hashed_each_time(
    files: list[Path], done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileState, "is_settled", False)
    model, store = tiny_model(), new_store(tmp_path)
    with LibraryReader(model, store=store) as reader:
        for text in (b"one two", b"two one"):
            files[1].write_bytes(text)
            assert [passage.text for passage in reader.read(files[1:2]).passages] == [f"{text.decode()}\n"]
    done.take()
    assert read_some(model, store, files[1:2])[0].text == "two one\n" and done.take() == (["b.md"], [], 0)


def test_another_tokenizer_or_size_cuts_again_and_reads_nothing(files: list[Path], done: Done, tmp_path: Path) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    first = read(model, store, files)
    done.take()
    smaller = read(model, store, files, passage_tokens=16)
    hashed, were_read, encoded = done.take()
    assert (hashed, were_read) == ([], []) and encoded and len(smaller[0]) > len(first[0])
    assert read(model, store, files, 16) == smaller and read(model, store, files) == first and done.take() == NOTHING


def test_nothing_is_kept_for_a_tenant_of_a_command_or_where_objects_are_signed(
    files: list[Path], done: Done, tmp_path: Path
) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    for _ in range(2):
        read(model.with_salt("mine"), store, files)
        assert done.take()[1] == NAMES and not (store.root / DATABASE).exists()
    read(model, store, files), done.take()
    signed = Store(store.root, trust=Trust(Signers(tmp_path / "signers", {}, {})))
    for tenant, there in ((model.with_salt("mine"), store), (model, signed)):
        read(tenant, there, files)
        assert done.take()[1] == NAMES, "what somebody else kept is not seen"
    for text in ("one", "two"):
        with LibraryReader(model, command=f"sh -c 'echo {text}; : {{}}'", store=store) as reader:
            library = reader.read(files)
            assert text in [*library.passages][-1].text and not library.problems
    assert read(model, store, files)[1]


def test_other_code_or_libraries_read_again(
    files: list[Path], done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    read(model, store, files), done.take()
    monkeypatch.setattr(reading, "_versions", lambda: ["another"])
    read(model, store, files)
    assert done.take()[:2] == ([], NAMES)


DAMAGE = {
    "no bytes": "UPDATE readings SET reply = 'x'", "a number": "UPDATE readings SET reply = 7",
    "cut": "UPDATE readings SET reply = substr(reply, 1, length(reply) - 1)",
    "empty": "UPDATE readings SET reply = x''",
    "one of another name": "UPDATE readings SET reply = (SELECT max(reply) FROM readings)",
    "every second is gone": "DELETE FROM readings WHERE rowid_of(name) % 2",
    "all are gone": "DELETE FROM readings",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_read_again(files: list[Path], done: Done, tmp_path: Path, damage: str) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    first = read(model, store, files)
    with database(store) as db:
        db.create_function("rowid_of", 1, lambda name: int(name[:8], 16))
        db.execute(DAMAGE[damage])
    assert read(model, store, files) == first
    done.take()
    assert read(model, store, files) == first and done.take() == NOTHING, "it is made anew"


@pytest.mark.parametrize(
    "value",
    [b"no JSON", b"[]", b'{"reader": 1}', b'{"reader": "", "notes": [], "sections": []}', b'["a", "", [], 9, 9]\n'],
)
def test_values_that_make_no_sense_are_read_again(files: list[Path], done: Done, tmp_path: Path, value: bytes) -> None:
    """Whoever may write a store may also write a digest; only such values get so far."""
    model, store = tiny_model(), new_store(tmp_path)
    first = read(model, store, files)
    with database(store) as db:
        names = [name for (name,) in db.execute("SELECT name FROM readings")]
    kept = Readings(store.root)
    for name in names:
        kept.add(name, value)
    kept.flush()
    assert read(model, store, files)[:3] == first[:3]


def test_the_database_is_damaged_or_gone(files: list[Path], done: Done, tmp_path: Path) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    first = read(model, store, files)
    path = store.root / DATABASE
    path.write_bytes(path.read_bytes()[:100] + os.urandom(9000))
    assert read(model, store, files) == first
    path.unlink(missing_ok=True)
    assert read(model, store, files) == first
    done.take()
    assert read(model, store, files) == first and done.take() == NOTHING


def test_where_nothing_can_be_written_a_process_still_remembers(
    files: list[Path], done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a store that only others may write, and one that is not there yet."""
    model, store = tiny_model(), new_store(tmp_path)

    def refuse(*_: object) -> NoReturn:
        raise UnwritableStoreError("a full disk")

    monkeypatch.setattr(readings, "writing", refuse)
    for there in (store, Store(tmp_path / "nowhere"), None):
        with LibraryReader(fresh(model), store=there) as reader:
            first = seen(reader.read(files))
            assert done.take()[1] == NAMES
            assert seen(reader.read(files)) == first and done.take() == NOTHING
    assert not (tmp_path / "nowhere").exists()


def test_what_was_read_before_the_store_was_made_is_kept(files: list[Path], done: Done, tmp_path: Path) -> None:
    model, store = tiny_model(), Store(tmp_path / "store")
    with LibraryReader(fresh(model), store=store) as reader:
        first = seen(reader.read(files))
        store.ensure_store()
    done.take()
    assert read(model, store, files) == first and done.take() == NOTHING


def test_a_library_is_of_the_moment_when_it_was_read(files: list[Path], done: Done, tmp_path: Path) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    with LibraryReader(model, store=store) as reader:
        library = reader.read(files)
        first = seen(library)
        files[1].write_bytes(b"of later")
        assert seen(library) == first, "its texts are kept"
        with database(store) as db:
            db.execute("DELETE FROM readings")
        with pytest.raises(InputError, match=re.escape(str(files[1]))):
            seen(library)
        files[1].write_bytes(b"# Words\n\nand more")
        assert seen(library) == first


def test_processes_that_read_at_once_do_not_disturb_each_other(files: list[Path], done: Done, tmp_path: Path) -> None:
    model, store = tiny_model(), new_store(tmp_path)
    with LibraryReader(model, store=store) as one, LibraryReader(model, store=store) as other:
        libraries = [one.read(files[:2]), other.read(files[1:]), one.read(files), other.read(files)]
        assert seen(libraries[2]) == seen(libraries[3])
    done.take()
    assert read(model, store, files) == seen(libraries[2]) and done.take() == NOTHING


def test_it_is_bounded_and_forgets_what_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, day = new_store(tmp_path), 86400.0
    monkeypatch.setattr(readings, "_MAX_BYTES", 3000)
    for number in range(10):
        monkeypatch.setattr(time, "time", lambda number=number: number * day)
        kept = Readings(store.root)
        kept.get(["0"])
        kept.add(str(number), os.urandom(400))
        kept.flush()
    names = {str(number) for number in range(10)}
    there = set(Readings(store.root).get(names))
    assert {"0", "9"} <= there and 3 <= len(there) <= 7, "what was used last stays"
    monkeypatch.setattr(time, "time", lambda: 38.5 * day)
    gc(store)
    assert set(Readings(store.root).get(names)) == there & {"0", "8", "9"}


def test_a_value_is_inflated_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Readings(None)
    kept.add("zeros", bytes(1 << 20))
    monkeypatch.setattr(readings, "_MAX_VALUE", 1000)
    assert len(kept.get(["zeros"])["zeros"]) == 1000
    kept._new["zeros"] = readings._digest("zeros", b"no zlib") + b"no zlib"
    assert kept.get(["zeros"]) == {} and zlib.decompress(zlib.compress(b"")) == b""

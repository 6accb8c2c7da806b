"""What texts were compiled to, remembered, so that unchanged ones are found in a store without loading a model.

As ccache's direct mode: a text's keys are kept under all that they follow from, the text itself, the files of the model
by name, inode, size and times, the versions of the libraries, device, dtype, salt and options. What changes any of
these is not recalled, and then model and tokenizer say. The database is the user's own, and may be lost.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import sqlite3
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pictool.core import CompileOptions
from pictool.reading import FileState
from pictool.runtime.memory.user_cache import cache_dir, make_private
from pictool.store.files import make_file

_SCHEMA = "CREATE TABLE compiled (name BLOB PRIMARY KEY, objects TEXT NOT NULL, used INT NOT NULL) WITHOUT ROWID"
_MAX_ROWS = 500_000
_WAIT_S = 0.2
_LIBRARIES = ("pictool", "torch", "transformers", "tokenizers")
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # where `auto` is no CPU, for all that is known here
_READING = 2  # how texts become tokens: 1 read markers as control tokens
_KEY = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class RecalledChunk:
    """One chunk of a text: what its source's name is followed by, its tokens, its key."""

    suffix: str
    num_tokens: int
    key: str


def model_files(directory: Path) -> tuple[tuple[str, FileState], ...]:
    """The files of a model directory as they are now, by name. Raises OSError."""
    return tuple((path.name, FileState.of(path.stat())) for path in sorted(directory.iterdir()))


@dataclass(frozen=True)
class Surroundings:
    """All that the keys of a text follow from, beside the text. `files` are the model's, before it is loaded."""

    directory: Path
    files: tuple[tuple[str, FileState], ...]
    device: str
    dtype: str
    salt: str
    options: CompileOptions
    chunk_tokens: int | None
    overlap: int

    @property
    def are_settled(self) -> bool:
        """Whether every later change of the model shows; known before it is loaded."""
        return all(state.is_settled for _, state in self.files)

    def name(self, text: str) -> bytes:
        """The name under which a text is remembered; whoever does not know the salt cannot compute it."""
        text_hash = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        named = f'[{self._common}, "{text_hash}"]'.encode()
        return hmac.new(self.salt.encode(errors="surrogatepass"), named, hashlib.sha256).digest()

    @cached_property
    def _common(self) -> str:
        """What all names have in common, but for the salt, as JSON."""
        rest: dict[str, Any] = asdict(self) | {
            "directory": str(self.directory.resolve()),
            "accelerators": [path for path in _ACCELERATORS if os.path.exists(path)],
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "reading": _READING,
            "versions": [_version(name) for name in _LIBRARIES],
        }
        del rest["salt"]
        return json.dumps(rest, sort_keys=True)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def recall(surroundings: Surroundings, texts: Sequence[str]) -> list[list[RecalledChunk]] | None:
    """The chunks of every text; None if one of them is not remembered."""
    try:
        names = [surroundings.name(text) for text in texts]
        with _connected("ro") as db:
            rows = [db.execute("SELECT objects FROM compiled WHERE name = ?", (name,)).fetchone() for name in names]
        return [_parse(name, row[0]) for name, row in zip(names, rows, strict=True)]
    except (OSError, sqlite3.Error, ValueError, TypeError):  # absent, damaged, or not remembered
        return None


def _pack(name: bytes, chunks: Sequence[RecalledChunk]) -> str:
    """The chunks as they are kept: as JSON, behind a checksum that also covers the name."""
    listed = json.dumps([[chunk.suffix, chunk.num_tokens, chunk.key] for chunk in chunks])
    return _checksum(name, listed) + listed


def _checksum(name: bytes, listed: str) -> str:
    return hashlib.sha256(name + listed.encode()).hexdigest()


def _parse(name: bytes, packed: str) -> list[RecalledChunk]:
    checksum, listed = packed[:64], packed[64:]
    if checksum != _checksum(name, listed):
        raise ValueError(packed)
    parsed = [RecalledChunk(str(suffix), int(tokens), str(key)) for suffix, tokens, key in json.loads(listed)]
    if not parsed or not all(_KEY.fullmatch(chunk.key) for chunk in parsed):
        raise ValueError(listed)
    return parsed


def remember(surroundings: Surroundings, compiled: Mapping[str, Sequence[RecalledChunk]]) -> None:
    """Keep the chunks of texts. Where that is not possible, nothing is kept, and nothing raised.

    Nor is it where the files of the model are others than they were before it was loaded.
    """
    with suppress(OSError, sqlite3.Error):
        if model_files(surroundings.directory) != surroundings.files:
            return
        path = _database()
        make_private(path.parent)
        names = {text: surroundings.name(text) for text in compiled}
        rows = [(names[text], _pack(names[text], chunks)) for text, chunks in compiled.items()]
        try:
            _write(rows)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # damaged
            path.unlink()
            _write(rows)


def _write(rows: Sequence[tuple[bytes, str]]) -> None:
    with _connected("rw") as db, db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA journal_mode = MEMORY")  # a killed process leaves no file, but perhaps a damaged database
        db.execute("BEGIN IMMEDIATE")
        if db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            db.execute(_SCHEMA)
        _add(db, rows)


@contextmanager
def _connected(mode: str) -> Iterator[sqlite3.Connection]:
    """The database; what is no regular file makes way, as sqlite would wait for a pipe.

    Raises:
        OSError, sqlite3.Error: it cannot be opened.
    """
    path = _database()
    for place in (path, path.with_name(f"{path.name}-journal")):
        if os.path.lexists(place) and not stat.S_ISREG(place.lstat().st_mode):
            place.unlink()
    if mode == "rw" and not path.exists():
        make_file(path)
    uri = f"{path.as_uri()}?mode={mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=_WAIT_S, isolation_level=None)) as db:
        yield db


def _add(db: sqlite3.Connection, rows: Sequence[tuple[bytes, str]]) -> None:
    """Add rows as the newest; where there are too many, the oldest go."""
    (last,) = db.execute("SELECT coalesce(max(used), 0) FROM compiled").fetchone()
    db.executemany("INSERT OR REPLACE INTO compiled VALUES (?, ?, ?)", [(*row, last + 1) for row in rows])
    (num_rows,) = db.execute("SELECT count(*) FROM compiled").fetchone()
    if num_rows > _MAX_ROWS:
        oldest = "SELECT name FROM compiled ORDER BY used LIMIT ?"
        db.execute(f"DELETE FROM compiled WHERE name IN ({oldest})", (_MAX_ROWS // 10,))


def _database() -> Path:
    return cache_dir() / "compiled.sqlite3"

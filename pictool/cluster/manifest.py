"""The manifest of a bulk compile: a parquet file that says which objects every document became.

    id      string          the document's: its file's name, FILE#NUMBER, or what its id column says
    chunk   int32           the chunk's number in its document; null if the document could not be read or cut
    key     string          of the object
    tokens  int32
    bytes   int64           of the object's file; null, with an error, if it could not be written
    error   string          null if all is well

Rows are sorted by id and chunk, so that two runs over the same documents write the same manifest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.store.files import atomic_write
from pictool.store.remote.remote import Remote
from pictool.store.signatures import Signed, SigningKey, sign_file

if TYPE_CHECKING:
    import pyarrow as pa

_CONNECTIONS = 8  # to the remote
COLUMNS = ("id", "chunk", "key", "tokens", "bytes", "error")


@dataclass(frozen=True)
class ManifestRow:
    """A chunk of a document, or the document's error.

    Beside what the manifest says: whether it was computed now (`is_new`), whether it is the first of its document,
    its share of the seconds that its batch took, and of the bytes that were read; and whether it stands for a worker
    that cannot compile anything (`is_fatal`). `digest` is that of the header of an object that was computed now, which
    its signature is of.
    """

    id: str
    chunk: int | None
    key: str | None
    tokens: int | None
    bytes: int | None
    error: str | None
    is_new: bool
    is_first: bool
    seconds: float
    num_read: int
    is_fatal: bool = False
    digest: str | None = None

    @classmethod
    def failed(
        cls, name: str, error: str, num_read: int = 0, seconds: float = 0.0, is_fatal: bool = False
    ) -> ManifestRow:
        """The row of a document that became no object."""
        return cls(name, None, None, None, None, error, False, True, seconds, num_read, is_fatal)


def row_schema() -> pa.Schema:
    """The columns of rows between processes."""
    import pyarrow as pa

    return pa.schema(
        [
            ("id", pa.string()), ("chunk", pa.int32()), ("key", pa.string()), ("tokens", pa.int32()),
            ("bytes", pa.int64()), ("error", pa.string()), ("is_new", pa.bool_()), ("is_first", pa.bool_()),
            ("seconds", pa.float64()), ("num_read", pa.int64()), ("is_fatal", pa.bool_()),
            ("digest", pa.string()),
        ]
    )  # fmt: skip


def to_table(rows: Sequence[ManifestRow]) -> pa.Table:
    import pyarrow as pa

    schema = row_schema()
    return pa.table({name: [getattr(row, name) for row in rows] for name in schema.names}, schema=schema)


def write_manifest(path: Path, tables: Sequence[pa.Table], key: SigningKey | None = None) -> None:
    """Write a manifest, which appears as a whole, and its signature beside it.

    Raises:
        StoreError: it cannot be written.
    """
    import pyarrow as pa
    from pyarrow.parquet import write_table

    table = pa.concat_tables(tables) if tables else row_schema().empty_table()
    table = table.select(COLUMNS).sort_by([("id", "ascending"), ("chunk", "ascending"), ("key", "ascending")])
    with atomic_write(path) as file:
        write_table(table, file, compression="zstd")
    if key is not None:
        sign_file(key, path)


def sign_computed(remote: Remote, tables: Sequence[pa.Table], key: SigningKey) -> None:
    """Sign the objects at the remote that this compile computed.

    No worker has the key: a signature says that the driver's workers returned this digest for that key.

    Raises:
        StoreError or RemoteError: the remote cannot be written.
    """
    computed = defaultdict[str, set[str]](set)  # digests by key: two workers may have computed a chunk in other packs
    for table in tables:
        for own, digest in zip(table["key"].to_pylist(), table["digest"].to_pylist(), strict=True):
            if digest is not None:
                computed[own].add(digest)

    def sign(own: str) -> None:
        signed = [Signed(digest, own) for digest in sorted(computed[own])]
        remote.write_signatures(signed[0], b"".join(map(key.sign, signed)))

    with ThreadPoolExecutor(_CONNECTIONS, "pic-sign") as threads:
        list(threads.map(sign, computed))

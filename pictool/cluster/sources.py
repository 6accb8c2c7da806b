"""The documents of a bulk compile: files, folders, globs, jsonl and parquet, at any place that fsspec knows.

What is wrong with one document, or one file, is a document with an error: it stops no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pictool.compiler.chunking import MAX_FILE_BYTES, decode_text
from pictool.errors import InputError
from pictool.reading import is_within, parse_json, read_file, shown
from pictool.urls import without_credentials

_JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_PARQUET = (".parquet", ".pq")
TABLES = (*_JSONL, *_PARQUET)  # suffixes of files that hold many documents
_GLOB = frozenset("*?[")
_PARQUET_ROWS = 256  # that are read at once


@dataclass(frozen=True)
class Columns:
    """Which fields of jsonl and parquet are read. Without `id` a document is named FILE#NUMBER, from 0 on."""

    text: str = "text"
    id: str | None = None


@dataclass(frozen=True)
class SourceFile:
    """A file that documents are read from: `name` is what a user calls it, `url` is where every machine finds it."""

    name: str
    url: str
    num_bytes: int


@dataclass(frozen=True)
class SourceDocument:
    """A document, or its error. `num_bytes` is roughly its size in the file."""

    id: str
    text: str | None
    error: str | None
    num_bytes: int = 0


def find_sources(names: Sequence[str]) -> list[SourceFile]:
    """The files that these name, each once, in order; of a folder all below it but hidden ones.

    Raises:
        InputError: there is none, or a place that cannot be listed.
    """
    found: dict[str, SourceFile] = {}
    for name in names:
        listed = _listed(name)
        if not listed:
            raise InputError(
                f"{without_credentials(name)}: contains no files; specify text files, folders, globs, jsonl or parquet"
            )
        found |= {source.url: source for source in listed if source.url not in found}
    return list(found.values())


def _listed(name: str) -> list[SourceFile]:
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(name)
        if files.isdir(root):
            entries = files.find(root, detail=True).values()
            if "file" in files.protocol:
                entries = [entry for entry in entries if is_within(Path(entry["name"]), Path(root))]
        elif _GLOB & set(name) and not files.exists(root):
            entries = (entry for entry in files.glob(root, detail=True).values() if entry["type"] == "file")
        else:
            entries = [files.info(root)]
        return sorted(_visible(name, files, str(root), entries), key=lambda source: source.url)
    except FileNotFoundError as error:
        raise InputError(f"{without_credentials(name)}: no such file, folder or glob") from error
    except ImportError as error:
        raise InputError(f"{without_credentials(name)}: no package for this protocol is installed ({error})") from error
    except Exception as error:  # whatever a file system raises
        raise InputError(f"{without_credentials(name)}: cannot be listed ({_why(error)})") from error


def _visible(name: str, files: Any, root: str, entries: Iterable[dict[str, Any]]) -> Iterator[SourceFile]:
    for entry in entries:
        path = str(entry["name"])
        relative = path[len(root) :].lstrip("/") if path.startswith(root) else path
        if any(part.startswith(".") for part in relative.split("/")):
            continue
        url = path if "file" in files.protocol else str(files.unstrip_protocol(path))
        own_name = path if Path(name).is_absolute() else os.path.relpath(path)
        yield SourceFile(without_credentials(url) if "://" in name else own_name, url, int(entry.get("size") or 0))


def read_documents(source: SourceFile, columns: Columns) -> Iterator[SourceDocument]:
    """The documents of a file, as they are read. What cannot be read is a document with an error."""
    try:
        if source.url.endswith(_JSONL):
            yield from _jsonl(source, columns)
        elif source.url.endswith(_PARQUET):
            yield from _parquet(source, columns)
        else:
            yield SourceDocument(source.name, _text(source), None, source.num_bytes)
    except InputError as error:
        yield SourceDocument(source.name, None, str(error), source.num_bytes)
    except Exception as error:  # whatever a file system or pyarrow raises
        yield SourceDocument(source.name, None, f"{source.name}: cannot be read ({_why(error)})", 0)


def _text(source: SourceFile) -> str:
    if "://" not in source.url:
        try:
            return decode_text(source.name, read_file(Path(source.url), MAX_FILE_BYTES))
        except OSError as error:
            raise InputError(f"{source.name}: cannot be read ({error.strerror})") from error
    import fsspec

    files, path = fsspec.core.url_to_fs(source.url)
    return decode_text(source.name, files.cat_file(path, end=MAX_FILE_BYTES + 1))


def _jsonl(source: SourceFile, columns: Columns) -> Iterator[SourceDocument]:
    import fsspec

    if "://" not in source.url and not Path(source.url).is_file():
        raise InputError(f"{source.name}: is not a regular file")
    with fsspec.open(source.url, "rb", compression="infer") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_FILE_BYTES + 1), b"")):
            name, size = f"{source.name}#{number}", len(line)
            if size > MAX_FILE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_FILE_BYTES + 1)
                yield SourceDocument(name, None, f"{name}: has more than {MAX_FILE_BYTES >> 20} MiB", size)
            elif line.strip():
                yield _of_line(line, name, columns)


def _of_line(line: bytes, name: str, columns: Columns) -> SourceDocument:
    try:
        record = parse_json(line)
    except (ValueError, RecursionError) as error:
        return SourceDocument(name, None, f"{name}: is not JSON ({_why(error)})", len(line))
    if not isinstance(record, dict):
        return SourceDocument(name, None, f"{name}: must be an object with the field {columns.text!r}", len(line))
    return _of_record(record, name, columns, len(line))


def _of_record(record: dict[str, Any], name: str, columns: Columns, num_bytes: int) -> SourceDocument:
    """A record's document. An id may be a text or a number; a text that is empty is refused when it is compiled."""
    if columns.id is not None:
        value = record.get(columns.id)
        if value is None or isinstance(value, bool | list | dict):
            return SourceDocument(
                name, None, f"{name}: {columns.id} must be a text or a number, not {shown(value)}", num_bytes
            )
        name = str(value)
    text = record.get(columns.text)
    if not isinstance(text, str):
        return SourceDocument(name, None, f"{name}: {columns.text} must be a text, not {shown(text)}", num_bytes)
    if len(text) > MAX_FILE_BYTES:
        return SourceDocument(
            name, None, f"{name}: has more than {MAX_FILE_BYTES >> 20} MiB of text; split it", num_bytes
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        return SourceDocument(name, None, f"{name}: contains an unpaired surrogate, which is not text", num_bytes)
    return SourceDocument(name, text, None, num_bytes)


def _parquet(source: SourceFile, columns: Columns) -> Iterator[SourceDocument]:
    import fsspec
    from pyarrow.parquet import ParquetFile

    names = [columns.text] if columns.id is None else [columns.text, columns.id]
    with fsspec.open(source.url, "rb") as file:
        table = ParquetFile(file)
        if missing := [name for name in names if name not in table.schema_arrow.names]:
            known = ", ".join(table.schema_arrow.names)
            raise InputError(f"{source.name}: has no column {missing[0]}; it has {known[:200]}")
        each = source.num_bytes // max(1, table.metadata.num_rows)
        batches = table.iter_batches(_PARQUET_ROWS, columns=names)
        for number, record in enumerate(record for batch in batches for record in batch.to_pylist()):
            yield _of_record(record, f"{source.name}#{number}", columns, each)


def _why(error: BaseException) -> str:
    return without_credentials(" ".join(str(error).split()))[:200] or type(error).__name__

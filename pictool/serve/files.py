"""Uploaded texts of tenants, one file each beside the store: .pic/files/TENANT/FILE."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pictool.compiler.chunking import is_other_kind
from pictool.documents.reading import FileReader
from pictool.reading import open_regular, read_file
from pictool.serve.errors import ApiError
from pictool.store.directory import ensure_store
from pictool.store.files import atomic_write

MAX_BYTES = 32 << 20  # of a text
MAX_FILES, MAX_TOTAL_BYTES = 10_000, 1 << 30  # of a tenant
_MAX_LINE = 1 << 16  # bytes of what a file is
_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True)
class TextFile:
    """An uploaded text."""

    id: str
    created_at: int
    filename: str
    purpose: str
    num_bytes: int

    def report(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "file", "bytes": self.num_bytes, "created_at": self.created_at,
            "filename": self.filename, "purpose": self.purpose, "status": "processed",
        }  # fmt: skip


class Files:
    """The texts of all tenants of a store. A file's first line is what it is, and what follows is the text."""

    def __init__(self, root: Path, max_total: int = MAX_TOTAL_BYTES) -> None:
        self._root, self._max_total, self._reader = root, max_total, FileReader()

    def add(self, tenant: str, filename: str, purpose: str, data: bytes) -> TextFile:
        """Keep a text, or that of a PDF, HTML or Office file.

        Raises:
            ApiError: empty, no text, too large, or the tenant has too many. StoreError: it cannot be written.
        """
        if len(data) > MAX_BYTES:
            raise ApiError(413, f"file: more than {MAX_BYTES >> 20} MiB; split it", param="file")
        text = self._text(data)
        if not text.strip() or "\0" in text:
            raise ApiError(400, "file: is empty or binary; upload text", param="file")
        sizes = [path.lstat().st_size for path in self._paths(tenant)]
        if len(sizes) >= MAX_FILES:
            raise ApiError(400, f"file: you already have {MAX_FILES} files; delete some", param="file")
        if sum(sizes) + len(data) > self._max_total:
            raise ApiError(400, f"file: your files would exceed {self._max_total:,d} bytes; delete some", param="file")
        file = TextFile(f"file-{secrets.token_hex(16)}", int(time.time()), filename[:255], purpose[:64], len(data))
        ensure_store(self._root)
        with atomic_write(self._path(tenant, file.id), self._root / "tmp") as out:
            out.write(json.dumps(asdict(file)).encode() + b"\n" + text.encode())
        return file

    def _text(self, data: bytes) -> str:
        if is_other_kind(data):
            document = self._reader.read_bytes(data)
            if document.problem:
                raise ApiError(400, f"file: {document.problem}", param="file")
            return document.text
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ApiError(
                400, f"file: not UTF-8 text at byte {error.start}; convert it first", param="file"
            ) from error

    def find(self, tenant: str, name: str) -> tuple[TextFile, str] | None:
        """A tenant's file and its text."""
        if not _ID.fullmatch(name):
            return None
        with suppress(OSError, ValueError, TypeError):
            first, _, text = read_file(self._path(tenant, name), MAX_BYTES + _MAX_LINE).partition(b"\n")
            return TextFile(**json.loads(first)), text.decode()
        return None

    def list(self, tenant: str) -> list[TextFile]:
        """A tenant's files, the newest first. Their texts are not read."""
        found = [_first_line(path) for path in self._paths(tenant) if _ID.fullmatch(path.name)]
        files = [file for file in found if file is not None]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def remove(self, tenant: str, name: str) -> bool:
        """Remove a file; False if there is none. Through a link there is none."""
        path = self._path(tenant, name)
        if not _ID.fullmatch(name) or path.parent.is_symlink() or path.parent.parent.is_symlink():
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            return True
        return False

    def _path(self, tenant: str, name: str) -> Path:
        return self._root / "files" / tenant / name

    def _paths(self, tenant: str) -> Iterator[Path]:
        with suppress(OSError):
            yield from (self._root / "files" / tenant).iterdir()


def _first_line(path: Path) -> TextFile | None:
    """What a file is; None if it cannot be read."""
    with suppress(OSError, ValueError, TypeError), os.fdopen(open_regular(path), "rb") as file:
        return TextFile(**json.loads(file.readline(_MAX_LINE)))
    return None

"""Office files: zip archives of XML, whose inflated size is bounded before anything is inflated."""

from __future__ import annotations

import io
import zipfile

from pictool.documents.base import MAX_INFLATED_BYTES, UnreadableError

_MAX_MEMBERS = 20_000
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # compound files: Office before 2007, and Office encrypted with a password


def has_member(data: bytes, name: str) -> bool:
    """Whether data is a zip archive with this member, as far as its bytes say: the name is in its directory."""
    return data.startswith(b"PK\x03\x04") and name.encode() in data


def open_office(data: bytes) -> io.BytesIO:
    """The archive for a library to read.

    `zipfile` inflates at most the size that the directory names, so the sum of these bounds what is inflated.

    Raises:
        UnreadableError: damaged, or larger than `MAX_INFLATED_BYTES` when it is inflated.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        raise UnreadableError(f"is damaged ({error})") from error
    if len(members) > _MAX_MEMBERS or sum(member.file_size for member in members) > MAX_INFLATED_BYTES:
        raise UnreadableError(f"has more than {MAX_INFLATED_BYTES >> 20} MiB when it is inflated")
    if any(member.flag_bits & 1 for member in members):
        raise UnreadableError("is encrypted; save it without a password")
    return io.BytesIO(data)


def is_outlook(data: bytes) -> bool:
    """Whether data is a compound file that is a message of Outlook (.msg), whose directory names this stream."""
    return data.startswith(_OLE) and "__properties_version1.0".encode("utf-16-le") in data


def is_old_office(data: bytes) -> bool:
    return data.startswith(_OLE)

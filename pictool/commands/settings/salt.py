"""Salts: where they are read from, and what a weak one is worth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pictool.commands.console.errors import UsageError
from pictool.errors import InputError
from pictool.reading import read_stream

MIN_BITS = 64  # by `most_bits`, of which 16 random bytes have more, in hex or base64 (at least 73 in 60,000 draws)
MAKE_ONE = "create one with: openssl rand -hex 32"
_MAX_BYTES = 4096


def with_salt(values: Mapping[str, Any], salt: str, salt_file: str) -> dict[str, Any]:
    """Settings of one place, with the content of `salt_file`, if they name one, as `salt`.

    Args:
        salt, salt_file: what the two are called there.

    Raises:
        UsageError: both are named.
        InputError: the file has no salt.
    """
    settled = dict(values)
    path = settled.pop("salt_file", None)
    if path is None:
        return settled
    if settled.get("salt") is not None:
        raise UsageError(f"{salt} and {salt_file}: use only one of them")
    return settled | {"salt": read_salt(Path(path))}


def read_salt(path: Path) -> str:
    """Read the salt in a file, without the line's end. A pipe serves as well: `--salt-file <(pass show tenant)`.

    A pipe without a writer is not waited for: it has no salt.

    Raises:
        InputError: unreadable, empty, no text, or too long; no message has any of the content.
    """
    try:
        data = read_stream(path, _MAX_BYTES)
    except OSError as error:
        raise InputError(f"{path}: the salt cannot be read ({error.strerror}); choose another file") from error
    try:
        salt = data.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the salt is not UTF-8 text; {MAKE_ONE}") from error
    if not salt:
        raise InputError(f"{path}: contains no salt; {MAKE_ONE}")
    return salt


def most_bits(salt: str) -> float:
    """The entropy of a salt in bits if its characters were drawn independently, as often as they occur in it.

    That is an upper bound for most: a sentence has far less. What is below `MIN_BITS` is surely weak.
    """
    counts = Counter(salt).values()
    return -sum(count * math.log2(count / len(salt)) for count in counts)


def is_weak(salt: str) -> bool:
    """Whether a salt is surely weak; no salt is none."""
    return salt != "" and most_bits(salt) < MIN_BITS


def without_salts(arguments: list[str]) -> list[str]:
    """A command line as it may be kept: in place of a salt are three dots."""
    shown: list[str] = []
    for word in arguments:
        is_value = shown[-1:] == ["--salt"]
        shown.append("..." if is_value else "--salt=..." if word.startswith("--salt=") else word)
    return shown

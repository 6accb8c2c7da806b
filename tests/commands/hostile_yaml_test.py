"""Settings of strangers: one line, at once, whatever the file is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from commands.run import pic, write
from pictool.commands.settings.settings import read_settings
from pictool.errors import InputError

LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
# The text of a file, and what the message says beside its name.
CASES: dict[str, tuple[str | bytes, str]] = {
    "billion laughs": (LAUGHS, "aliases"),
    "merged laughs": (MERGES, "aliases"),
    "itself": ("head: &a [*a]", "aliases"),
    "a key of itself": ("? &a [*a]\n: x", "aliases"),
    "an undefined alias": ("head: *nothing", "aliases"),
    "a key twice": ("head: a\nhead: b", "line 2, column 1: the key head"),
    "deep": ("head: " + "[" * 100_000, "too deep"),
    "deep blocks": ("".join(f"{' ' * i}a:\n" for i in range(500)), "too deep"),
    "many": ("head: [" + "a," * 200_000 + "]", "too many values"),
    "a Python object": ("head: !!python/object/apply:os.system [true]", "could not determine a constructor"),
    "a tag": ("head: !secret x", "could not determine a constructor"),
    "a tag of another value": ("head: !!int x", "YAML ("),
    "a number for a tag": ("head: !!timestamp x", "YAML ("),
    "bytes": ("head: !!binary aGVsbG8=", "head must be a string"),
    "a set": ("head: !!set {a, b}", "head must be a string"),
    "a date": ("head: 2001-99-99", "YAML ("),
    "a number": ("head: 1", "head must be a string"),
    "NaN": ("head: .nan", "head must be a string"),
    "a number of many digits": ("head: " + "9" * 100_000, "too many digits"),
    "a number to the base of 60": ("head: " + "1:" * 100_000 + "1", "too many digits"),
    "hexadecimal digits": ("head: 0x" + "f" * 100_000, "too many digits"),
    "not UTF-8": (b"head: \xff", "YAML ("),
    "UTF-16": ("head: x".encode("utf-16"), "YAML ("),
    "NUL": (b"head: \0", "YAML ("),
    "a list": ("- head", "must be a mapping"),
    "two documents": ("head: a\n---\nhead: b", "YAML ("),
    "an unknown key": ("x" * 1000 + ": y", "unknown key"),
    "a key that is a number": ("? 0x" + "f" * 900 + "\n: y", "unknown key"),
    "large": ("#" * (1 << 20) + "\nhead: x", "larger than 1 MiB"),
}  # fmt: skip
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "settings": ("pic.yaml", lambda path: read_settings()),
}


def refusal(reader: str, make: Callable[[Path], object]) -> str:
    name, read = READERS[reader]
    path = Path(name)
    make(path)
    started = time.monotonic()
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert time.monotonic() - started < 60, message  # a hang; the machine may be busy
    assert message.startswith(f"{name}: ") and "\n" not in message and len(message) < 500, message
    return message


@pytest.mark.parametrize("reader", READERS)
def test_every_file_is_refused_at_once(reader: str) -> None:
    for title, (text, says) in CASES.items():
        message = refusal(reader, lambda path, text=text: write(path, text))  # type: ignore[misc]
        assert says in message, (title, message)


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "it is a named pipe, not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
    "directory": (Path.mkdir, "it is a directory, not a regular file"),
    "sparse": (make_sparse, "larger than 1 MiB"),
    "link to itself": (lambda path: path.symlink_to(path.name), "symbolic links"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_not_waited_for(reader: str, kind: str) -> None:
    make, says = SPECIAL[kind]
    assert says in refusal(reader, make)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("pipe", "is empty"),
        ("device", "cannot be read (it is a device, not a regular file)"),
    ],
)
def test_a_document_that_is_no_file_is_not_waited_for(kind: str, says: str, model: Path) -> None:
    """Nobody writes to the pipe, so that it ends at once."""
    SPECIAL[kind][0](Path("a.txt"))
    outcome = pic("compile", "a.txt", "-m", model)
    assert outcome.code == 1 and outcome.err.startswith(f"pic: error: a.txt: {says}")


def test_a_byte_order_mark_is_no_part_of_a_key() -> None:
    write("pic.yaml", b"\xef\xbb\xbfhead: x")
    assert read_settings().head == "x"

"""Damaged objects: refused by their checksums when they are linked, with the remedy, and healed by it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from commands.run import Objects, Outcome, flip, pic
from pictool import reading
from pictool.store.objects import format
from pictool.store.objects.format import CompiledChunk, ObjectFile, write_object

REMEDY = "compile it again"


def link(path: Path, model: Path) -> Outcome:
    outcome = pic("link", path, "-q", "why?", "--max-new-tokens", 2, "--store", "store", "-m", model)
    assert (outcome.code, outcome.out) == (1, "")
    return outcome


def error_of(outcome: Outcome) -> str:
    """The error line; that the head was compiled first may be noted before it."""
    *notes, error = outcome.err.splitlines()
    assert notes in ([], ["pic: compiled first: head (1 token)"])
    assert error.startswith("pic: error: ")
    return error


def offsets(path: Path) -> dict[str, int]:
    """One offset in every part of an object."""
    size = path.stat().st_size
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return {"header": 300, "length": 0, "tokens": header + 4, "layers": size // 2, "text": size - 5}


@pytest.mark.parametrize("part", ["header", "length", "tokens", "layers", "text"])
def test_one_flipped_bit_anywhere_is_refused(part: str, model: Path, objects: Objects) -> None:
    damaged = Path(shutil.copy(objects.mine, "damaged.kvo"))
    flip(damaged, offsets(damaged)[part])
    error = error_of(link(damaged, model))
    assert "damaged.kvo" in error
    assert REMEDY in error or "not an object file" in error


@pytest.mark.parametrize("size", [0, 7, 8, 200, -1, -1000])
def test_a_truncated_object_is_refused(size: int, model: Path, objects: Objects) -> None:
    damaged = Path("damaged.kvo")
    damaged.write_bytes(objects.mine.read_bytes()[:size])
    error = error_of(link(damaged, model))
    assert "damaged.kvo" in error
    assert REMEDY in error or "not an object file" in error


def test_an_object_with_a_longer_end_is_refused(model: Path, objects: Objects) -> None:
    damaged = Path("damaged.kvo")
    damaged.write_bytes(objects.mine.read_bytes() + b"\0")
    assert REMEDY in error_of(link(damaged, model))


def test_a_list_without_its_member_is_refused(model: Path, texts: tuple[Path, Path]) -> None:
    assert pic("compile", "a.txt", "--chunk-tokens", 16, "-o", "a.kvo", "-m", model).code == 0
    Path("a.0001.kvo").unlink()
    assert "a.0001.kvo" in error_of(link(Path("a.kvo"), model))


def test_a_damaged_object_in_the_store_is_healed_from_its_text(model: Path, texts: tuple[Path, Path]) -> None:
    named = ("-m", model, "--store", "store")
    done = pic("compile", "a.txt", *named, "--json").json
    key, path = done["objects"][0]["key"], Path(done["objects"][0]["path"])
    whole = path.read_bytes()
    for command in (("compile", "a.txt"), ("link", "a.txt", "-q", "why?", "--max-new-tokens", 2)):
        flip(path)
        outcome = pic(*command, *named)
        assert outcome.code == 0 and path.read_bytes() == whole and "cached" not in outcome.out
        assert key in outcome.err and "its text is compiled again" in outcome.err
    flip(path)
    assert "pic compile --force" in error_of(pic("link", key, "-q", "why?", *named))  # no text is at hand


def test_a_truncated_object_in_the_store_is_compiled_again(model: Path, texts: tuple[Path, Path]) -> None:
    """Its header tells at once that it is cut, so that it does not count as compiled."""
    path = Path(pic("compile", "a.txt", "-m", model, "--json").json["objects"][0]["path"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert pic("compile", "a.txt", "-m", model, "--json").json["objects"][0]["new"]
    assert path.read_bytes() == whole


# What is no regular file, wherever a command takes one


def make_pipe() -> Path:
    os.mkfifo("x.kvo")
    return Path("x.kvo")


def make_device() -> Path:
    Path("x.kvo").symlink_to("/dev/zero")
    return Path("x.kvo")


def make_socket() -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("x.kvo")
    return Path("x.kvo")


def make_directory() -> Path:
    Path("x.kvo").mkdir()
    return Path("x.kvo")


KINDS = [make_pipe, make_device, make_socket, make_directory, lambda: Path("/dev/zero")]


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("make", KINDS, ids=["pipe", "device", "socket", "directory", "/dev/zero"])
def test_what_is_no_file_is_refused_and_not_waited_for(make: Callable[[], Path], model: Path) -> None:
    path = make()
    for arguments in (
        ("inspect", path), ("inspect", path, "--text"), ("store", "pull", path), ("compile", path, "-m", model),
        ("link", path, "-q", "why?", "-m", model),
    ):  # fmt: skip
        outcome = pic(*arguments)
        assert (outcome.code, outcome.out) == (1, ""), arguments
        assert outcome.err.startswith("pic: error: ") and outcome.err.count("\n") == 1 and str(path) in outcome.err
        # a document may be a pipe; this one ends at once, since nobody writes to it
        said = ("regular file", "directory", "is empty", "cannot be read", "no text files")
        assert any(words in outcome.err for words in said), outcome.err


def forged(path: Path, old: str, new: str) -> None:
    """Change the header's text, and seal it again."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode().rstrip(" ").replace(old, new)
    text = re.sub('"header":"[0-9a-f]{64}"', '"header":""', text)
    digest = blake3(text.encode() + b" " * (-len(text.encode()) % 8)).hexdigest()
    raw = text.replace('"header":""', f'"header":"{digest}"').encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


@pytest.mark.parametrize("value", ["\\ud800", "\\u001b[2J"])
def test_one_forged_object_disables_nothing(model: Path, objects: Objects, value: str) -> None:
    store = ("--store", shutil.copytree(objects.store, "copied"))
    path = min(Path("copied").glob("objects/??/*.kvo"))
    forged(path, '"architecture":"llama"', f'"architecture":"{value}"')
    assert path.stem[:12] in pic("store", "ls", *store).out and "\x1b" not in pic("store", "ls", *store).out
    assert pic("store", "ls", "--stats", *store, "--json").json["damaged"] == 1
    exported = pic("store", "push", "all", "-o", "all.kva", *store)
    assert exported.code == 0 and "skipped: " in exported.err and "2 objects" in exported.err
    for verb in ("compile", "link"):
        query = () if verb == "compile" else ("-q", "why?", "--max-new-tokens", 1)
        Path("new.txt").write_text(f"Nothing of this was there, {verb}.\n")
        assert pic(verb, "new.txt", *query, "-m", model, *store).code == 0
    assert pic("store", "verify", *store).code == 1
    assert pic("store", "verify", "--repair", *store).code == 0 and not path.exists()


def test_an_object_of_tokens_that_the_model_does_not_know_is_refused(model: Path, objects: Objects) -> None:
    """Its key is that of its tokens, so that only the model can tell."""
    with ObjectFile(objects.mine) as file:
        for tokens, why in (([10**6] * 3, "the token 1000000"), ([5] * 600, "600 tokens")):
            meta = replace(file.meta, num_tokens=len(tokens), key=file.meta.key_of(tokens))
            part = bytes(meta.shape.num_bytes // 2)
            with Path("x.kvo").open("wb") as out:
                write_object(out, CompiledChunk(meta, "text", np.asarray(tokens, dtype="<i4"), [(part, part)] * 3))
            assert why in error_of(link(Path("x.kvo"), model))


@pytest.mark.parametrize("arguments", [("push", "all", "-o", "all.kva"), ("push", "all", "--remote", "far")])
def test_all_is_not_all_but_what_the_disk_does_not_read(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """What is damaged is left out by name; of what cannot be read now, nobody knows."""
    shutil.copytree(objects.store, "st")
    unreadable = sorted(Path("st").glob("objects/*/*.kvo"))[0]
    opened = reading.open_regular

    def fail(path: Path, *more: int) -> int:
        if path == unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *more)

    monkeypatch.setattr(format, "open_regular", fail)
    done = pic("store", *arguments, "--store", "st")
    assert done.code == 1 and done.err == f"pic: error: {unreadable}: cannot be opened (Input/output error)\n"
    assert not Path("all.kva").exists() and not Path("far").exists()


def test_a_listing_is_not_complete_without_what_the_disk_does_not_show(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = str(min(objects.store.glob("objects/*/*.kvo")))
    status_of = os.stat

    def fail(path: object, **more: object) -> os.stat_result:
        if str(path) == hidden:
            raise OSError(errno.EIO, os.strerror(errno.EIO), hidden)
        return status_of(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", fail)
    for command in ("ls", "ls --stats", "verify", "push all -o all.kva"):
        done = pic("store", *command.split(), "--store", objects.store)
        assert done.code == 1 and done.err.endswith(f"pic: error: {hidden}: Input/output error\n"), command


def test_a_pipe_in_the_place_of_an_object_is_not_waited_for(model: Path, texts: tuple[Path, Path]) -> None:
    (done,) = pic("compile", "a.txt", "-m", model, "--json").json["objects"]
    path = Path(done["path"])
    path.unlink()
    os.mkfifo(path)
    outcome = pic("inspect", done["key"])
    assert (outcome.code, outcome.out) == (1, "")
    assert done["key"] in error_of(outcome) and "named pipe" in error_of(outcome)


def test_a_long_message_is_shortened_in_its_middle(model: Path) -> None:
    error = error_of(pic("link", "-q", "why?", "--query-template", "x" * 9000, "-m", model))
    assert "query template 'xxx" in error and error.endswith("must contain {query}") and 1900 < len(error) < 2100

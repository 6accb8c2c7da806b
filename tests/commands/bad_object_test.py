"""Damaged objects: refused by their checksums when they are linked, with the remedy, and healed by it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands.run import Objects, Outcome, flip, pic

REMEDY = "compile it again"


def link(path: Path, model: Path) -> Outcome:
    outcome = pic("link", path, "-q", "why?", "--max-new-tokens", 2, "--store", "store", "-m", model)
    assert (outcome.code, outcome.out) == (1, "")
    return outcome


def error_of(outcome: Outcome) -> str:
    """The error line; that the head was compiled first may be noted before it."""
    *notes, error = outcome.err.splitlines()
    assert notes in ([], ["pic: compiled head first (1 tokens)"])
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


def test_a_damaged_object_in_the_store_is_healed_by_the_remedy(model: Path, texts: tuple[Path, Path]) -> None:
    done = pic("compile", "a.txt", "-m", model, "--store", "store", "--json").json
    flip(Path(done["objects"][0]["path"]))
    error = error_of(link(Path("a.txt"), model))
    assert done["objects"][0]["key"] in error and "pic compile --force" in error
    assert pic("compile", "a.txt", "--force", "-m", model, "--store", "store").code == 0
    assert pic("link", "a.txt", "-q", "why?", "--max-new-tokens", 2, "--store", "store", "-m", model).code == 0


def test_a_truncated_object_in_the_store_is_compiled_again(model: Path, texts: tuple[Path, Path]) -> None:
    """Its header tells at once that it is cut, so that it does not count as compiled."""
    path = Path(pic("compile", "a.txt", "-m", model, "--json").json["objects"][0]["path"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert pic("compile", "a.txt", "-m", model, "--json").json["objects"][0]["new"]
    assert path.read_bytes() == whole

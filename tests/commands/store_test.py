"""`pic store`: what it lists, and that it finds damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands.run import Objects, flip, pic


@pytest.fixture
def root(objects: Objects) -> Path:
    """A store with three objects of one text."""
    return Path(shutil.copytree(objects.store, "copied"))


def one_of(root: Path) -> Path:
    return min(root.glob("objects/??/*.kvo"))


def test_ls_shows_keys_sizes_and_beginnings(root: Path) -> None:
    outcome = pic("store", "ls", "--store", root)
    lines = outcome.out.splitlines()
    assert len(lines) == 3 and all("The harbour was quiet." in line for line in lines)
    assert lines[0].startswith(one_of(root).stem[:12])
    assert outcome.err.startswith("pic: 3 objects, ")


def test_ls_as_json(root: Path) -> None:
    rows = pic("store", "ls", "--store", root, "--json").json
    assert [row["key"] for row in rows] == sorted(path.stem for path in root.glob("objects/??/*.kvo"))
    assert all(Path(row["path"]).stat().st_size == row["bytes"] and row["problem"] is None for row in rows)


def test_an_absent_store_is_an_empty_one() -> None:
    assert pic("store", "ls").err == "pic: 0 objects, 0 bytes\n"
    assert pic("store", "verify", "--json").json == {"objects": 0, "damaged": {}, "repaired": []}
    assert not Path(".pic").exists()


def test_verify_reads_all(root: Path) -> None:
    outcome = pic("store", "verify", "--store", root)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "pic: 3 objects read, none damaged\n")


def test_verify_finds_a_flipped_bit_that_ls_does_not_read(root: Path) -> None:
    damaged = one_of(root)
    flip(damaged, damaged.stat().st_size // 2)
    assert pic("store", "ls", "--store", root).code == 0
    outcome = pic("store", "verify", "--store", root)
    assert outcome.code == 1
    assert outcome.out.count("\n") == 1 and str(damaged) in outcome.out and "checksum" in outcome.out
    assert (
        outcome.err
        == f"pic: error: {root}: 1 of 3 objects are damaged; take them out with --repair, and compile again\n"
    )


def test_verify_as_json_names_the_damaged(root: Path) -> None:
    damaged = one_of(root)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    outcome = pic("store", "verify", "--store", root, "--json")
    assert outcome.code == 1
    assert f'"{damaged.stem}"' in outcome.out and '"objects": 3' in outcome.out


def test_ls_shows_a_truncated_object_as_damaged(root: Path) -> None:
    damaged = one_of(root)
    damaged.write_bytes(damaged.read_bytes()[:100])
    line = pic("store", "ls", "--store", root).out.splitlines()[0]
    assert line.startswith(f"{damaged.stem[:12]}  DAMAGED")
    assert pic("store", "ls", "--store", root, "--json").json[0]["problem"]


def test_an_object_under_another_name_is_damage(root: Path) -> None:
    first, second = sorted(root.glob("objects/??/*.kvo"))[:2]
    shutil.copy(first, second)
    assert first.stem[:12] in pic("store", "verify", "--store", root).out

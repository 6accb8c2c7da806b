"""Verifying and repairing: what is damaged goes, what cannot be judged stays."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from chunks import flip, make_chunk

from pictool.store.format import ObjectFile
from pictool.store.store import Store
from pictool.store.upkeep import verify


@pytest.fixture
def paths(store: Store) -> list[Path]:
    return sorted(store.put(make_chunk(seed)) for seed in range(4))


def test_a_whole_store(store: Store, paths: list[Path]) -> None:
    found = verify(store)
    assert (found.objects, found.problems, found.repaired) == (4, {}, ())
    assert found.num_bytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("offset", [0, 20, 700, -1, -40])
def test_repair_takes_out_the_damaged_and_no_other(store: Store, paths: list[Path], offset: int) -> None:
    flip(paths[1], offset)
    assert list(verify(store).problems) == [paths[1].stem] and paths[1].exists()
    found = verify(store, repair=True)
    assert list(found.problems) == [*found.repaired] == [paths[1].stem]
    assert store.keys() == [paths[0].stem, paths[2].stem, paths[3].stem]
    assert verify(store).problems == {}


def test_an_object_under_another_name_gets_its_own(store: Store, paths: list[Path]) -> None:
    wrong = store.path("0" * 64)
    wrong.parent.mkdir(exist_ok=True)
    whole = paths[0].read_bytes()
    paths[0].rename(wrong)
    assert verify(store, repair=True).repaired == ("0" * 64,)
    assert not wrong.exists() and paths[0].read_bytes() == whole


def test_one_that_has_both_names_loses_the_wrong_one(store: Store, paths: list[Path]) -> None:
    shutil.copy(paths[0], paths[1])
    assert verify(store, repair=True).repaired == (paths[1].stem,)
    assert store.keys() == [paths[0].stem, paths[2].stem, paths[3].stem]


def test_an_object_of_another_version_stays(store: Store, paths: list[Path]) -> None:
    paths[0].write_bytes(paths[0].read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    found = verify(store, repair=True)
    assert list(found.problems) == [paths[0].stem] and found.repaired == () and paths[0].exists()


def test_what_the_system_does_not_let_be_read_stays(
    store: Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "preadv", fail)
    found = verify(store, repair=True)
    assert len(found.problems) == 4 and found.repaired == () and all(path.exists() for path in paths)


def test_one_that_was_replaced_meanwhile_stays(
    store: Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = paths[0].read_bytes()
    flip(paths[0], -1)
    check, calls = ObjectFile.verify, []

    def replaced(file: ObjectFile) -> None:
        calls.append(file.path)
        try:
            check(file)
        finally:
            if calls.count(paths[0]) == 1:
                paths[0].write_bytes(whole)

    monkeypatch.setattr(ObjectFile, "verify", replaced)
    assert verify(store, repair=True).repaired == () and paths[0].read_bytes() == whole


def test_one_that_disappears_meanwhile_is_no_problem(store: Store, paths: list[Path]) -> None:
    found = verify(store, on_object=lambda _: paths[3].unlink(missing_ok=True))
    assert found.problems == {} and found.objects == 3

"""Evaluations: the same numbers in every run, whatever was killed, stored, or asked before; nothing is done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from eval.shared import CASES, SPECS, CaseList, case, model, model_directory, numbers, run, steady

from pictool.api import compile
from pictool.errors import InputError
from pictool.eval.cases import SpecOptions
from pictool.eval.evaluate import evaluate
from pictool.eval.policies import parse_policies
from pictool.eval.runner import Runner
from pictool.store.objects.format import CompiledChunk
from pictool.store.store import Store

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The numbers of an evaluation that nothing disturbed."""
    return numbers(run(Store(tmp_path_factory.mktemp("undisturbed"))))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """What is run from now on: case and labels."""
    ran: list[tuple[str, tuple[str, ...]]] = []
    original = Runner.run

    def spy(self: Runner, group: Any, labels: Any) -> Any:
        ran.extend(labels.items())
        return original(self, group, labels)

    monkeypatch.setattr(Runner, "run", spy)
    return ran


def test_a_row_for_every_case_and_label_in_order_of_dataset_and_table(store: Store) -> None:
    done = run(store)
    labels = [labelled.label for labelled in parse_policies(SPECS)]
    assert [(row.id, row.label) for row in done.results] == [(case.id, label) for case in CASES for label in labels]
    assert done.groups == (("one", "two"), ("three",), ("four",))


def test_numbers_do_not_depend_on_the_order_of_policies(store: Store, expected: list[dict[str, Any]]) -> None:
    assert numbers(run(store, SPECS[::-1])) == expected


def test_numbers_do_not_depend_on_what_the_store_holds(store: Store, expected: list[dict[str, Any]]) -> None:
    """Compiled together, chunks get other last bits: nothing of that may be used. Here they are all wrong."""
    opened, texts = model(), [text for case in CASES for text in case.documents]
    for after in ("none", "text"):
        compile(opened, store, [*texts, "<s>", "<s>You are."], after=after)
    for key in store.keys():
        with store.open(key) as file:
            assert file.meta.key == key
            wrong = bytes(file.layer_bytes // 2)
            chunk = CompiledChunk(file.meta, file.text(), file.tokens(), [(wrong, wrong)] * 3)
        store.put(chunk)
    assert numbers(run(store)) == expected


def test_numbers_do_not_depend_on_which_policies_and_cases_came_before(
    store: Store, expected: list[dict[str, Any]]
) -> None:
    for specs in (["legolink-1"], ["legolink-2"], SPECS):
        for limit in (2, 4):
            done = run(store, specs, limit=limit, output=Path("r.jsonl"))
    assert numbers(done) == expected


def test_a_second_run_runs_nothing(store: Store, asked: list[Any], expected: list[dict[str, Any]]) -> None:
    run(store)
    asked.clear()
    assert numbers(run(store)) == expected and asked == []


def test_more_policies_on_a_finished_file_are_all_that_is_run(store: Store, asked: list[Any]) -> None:
    run(store, ["naive"], limit=2)
    asked.clear()
    done = run(store, ["legolink-2", "naive"], limit=3)
    assert asked == [("one", ("legolink-2",)), ("two", ("legolink-2",)), ("three", ("full", "naive", "legolink-2"))]
    assert {row.label for row in done.results} == {"full", "naive", "legolink-2"}
    assert {row.label for row in run(store, ["naive"], limit=2).results} == {"full", "naive"}


def test_a_file_that_was_cut_off_anywhere_gives_the_same_table(
    store: Store, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    whole = run(store)
    data = whole.path.read_bytes()
    for share in (0.0, 0.3, 0.55, 0.8, 0.999):
        whole.path.write_bytes(data[: int(share * len(data))])
        again = run(store)
        assert numbers(again) == expected and steady(again) == steady(whole)


def test_the_default_file_is_named_by_the_experiment(store: Store) -> None:
    path = run(store, ["naive"], limit=1).path
    assert path.parent == store.root / "eval" / "results" and len(path.stem) == 12
    assert run(store, ["legolink"], limit=2).path == path
    assert run(store, ["naive"], options=SpecOptions(head="Hey."), limit=1).path != path
    assert run(store, ["naive"], CaseList((case("other"),))).path != path


def test_documents_are_reused_in_the_codec_that_is_asked_for(store: Store) -> None:
    """The lossless one changes no number but the bytes that are read; a lossy one changes first tokens, not `full`."""
    specs = ("naive", "legolink-2")
    plain, zstd, int4 = (run(store, specs, options=SpecOptions(codec=codec)) for codec in ("none", "zstd", "int4"))
    assert len({done.path for done in (plain, zstd, int4)}) == 3
    for row, same, other in zip(plain.results, zstd.results, int4.results, strict=True):
        assert {**same.numbers, "bytes_read": 0} == {**row.numbers, "bytes_read": 0}
        is_full = row.label == "full"
        assert (other.numbers == row.numbers) is is_full
        assert is_full or (other.kl != row.kl and other.bytes_read < row.bytes_read)
    objects = Store(next((store.root / "eval").glob("*/objects")).parent)
    kept = {entry.meta.codec for entry in objects.objects() if entry.meta is not None}
    assert kept == {"none", "zstd", "int4"}


def test_progress_counts_what_is_done_already(store: Store) -> None:
    run(store, ["naive"], limit=2)
    progress: list[tuple[int, int]] = []
    evaluate(
        model(),
        store,
        CaseList(),
        parse_policies(["naive"]),
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert progress == [(4, 8), (6, 8), (8, 8)]


def test_times_of_another_machine_are_told(store: Store) -> None:
    done = run(store, ["naive"], limit=2)
    done.path.write_text(done.path.read_text().replace('"cores": ', '"cores": 9'))
    notes: list[str] = []
    evaluate(model(), store, CaseList(), parse_policies(["naive"]), on_note=notes.append)
    assert len(notes) == 1 and notes[0].startswith(f"{done.path}: was started on another machine")


def test_cases_that_are_too_long_are_left_out(store: Store) -> None:
    dataset = CaseList((case("one"), case("long", ["harbour " * 600]), case("two")))
    done = run(store, ["naive"], dataset)
    assert done.skipped == ("long",) and done.groups == (("one",), ("two",))
    with pytest.raises(InputError, match=r"^given: .* 1 "):
        run(store, ["naive"], CaseList((case("long", ["harbour " * 600]),)))


@pytest.mark.parametrize(("option", "message"), [({"limit": 0}, "--limit 0")])
def test_options_that_are_refused(store: Store, option: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}: "):
        run(store, ["naive"], **option)


def test_a_model_that_a_policy_names_is_part_of_its_rows(store: Store, tmp_path: Path) -> None:
    link = tmp_path / "small"
    link.symlink_to(model_directory(7))
    specs = [f"speccache:spec_model={link}"]
    run(store, specs, limit=1)
    assert len(run(store, specs, limit=1).results) == 2
    link.unlink()
    link.symlink_to(model_directory(8))
    with pytest.raises(InputError, match=str(link)):
        run(store, specs, limit=1)


def test_threads_are_those_of_the_file_and_are_put_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(store, ["naive"], limit=2)
    done.path.write_text(done.path.read_text().replace('"threads": 1', '"threads": 2'))
    seen: list[int] = []
    original = Runner.run

    def spy(self: Runner, group: Any, labels: Any) -> Any:
        seen.extend([torch.get_num_threads()] if labels else [])
        return original(self, group, labels)

    monkeypatch.setattr(Runner, "run", spy)
    assert run(store, ["naive"], limit=3).header.threads == 2
    assert seen == [2] and torch.get_num_threads() == 1


# Killed


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from eval import shared
from pictool.eval.runner import Runner
from pictool.store.store import Store
directory, slow = Path(sys.argv[1]), Runner.run
shared.model_directory = lambda seed=0: directory
def run(self, group, labels):
    print(group.cases[0].id, flush=True)
    rows = slow(self, group, labels)
    if group.cases[0].id == "four":
        import time
        time.sleep(60)
    return rows
Runner.run = run
shared.run(Store("killed"))
"""


def test_killed_in_the_middle_and_started_again_it_gives_the_same_table(
    expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model_directory())], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    begun = [process.stdout.readline().strip() for _ in range(3)]
    time.sleep(0.2)
    process.kill()
    assert begun == ["one", "three", "four"] and process.wait() == -9
    (path,) = Path("killed/eval/results").iterdir()
    ids = [json.loads(line)["id"] for line in path.read_text().splitlines()[1:]]
    assert set(ids) == {"one", "two", "three"}
    again = run(Store("killed"))
    assert again.path.resolve() == path.resolve() and numbers(again) == expected


def test_each_policy_gets_the_objects_that_it_needs(store: Store) -> None:
    """And the numbers of the others stay what they are without it."""
    alone = numbers(run(store, ["naive"]))
    both = numbers(run(Store(store.root / "other"), ["prophet-10", "naive"]))
    assert {row["label"] for row in both} == {"full", "naive", "prophet-10"}
    assert [row for row in both if row["label"] != "prophet-10"] == alone

"""Every dataset: found by its file, made from texts, deterministic; and how a file is recognised or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from pictool import plugins
from pictool.errors import InputError, PicError
from pictool.eval.datasets import datasets, open_dataset
from pictool.eval.datasets.base import Dataset, FileDataset
from pictool.eval.metrics import METRICS

CTX = {"title": "Ada", "text": "Ada was born in 1815."}
RECORDS: dict[str, dict[str, Any]] = {
    "cacheblend": {"ctxs": [CTX, CTX], "question": "When?", "answers": ["1815"]},
    "longbench": {
        "context": "Passage 1:\nx\n", "input": "When?", "answers": ["1815"], "length": 3, "dataset": "hotpotqa",
        "language": "en", "all_classes": None, "_id": "abc",
    },
    "plain": {"documents": [{"text": "In 1815."}], "query": "When?", "answers": ["1815"]},
}  # fmt: skip


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def hay(tmp_path: Path) -> None:
    (tmp_path / "hay.txt").write_text("The grass is green. The sky is blue.\n")


def small(name: str, tmp_path: Path) -> Dataset:
    return open_dataset(str(write(tmp_path / "file.jsonl", RECORDS[name])), {})


def test_the_registry_has_every_file_and_nothing_abstract() -> None:
    assert list(datasets()) == ["cacheblend", "longbench", "plain"] == list(RECORDS)


@pytest.mark.parametrize("name", datasets())
def test_every_dataset_keeps_the_contract(name: str, tmp_path: Path) -> None:
    dataset = small(name, tmp_path)
    assert type(dataset) is datasets()[name] and dataset.name == name and dataset.reference and type(dataset).__doc__
    assert set(dataset.params) == {field.name for field in fields(dataset)}
    cases = list(dataset.cases())
    assert cases and cases == list(dataset.cases()) == list(small(name, tmp_path).cases())
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert case.query.strip() and case.answers and case.documents and all(case.documents)
        assert case.metric in METRICS and case.max_new_tokens > 0 and "" not in case.stop
        assert case.query_template is None or case.query_template.count("{query}") == 1
        assert hash(case) == hash(case)
    with pytest.raises(FrozenInstanceError):
        dataset.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("layout", ["lines", "list", "indented", "bom", "crlf", "blank lines"])
def test_a_file_is_recognised_by_its_first_record(name: str, layout: str, tmp_path: Path) -> None:
    line = json.dumps(RECORDS[name])
    text = {
        "lines": f"{line}\n", "list": f"[{line}]", "indented": json.dumps([RECORDS[name]], indent=4),
        "bom": f"\ufeff{line}", "crlf": f"{line}\r\n", "blank lines": f"\n \n{line}\n\n",
    }[layout]  # fmt: skip
    path = tmp_path / "any.name"
    path.write_bytes(text.encode())
    dataset = open_dataset(str(path), {})
    assert dataset == open_dataset(str(path), {"format": name}) == open_dataset(name, {"path": str(path)})
    assert dataset.name == name and len(list(dataset.cases())) == 1


def test_a_name_comes_before_a_file_of_that_name(tmp_path: Path) -> None:
    path = str(write(tmp_path / "longbench", RECORDS["plain"]))
    assert open_dataset("longbench", {"path": path}).name == "longbench"
    assert open_dataset("./longbench", {}).name == "plain"


def test_fields_are_converted(tmp_path: Path) -> None:
    path = str(write(tmp_path / "q.jsonl", RECORDS["plain"]))
    assert open_dataset(path, {"max_new_tokens": "7"}).params == {"path": path, "metric": "f1", "max_new_tokens": 7}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("nope", {}, "dataset 'nope'"),
        ("", {}, "dataset ''"),
        ("x" * 5000, {}, "xxx"),
        ("world", {}, "dataset world"),
        ("plain", {"format": "plain"}, "plain: format=plain"),
        ("plain.jsonl", {"size": "1"}, "plain has no field 'size'"),
        ("plain.jsonl", {"max_new_tokens": "x"}, "plain: max_new_tokens='x'"),
        ("longbench", {}, "longbench: path=…"),
        ("plain.jsonl", {"format": "world"}, "plain.jsonl: format=world"),
        ("plain.jsonl", {"format": "csv"}, "plain.jsonl: format=csv"),
        ("plain.jsonl", {"path": "b"}, "plain.jsonl: path=b"),
        ("plain.jsonl", {"metric": "bleu"}, "plain: metric=bleu"),
        ("plain.jsonl", {"max_new_tokens": "0"}, "plain: max_new_tokens=0"),
        ("plain.jsonl", {"task": "samsum"}, "plain has no field 'task'"),
        ("other.jsonl", {}, "other.jsonl: line 1"),
        ("both.jsonl", {}, "both.jsonl: line 1"),
        (".", {}, ".: "),
    ],
)
def test_what_cannot_be_opened(name: str, values: Mapping[str, str], message: str, tmp_path: Path) -> None:
    write(tmp_path / "plain.jsonl", RECORDS["plain"])
    write(tmp_path / "other.jsonl", {"text": "x"})
    write(tmp_path / "both.jsonl", RECORDS["plain"] | RECORDS["cacheblend"])
    with pytest.raises(InputError) as caught:
        open_dataset(name, values)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_may_be_two_is_opened_by_format(tmp_path: Path) -> None:
    path = write(tmp_path / "both.jsonl", RECORDS["plain"] | RECORDS["cacheblend"])
    assert [open_dataset(str(path), {"format": name}).name for name in ("plain", "cacheblend")] == [
        "plain", "cacheblend",
    ]  # fmt: skip


def test_every_file_dataset_has_marks_of_its_own() -> None:
    marks = [set(cls.marks) for cls in datasets().values() if issubclass(cls, FileDataset)]
    assert len(marks) == 3 and all(not a <= b for a in marks for b in marks if a is not b)


PLUGIN = """
from dataclasses import dataclass
from pictool.eval.datasets.base import Case, Dataset

@dataclass(frozen=True)
class Letters(Dataset):
    name = "letters"
    reference = "here"
    count: int = 2

    def cases(self):
        for letter in "abcdefgh"[: self.count]:
            yield Case(letter, (f"{letter}.",), "Which letter?", (letter,))
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Adds an entry point of another package to the datasets."""
    (tmp_path / "some_letters.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)

    def add(target: str) -> None:
        entry = EntryPoint("letters", target, "pictool.datasets")
        monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
        datasets.cache_clear()

    yield add
    datasets.cache_clear()


def test_a_dataset_of_another_package_is_found(install: Callable[[str], None]) -> None:
    install("some_letters:Letters")
    assert list(datasets()) == ["cacheblend", "letters", "longbench", "plain"]
    dataset = open_dataset("letters", {"count": "3"})
    assert dataset.params == {"count": 3} and [case.id for case in dataset.cases()] == ["a", "b", "c"]


@pytest.mark.parametrize("target", ["some_letters:Nothing", "no_module:Letters", "some_letters:Case"])
def test_an_entry_point_that_is_no_dataset_is_refused(install: Callable[[str], None], target: str) -> None:
    install(target)
    with pytest.raises(PicError, match=r" letters of pictool\.datasets: "):
        open_dataset("letters", {})


def test_no_dataset_loads_torch() -> None:
    source = "import sys; from pictool.eval.datasets import datasets; datasets(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False"]

"""Plain jsonl: the repository's own queries, paths from the file's folder, texts exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pictool.errors import InputError
from pictool.eval.datasets import open_dataset
from pictool.eval.datasets.base import Case
from training.world.generate import KINDS

FIXTURES = Path(__file__).parents[3] / "fixtures"


def load(path: Path, *records: dict[str, Any], **fields: str) -> list[Case]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(open_dataset(str(path), fields).cases())


def test_the_repositorys_queries() -> None:
    path = FIXTURES / "queries.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    cases = list(open_dataset(str(path), {"metric": "em", "max_new_tokens": "8"}).cases())
    assert len(cases) == len(records) == 24 and {case.kind for case in cases} == set(KINDS)
    for number, (case, record) in enumerate(zip(cases, records, strict=True), 1):
        assert case.documents == tuple((FIXTURES / name).read_text() for name in record["documents"])
        assert (case.id, case.query, case.answers) == (str(number), record["query"], tuple(record["answers"]))
        assert (case.metric, case.max_new_tokens, case.head) == ("em", 8, None)


def test_documents_are_files_or_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffline\r\nnaïve\n".encode())
    (tmp_path / "abs.txt").write_text("absolute")
    documents = ["../a.txt", {"text": " as it\r\nis "}, str(tmp_path / "abs.txt"), "../a.txt"]
    record = {"documents": documents, "query": "Why?", "answers": ["x"], "head": "Be brief.", "kind": "k", "id": "q-1"}
    (case,) = load(tmp_path / "sub" / "q.jsonl", record)
    assert case.documents == ("line\nnaïve\n", " as it\r\nis ", "absolute", "line\nnaïve\n")
    assert (case.head, case.kind, case.id, case.metric) == ("Be brief.", "k", "q-1", "f1")


def test_a_query_may_have_no_documents_and_a_blank_head(tmp_path: Path) -> None:
    (case,) = load(tmp_path / "q.jsonl", {"documents": [], "query": "Why?", "answers": [""], "head": "", "kind": None})
    assert (case.documents, case.answers, case.head, case.kind) == ((), ("",), "", "")


def test_a_record_may_say_how_it_is_answered_and_scored(tmp_path: Path) -> None:
    record = {"documents": [], "query": "Why?", "answers": ["{}"]}
    more = {"metric": "json", "max_new_tokens": 5, "stop": ["\n"]}
    own, other = load(tmp_path / "q.jsonl", record | more, record, max_new_tokens="7")
    assert (own.metric, own.max_new_tokens, own.stop) == ("json", 5, ("\n",))
    assert (other.metric, other.max_new_tokens, other.stop) == ("f1", 7, ())
    with pytest.raises(InputError, match="metric"):
        load(tmp_path / "q.jsonl", record | {"metric": "bleu"})


@pytest.mark.parametrize("folder", [".", "deep/er"])
def test_paths_do_not_depend_on_the_working_directory(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / folder
    base.mkdir(parents=True, exist_ok=True)
    (base / "a.txt").write_text("here")
    path = base / "q.jsonl"
    expected = load(path, {"documents": ["a.txt"], "query": "Why?", "answers": ["x"]})
    monkeypatch.chdir("/")
    assert list(open_dataset(str(path), {}).cases()) == expected

"""Bad files: one line that names the file, the line and the key, for every dataset that is a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pictool.errors import InputError
from pictool.eval.datasets import open_dataset
from pictool.eval.datasets.records import read_records

GOOD: dict[str, dict[str, Any]] = {
    "cacheblend": {"ctxs": [{"title": "T", "text": "x"}], "question": "When?", "answers": ["1815"]},
    "longbench": {"context": "x", "input": "When?", "answers": ["1815"], "dataset": "musique", "length": 1},
    "plain": {"documents": [{"text": "x"}], "query": "When?", "answers": ["1815"]},
}


def problem(path: Path, name: str) -> str:
    with pytest.raises(InputError) as caught:
        list(open_dataset(str(path), {"format": name}).cases())
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (b"[]", "is an empty list"),
        (b"hello\n", "line 1: is not JSON (Expecting value, column 1)"),
        (b"GOOD\n\nGOOD,\n", "line 3: is not JSON (Extra data"),
        (b"GOOD\n{\n", "line 2: is not JSON (Expecting property name enclosed in double quotes, column 2)"),
        (b'GOOD\n{"a": "b', "line 2: is not JSON (Unterminated string starting at, column 7)"),
        (b"[GOOD,\n GOOD\n GOOD]", "line 3: is not JSON (Expecting ',' delimiter"),
        (b"GOOD\n\xff\n", "line 2: is not UTF-8; convert it first (iconv -t utf-8)"),
        (b"[GOOD,\n\n\xe9]", "line 3: is not UTF-8"),
        ("GOOD".encode("utf-16"), "line 1: is not UTF-8"),
        (b"GOOD\n7\n", "line 2: must be a JSON object"),
        (b"GOOD\n[1]\n", "line 2: must be a JSON object"),
        (b"[GOOD, null]", "record 2: must be a JSON object"),
        (b"GOOD\n{}\n", "is missing"),
        (b"[" * 100_000, "line 1: is not readable JSON ("),
        (b"GOOD\n" + b"7" * 5000, "line 2: is not readable JSON (Exceeds the limit"),
    ],
)
def test_bad_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content.replace(b"GOOD", json.dumps(GOOD[name] | ({"id": None, "_id": None})).encode()))
    assert message in problem(path, name)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^gone: .*No such file"):
        list(open_dataset("plain", {"path": "gone"}).cases())
    with pytest.raises(InputError, match=r"^a\x00b: "):
        list(open_dataset("plain", {"path": "a\0b"}).cases())


GONE = object()
TEXT, LIST = "must be a string", "must be a list"
HALF = "contains an unpaired surrogate"


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("cacheblend", "ctxs", GONE, "ctxs is missing"),
        ("cacheblend", "ctxs", {}, f"ctxs {LIST}"),
        ("cacheblend", "ctxs", ["x"], "ctxs[0] must be an object"),
        ("cacheblend", "ctxs", [{"title": "T", "text": "x"}, {"title": "T"}], "ctxs[1].text is missing"),
        ("cacheblend", "ctxs", [{"title": 1, "text": "x"}], f"ctxs[0].title {TEXT}"),
        ("cacheblend", "ctxs", [{"title": "", "text": None}], f"ctxs[0].text {TEXT}"),
        ("cacheblend", "question", GONE, "question is missing"),
        ("cacheblend", "question", " ", "question is blank"),
        ("cacheblend", "answers", "1815", f"answers {LIST}"),
        ("cacheblend", "answers", [[]], "answers is an empty list"),
        ("cacheblend", "answers", [["a", 3]], f"answers[1] {TEXT}"),
        ("longbench", "context", 3, f"context {TEXT}"),
        ("longbench", "input", "\n", "input is blank"),
        ("longbench", "answers", GONE, "answers is missing"),
        ("longbench", "answers", [], "answers is an empty list"),
        ("longbench", "length", "12", "length must be a whole number of 0 or more"),
        ("longbench", "length", True, "length must be a whole number of 0 or more"),
        ("longbench", "dataset", ["musique"], f"dataset {TEXT}"),
        ("longbench", "dataset", "qasper", "dataset has the task 'qasper'"),
        ("longbench", "_id", 1.5, f"_id {TEXT}"),
        ("longbench", "_id", "", "_id is blank"),
        ("plain", "documents", "a.txt", f"documents {LIST}"),
        ("plain", "documents", [3], "documents[0] must be a path"),
        ("plain", "documents", [""], "documents[0] must be a path"),
        ("plain", "documents", [{"txt": "x"}], "documents[0].text is missing"),
        ("plain", "documents", [{"text": ""}], "documents[0].text is blank"),
        ("plain", "documents", [{"text": "x"}, "gone.txt"], "gone.txt: no such file"),
        ("plain", "documents", ["a\0b"], "no such file"),
        ("plain", "documents", ["."], "is a directory"),
        ("plain", "query", None, f"query {TEXT}"),
        ("plain", "query", "\ud800", f"query {HALF}"),
        ("plain", "head", 1, f"head {TEXT}"),
        ("plain", "kind", [], f"kind {TEXT}"),
        ("plain", "answers", [None], f"answers[0] {TEXT}"),
        ("plain", "answers", ["a", "\udfff"], f"answers[1] {HALF}"),
    ],
)
def test_bad_values(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    bad = GOOD[name] | {key: value}
    if value is GONE:
        del bad[key]
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD[name])}\n{json.dumps(bad)}\n")
    got = problem(path, name)
    assert got.startswith("line 2: ") and message in got
    path.write_text(json.dumps([GOOD[name], bad]))
    assert problem(path, name).startswith("record 2: ")


def test_cases_before_a_bad_line_are_had(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD['plain'])}\nbroken")
    cases = open_dataset(str(path), {}).cases()
    assert next(cases).query == "When?"
    with pytest.raises(InputError, match="line 2"):
        next(cases)


@pytest.mark.parametrize(("name", "key"), [("plain", "id"), ("longbench", "_id"), ("cacheblend", "id")])
def test_ids_are_unique(name: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    records = [GOOD[name] | ids for ids in ({}, {key: "x"}, {key: 7}, {key: None})]
    path.write_text("".join(json.dumps(record) + "\n\n" for record in records))
    assert [case.id for case in open_dataset(str(path), {}).cases()] == ["1", "x", "7", "4"]
    path.write_text("".join(json.dumps(record) + "\n\n" for record in [*records, {**GOOD[name], key: "7"}]))
    assert problem(path, name) == "line 9: duplicate id '7', first at line 5; ids must be unique"


def test_line_separators_inside_a_text_end_no_record(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    text = "one\u2028two\u2029three\x85four\x0bfive"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n" + json.dumps({"text": "\r\n"}) + "\n")
    assert [record.text("text", allow_blank=True) for record in read_records(path)] == [text, "\r\n"]
    assert [record.place for record in read_records(path)] == ["line 1", "line 2"]

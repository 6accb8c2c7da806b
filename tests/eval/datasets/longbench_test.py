"""LongBench: documents join to the context, and the prompt is the published one, character by character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pictool.errors import InputError
from pictool.eval.datasets import open_dataset
from pictool.eval.datasets.base import Case
from pictool.eval.datasets.longbench import TASKS

QUESTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me the "
    "answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
PROMPTS = {  # config/dataset2prompt.json of github.com/THUDM/LongBench
    "2wikimqa": QUESTION,
    "hotpotqa": QUESTION,
    "musique": QUESTION,
    "multi_news": "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
    "Now, write a one-page summary of all the news.\n\nSummary:",
    "samsum": "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n"
    "{input}",
}
LIMITS = {"2wikimqa": 32, "hotpotqa": 32, "musique": 32, "multi_news": 512, "samsum": 128}
PASSAGES = ["Passage 1:\nAda\nAda was born.\n", "\nPassage 2:\nBob\nSee Passage 1: above.\n", "Passage 10:\nCy  \n\n"]
DIALOGUES = ["Dialogue: A: Hi\r\nB: Dialogue: no\nSummary: A greets B.\n", "Dialogue: C: {x}\nSummary: {query}.\n"]
CONTEXTS = dict.fromkeys(TASKS, "".join(PASSAGES)) | {"samsum": "".join(DIALOGUES)}


def record(task: str, **more: Any) -> dict[str, Any]:
    question = {"multi_news": "", "samsum": "Dialogue: D: Bye\nSummary: "}.get(task, "Who {was} born?")
    return {
        "input": question, "context": CONTEXTS[task], "answers": ["Ada", "Ada L."], "length": 40, "dataset": task,
        "language": "en", "all_classes": None, "_id": "6f2e", **more,
    }  # fmt: skip


def load(path: Path, *records: dict[str, Any], **fields: str) -> list[Case]:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return list(open_dataset(str(path), fields).cases())


@pytest.mark.parametrize("task", TASKS)
def test_the_prompt_is_longbenchs(task: str, tmp_path: Path) -> None:
    one = record(task)
    (case,) = load(tmp_path / "data.jsonl", one)
    assert case.head is not None and case.query_template is not None
    prompt = case.head + "".join(case.documents) + case.query_template.replace("{query}", case.query)
    assert prompt == PROMPTS[task].replace("{context}", one["context"]).replace("{input}", one["input"])
    assert case.max_new_tokens == LIMITS[task] and case.answers == ("Ada", "Ada L.") and case.id == "6f2e"
    assert case.metric == ("f1" if LIMITS[task] == 32 else "rouge_l")
    assert case.stop == (("\n",) if task == "samsum" else ())


@pytest.mark.parametrize("task", TASKS)
def test_a_document_is_a_passage_or_an_example(task: str, tmp_path: Path) -> None:
    (case,) = load(tmp_path / "data.jsonl", record(task))
    marks = "Dialogue:" if task == "samsum" else "Passage "
    assert len(case.documents) == (2 if task == "samsum" else 3)
    assert all(document.startswith(marks) for document in case.documents)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["Passage 1:\n", "Passage 2:", "\n", "Dialogue:", "x", " ", "\r\n", "\u2028"])))
@pytest.mark.parametrize("task", ["musique", "samsum"])
def test_documents_join_to_the_context(task: str, parts: list[str]) -> None:
    context = "".join(parts)
    documents = [document for document in TASKS[task].border.split(context) if document]
    assert "".join(documents) == context
    mark = "Dialogue:" if task == "samsum" else "Passage "
    assert all(document.startswith(mark) for document in documents[1:])


def test_a_context_without_marks_is_one_document_and_an_empty_one_none(tmp_path: Path) -> None:
    cases = load(
        tmp_path / "d.jsonl", record("musique", context="Just text.", _id="a"), record("musique", context="", _id="b")
    )
    assert [case.documents for case in cases] == [("Just text.",), ()]


def test_the_task_is_the_fields_or_the_records_or_the_files(tmp_path: Path) -> None:
    def head(name: str, one: dict[str, Any], **fields: str) -> str | None:
        return load(tmp_path / name, one, **fields)[0].head

    unnamed = {key: value for key, value in record("samsum").items() if key != "dataset"}
    for name in ("samsum.jsonl", "samsum_e.jsonl", "samsum.test.json"):
        assert head(name, unnamed) == TASKS["samsum"].head
    assert head("musique.jsonl", unnamed, task="samsum") == TASKS["samsum"].head
    assert head("musique.jsonl", record("samsum")) == TASKS["samsum"].head
    assert head("x.jsonl", record("samsum") | {"dataset": "hotpotqa_e"}) == TASKS["hotpotqa"].head
    with pytest.raises(InputError, match=r"x\.jsonl: line 1: .*'x'"):
        head("x.jsonl", unnamed)
    with pytest.raises(InputError, match=r"^longbench: task=qasper "):
        head("x.jsonl", unnamed, task="qasper")


@pytest.mark.parametrize(
    ("length", "kind"), [(None, ""), (0, "0-4k"), (3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+")]
)
def test_kinds_are_the_length_classes_of_longbench_e(length: int | None, kind: str, tmp_path: Path) -> None:
    assert load(tmp_path / "data.jsonl", record("musique", length=length))[0].kind == kind

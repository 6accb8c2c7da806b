"""LongBench's multi-document tasks, with its published prompts, lengths and metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pictool.errors import InputError
from pictool.eval.datasets.base import Case, FileDataset
from pictool.eval.datasets.records import Record

_PASSAGE = re.compile(r"^(?=Passage \d+:$)", re.MULTILINE)
_DIALOGUE = re.compile(r"^(?=Dialogue:)", re.MULTILINE)


@dataclass(frozen=True)
class LongBenchTask:
    """One task: dataset2prompt.json cut at {context} into head and template, and dataset2maxlen.json."""

    head: str
    template: str
    border: re.Pattern[str]  # matches, without length, where a document begins
    metric: str
    max_new_tokens: int
    query: str | None = None  # the part of the template that is the query; None: the record's input
    stop: tuple[str, ...] = ()


_QUESTION = LongBenchTask(
    head="Answer the question based on the given passages. Only give me the answer and do not output any other words."
    "\n\nThe following are given passages.\n",
    template="\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other "
    "words.\n\nQuestion: {query}\nAnswer:",
    border=_PASSAGE,
    metric="f1",
    max_new_tokens=32,
)
TASKS = {
    "2wikimqa": _QUESTION,
    "hotpotqa": _QUESTION,
    "musique": _QUESTION,
    "multi_news": LongBenchTask(
        head="You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        template="\n\n{query}\n\nSummary:",
        border=_PASSAGE,
        metric="rouge_l",
        max_new_tokens=512,
        query="Now, write a one-page summary of all the news.",
    ),
    "samsum": LongBenchTask(
        head="Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
        template="\n\n{query}",
        border=_DIALOGUE,
        metric="rouge_l",
        max_new_tokens=128,
        stop=("\n",),
    ),
}


@dataclass(frozen=True)
class LongBench(FileDataset):
    """Five tasks of LongBench (Bai et al. 2024), as its jsonl files are: one document per passage, or per example.

    The documents of a case join to the record's `context`, character by character. Nothing is cut from the middle, and
    nothing is added to the prompts. `kind` is LongBench-E's class of length, in words: `0-4k`, `4-8k`, `8k+`.
    """

    name: ClassVar[str] = "longbench"
    reference: ClassVar[str] = "LongBench, arXiv:2308.14508; config/dataset2prompt.json, config/dataset2maxlen.json"
    marks: ClassVar[tuple[str, ...]] = ("context", "input")
    task: str = ""  # which task's prompt; else what the record's `dataset` says, else the file's name

    def __post_init__(self) -> None:
        if self.task and self.task not in TASKS:
            raise InputError(f"longbench: task={self.task} must be one of {', '.join(TASKS)}")

    def case(self, record: Record) -> Case:
        context = record.text("context", allow_blank=True)
        task = TASKS[self._task_name(record)]
        return Case(
            id=record.id("_id"),
            documents=tuple(document for document in task.border.split(context) if document),
            query=task.query or record.text("input"),
            answers=record.texts("answers"),
            kind=_length_class(record.whole_number_or_none("length")),
            head=task.head,
            query_template=task.template,
            metric=task.metric,
            max_new_tokens=task.max_new_tokens,
            stop=task.stop,
            separator="",
        )

    def _task_name(self, record: Record) -> str:
        stated = self.task or record.text_or_none("dataset")
        name = (stated or Path(self.path).name.split(".")[0]).removesuffix("_e")  # LongBench-E's files: hotpotqa_e
        if name in TASKS:
            return name
        where = "dataset" if stated else "the file's name"
        raise record.error(
            f"{where} has the task {name!r}, but only {', '.join(TASKS)} are known; choose one with task="
        )


def _length_class(words: int | None) -> str:
    if words is None:
        return ""
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"

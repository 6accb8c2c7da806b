"""Generated questions over documents, of the kinds at which linking may fail: the datasets `picbench` and `world`."""

from __future__ import annotations

import json
from pathlib import Path

from pictool.eval.datasets.base import Case, Dataset


def write_questions(dataset: Dataset, path: Path) -> None:
    """Write the cases of a dataset as records that `pic eval` and `pic tune` read."""
    path.write_text("".join(f"{line_of(case)}\n" for case in dataset.cases()), encoding="utf-8")


def line_of(case: Case) -> str:
    """The record of a case."""
    record = {
        "id": case.id, "documents": [{"text": text} for text in case.documents], "query": case.query,
        "answers": case.answers, "kind": case.kind, "metric": case.metric, "max_new_tokens": case.max_new_tokens,
    }  # fmt: skip
    return json.dumps(record | ({"stop": case.stop} if case.stop else {}))

"""CacheBlend's files: documents and prompt as in the authors' example code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pictool.eval.datasets import open_dataset
from pictool.eval.datasets.base import Case

CTXS = [{"title": "", "text": "ada was born in 1815."}, {"title": "Bob", "text": ""}]


def load(path: Path, *records: dict[str, Any]) -> list[Case]:
    path.write_text(json.dumps(records, indent=4))
    return list(open_dataset(str(path), {}).cases())


def test_a_case(tmp_path: Path) -> None:
    first, second = load(
        tmp_path / "musique_s.json",
        {"ctxs": CTXS, "question": "When was Ada born?", "answers": ["1815", "in 1815"]},
        {"ctxs": CTXS[:1], "question": "Why", "answers": ["1815"]},
    )
    assert first.documents == ("\n\nada was born in 1815.\n\n", "Bob\n\n\n\n")
    assert (first.query, second.query) == ("when was Ada born?", "why?")
    assert (first.id, second.id) == ("1", "2")
    assert first.answers == ("1815", "in 1815")
    assert (first.metric, first.max_new_tokens, first.stop, first.kind) == ("f1", 32, ("\n",), "")


def test_the_prompt_asks_for_five_words(tmp_path: Path) -> None:
    (case,) = load(tmp_path / "a.json", {"ctxs": CTXS, "question": "When?", "answers": ["1815"]})
    assert case.head is not None and case.query_template is not None
    assert case.head.endswith("within 5 words..\nPassages:\n")
    assert "within 5 words" in case.query_template
    assert case.query_template.replace("{query}", case.query).endswith("\nQuestion:when?\nAnswer:")


@pytest.mark.parametrize(("answers", "golds"), [(["a"], ("a",)), ([["a", "b"], ["c"]], ("a", "b", "c")), ([""], ("",))])
def test_answers_may_be_lists_of_aliases(answers: list[Any], golds: tuple[str, ...], tmp_path: Path) -> None:
    """`wikimqa_s.json` has lists in its list."""
    assert load(tmp_path / "a.json", {"ctxs": CTXS, "question": "When?", "answers": answers})[0].answers == golds


def test_a_passage_may_have_no_title(tmp_path: Path) -> None:
    (case,) = load(tmp_path / "a.json", {"ctxs": [{"text": "x"}], "question": "When?", "answers": ["1815"]})
    assert case.documents == ("\n\nx\n\n",)

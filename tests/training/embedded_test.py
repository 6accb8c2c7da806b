"""The models that ship with the package, on the sample corpus that ships with the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pictool
from pictool.runtime.model import EMBEDDED, embedded_path

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
QUERIES: list[dict[str, Any]] = [json.loads(line) for line in (FIXTURES / "queries.jsonl").read_text().splitlines()]


def right(model: pictool.Model, store: pictool.Store, policy: str, kind: str) -> float:
    policy_ = pictool.make_policy(policy, {})
    asked = [query for query in QUERIES if query["kind"] == kind]
    hits = 0
    for query in asked:
        documents = [FIXTURES / name for name in query["documents"]]
        request = pictool.Request(query["query"], documents, policy_, max_new_tokens=12)
        hits += pictool.answer(model, store, request).text in query["answers"]
    return hits / len(asked)


def test_the_corpus_is_complete() -> None:
    assert len(list((FIXTURES / "docs").glob("*.txt"))) >= 30
    assert all((FIXTURES / name).is_file() for query in QUERIES for name in query["documents"])


@pytest.mark.parametrize("name", EMBEDDED)
def test_full_answers_and_naive_loses_what_needs_an_earlier_page(name: str, store: pictool.Store) -> None:
    model = pictool.load_model(name)
    carried = right(model, store, "full", "carried")
    assert carried >= 0.7
    assert right(model, store, "naive", "carried") <= 0.6 * carried
    assert right(model, store, "full", "local") >= 0.7


def test_they_are_small_and_of_two_sizes_and_vocabularies() -> None:
    files = [path for name in EMBEDDED for path in embedded_path(name).iterdir()]
    assert sum(path.stat().st_size for path in files) < 20e6
    base, small = (pictool.load_model(name) for name in EMBEDDED)
    sizes = [sum(p.numel() for p in model.module.parameters()) for model in (base, small)]
    assert sizes[0] >= 3 * sizes[1]
    assert base.tokenizer.get_vocab() != small.tokenizer.get_vocab()
    assert base.module.dtype == torch.float32

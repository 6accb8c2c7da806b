"""Corrections beside computed rows: what must be exact, on one prompt of an embedded model."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch

from benchmarks.corrections import (
    CORRECTIONS,
    RATIOS,
    Case,
    Conditional,
    Patch,
    Ridge,
    Scaled,
    case_of,
    corrected,
    divergence,
    extra_bytes,
    leading_pattern,
    leading_vector,
    low_rank,
    mean_vector,
    measure,
    oracle,
    rotated,
)
from benchmarks.fixup_zoo import Subject
from benchmarks.fixups import answer
from pictool import Chunk, Store, compile, make_policy
from training.world.generate import BOOKS

SUBJECT, RATIO = Subject("embedded-small", BOOKS, ""), RATIOS[-1]


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of(SUBJECT, 20, 1, per_kind=1)


def test_a_correction_of_nothing_leaves_the_answers_of_fixup(case: Case) -> None:
    """Bit for bit those of the package's own link."""
    model, world = SUBJECT.model, SUBJECT.prompt(20, 1)
    pages = [Chunk(page, model.encode(page), "page") for page in world.pages]
    placed, rows = case.fixup[RATIO]
    assert rows.any()
    same = corrected(case.stack, placed, torch.zeros_like(placed), ~rows)
    assert torch.equal(same, placed) and not torch.equal(same, case.naive)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        compile(model, store, pages, probes=8, probe_model=model)
        linked = answer(model, store, pages, case.asker.questions, make_policy("fixup", {"ratio": RATIO}))
    assert torch.equal(torch.stack([each[0] for each in case.asker.ask(same)]), linked.first)


@pytest.mark.parametrize("start", ["naive", "fixup"])
def test_the_whole_true_change_gives_full_recompute(case: Case, start: str) -> None:
    placed = case.naive if start == "naive" else case.fixup[RATIO][0]
    change = oracle(case.stack, case.full, placed, case.chunks.spans, 10_000)
    whole = corrected(case.stack, placed, change, case.all_rows)
    torch.testing.assert_close(whole, case.full, atol=1e-4, rtol=0)
    best = case.asker.ask(case.full)
    assert max(divergence(best, case.asker.ask(whole))) <= 1e-6
    assert min(divergence(best, case.asker.ask(placed))) > 1e-3


def test_rows_over_stored_ones_are_computed_as_by_the_linker(case: Case) -> None:
    placed, rows = case.fixup[RATIO]
    torch.testing.assert_close(case.compute(case.naive, rows), placed, atol=1e-4, rtol=0)


def test_every_variant_is_measured(case: Case) -> None:
    found = dict(measure(case, CORRECTIONS))
    assert {f"{label} @ {ratio}" for label in CORRECTIONS for ratio in RATIOS} <= set(found)
    assert all(first >= 0 and answer >= first for first, answer in found.values())


def test_rotation_goes_back(case: Case) -> None:
    torch.testing.assert_close(rotated(case.stack, rotated(case.stack, case.naive, -1)), case.naive, atol=1e-4, rtol=0)


def test_a_ridge_without_penalty_gives_computed_rows_their_change(case: Case) -> None:
    seen = case.seen(RATIO)
    for ridge in (Ridge(rank=100, penalty=1e-9), Ridge(by_chunk=True, by_head=True, rank=100, penalty=1e-9)):
        change = ridge(seen)
        known = seen.change[:, 1:][..., seen.rows, :]
        torch.testing.assert_close(change[:, 1:][..., seen.rows, :], known, atol=1e-3, rtol=1e-3)
        assert change[..., ~seen.rows, :].abs().max() > 1e-3
    tamed = Ridge(penalty=1e9)(seen)
    assert tamed.abs().max() < 1e-5


def test_what_objects_keep_is_found_again_where_it_is_the_change(case: Case) -> None:
    """A context that changes a chunk as a probe does, and one that changes it as the pattern does, times 3."""
    change = torch.zeros_like(case.naive)
    for (start, end), probed in zip(case.chunks.spans, case.chunks.probed, strict=True):
        change[..., start:end, :] = 0.5 * probed[2] + 0.5 * probed[5]
    seen = replace(case.seen(RATIO), rows=case.all_rows, change=change)
    torch.testing.assert_close(Conditional(None, 1e-9)(seen), change, atol=1e-3, rtol=0)
    for pattern in (mean_vector, leading_vector, leading_pattern):
        for (start, end), probed in zip(case.chunks.spans, case.chunks.probed, strict=True):
            change[..., start:end, :] = 3 * pattern(probed)
        change[:, 0] = 0
        found = Scaled(pattern, penalty=0)(replace(seen, change=change))
        torch.testing.assert_close(found[:, 1:], change[:, 1:], atol=1e-3, rtol=1e-3)


def test_ranks_are_ranks(case: Case) -> None:
    change = case.chunks.before[1]
    for rank in (1, 2):
        matrix = low_rank(change, rank).transpose(-3, -2).flatten(-2)[:, 1:]
        assert int(torch.linalg.matrix_rank(matrix, rtol=1e-4).max()) == rank
    torch.testing.assert_close(low_rank(change, 1000), change, atol=1e-4, rtol=0)


def test_pages_after_the_page_before_them_are_near_full(case: Case) -> None:
    best = case.asker.ask(case.full)
    naive, before = (
        divergence(best, case.asker.ask(kv))[0] for kv in (case.naive, case.patched(Patch("before", None)))
    )
    assert before < naive / 2


def test_bytes_are_counted(case: Case) -> None:
    _, layers, heads, _, width = case.naive.shape
    tokens = sum(end - start for start, end in case.chunks.spans)
    count, found = len(case.chunks.spans), extra_bytes([case])
    assert found["KV"] == 2 * 2 * layers * heads * width and found["table"] == 2
    assert found["ridge, chunk"] == found["before"] == 0
    vector = 2 * 2 * (layers - 1) * heads * width * count / tokens
    assert found["shift"] == pytest.approx(vector, abs=0.1)
    assert found["before-1"] == pytest.approx(vector + 2 * 2 * (layers - 1), abs=0.1)
    assert found["probes"] == pytest.approx(8 * 2 * 2 * (layers - 1) * heads * width, abs=0.1)

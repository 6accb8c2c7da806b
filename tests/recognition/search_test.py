"""Token sequences found in prompts by hashes, against slow and plain searches; and work that stays bounded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pictool.core import TokenIds
from pictool.recognition import search
from pictool.recognition.search import HashedTokens, SearchTable, TokenRun, choose_runs, edge_of, run_at


def ids(*tokens: int) -> TokenIds:
    return np.asarray(tokens, dtype=np.int32)


TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


@given(TOKENS, st.integers(1, 40), st.data())
def test_the_hashes_of_windows_and_parts(tokens: list[int], width: int, data: st.DataObject) -> None:
    base = search._BASE

    def plain(part: list[int]) -> int:
        return sum((token + 1) * pow(base, j, 1 << 64) for j, token in enumerate(part)) % (1 << 64)

    hashed = HashedTokens(ids(*tokens))
    assert hashed.windows(width).tolist() == [
        plain(tokens[i : i + width]) for i in range(len(tokens) - width + 1)
    ]  # fmt: skip
    start = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(start, len(tokens)))
    assert hashed.parts(np.array([start]), np.array([end])).tolist() == [plain(tokens[start:end])]


FEW = st.integers(0, 2)
SEQUENCES = st.lists(st.lists(FEW, min_size=1, max_size=20).map(lambda tokens: ids(*tokens)), max_size=4)


def places(sequences: list[TokenIds], prompt: TokenIds) -> set[tuple[int, int]]:
    """Sequences, and every shift at which their interior is in the prompt; by looking everywhere."""
    found = set()
    for which, tokens in enumerate(sequences):
        edge = edge_of(len(tokens))
        inner = tokens[edge : len(tokens) - edge]
        for at in range(len(prompt) - len(inner) + 1):
            if np.array_equal(prompt[at : at + len(inner)], inner):
                found.add((which, at - edge))
    return found


@given(SEQUENCES, SEQUENCES, st.lists(FEW, max_size=60))
def test_candidates_are_where_the_interior_is(old: list[TokenIds], new: list[TokenIds], tokens: list[int]) -> None:
    """In a table that was changed: every second sequence dropped, others added."""
    is_kept = np.arange(len(old)) % 2 == 0
    sequences = [*(entry for entry, keeps in zip(old, is_kept, strict=True) if keeps), *new]
    prompt = ids(*tokens)
    found = SearchTable.of(old).changed(is_kept, new).candidates(HashedTokens(prompt))
    assert set(zip(found.which.tolist(), found.shift.tolist(), strict=True)) == places(sequences, prompt)
    for which, shift, is_whole in zip(found.which, found.shift, found.is_whole, strict=True):
        part = prompt[max(0, shift) : max(0, shift + len(sequences[which]))]
        assert is_whole == (shift >= 0 and np.array_equal(part, sequences[which]))
    assert found.length.tolist() == sorted((len(sequences[which]) for which in found.which), reverse=True)


LONG = tuple(range(100, 124))  # 24 tokens, 6 at either edge


@pytest.mark.parametrize(
    ("before", "part", "after", "run"),
    [
        ((1,), LONG, (2,), (1, 25, 0)),
        ((1, 2), LONG[1:], (), (2, 25, 1)),
        ((), LONG[:-3], (7, 8), (0, 21, 0)),
        ((1,), LONG[6:-6], (2,), (1, 13, 6)),
        ((1,), (*LONG[:2], 5, *LONG[3:]), (), (4, 25, 3)),  # up to the token that differs
        ((), LONG[2:], (1,), (1, 22, 3)),  # nothing at position 0 was computed after dropped tokens
        ((1,), LONG[7:], (2,), None),
        ((1,), (*LONG[:10], 5, *LONG[11:]), (2,), None),
    ],
)
def test_a_run_goes_from_the_first_to_the_last_token_that_is_the_same(
    before: tuple[int, ...], part: tuple[int, ...], after: tuple[int, ...], run: tuple[int, int, int] | None
) -> None:
    prompt, tokens = ids(*before, *part, *after), ids(*LONG)
    found = SearchTable.of([tokens]).candidates(HashedTokens(prompt))
    runs = [run_at(prompt, tokens, shift, 0, len(prompt)) for shift in found.shift.tolist()]
    assert [(entry.start, entry.end, entry.offset) for entry in runs if entry is not None] == ([run] if run else [])


def choose(sequences: list[TokenIds], prompt: TokenIds) -> list[tuple[int, int, int, int]]:
    def place(which: int, shift: int, low: int, high: int) -> TokenRun | None:
        return run_at(prompt, sequences[which], shift, low, high, which)

    found = SearchTable.of(sequences).candidates(HashedTokens(prompt))
    return [(run.which, run.start, run.end, run.offset) for run in choose_runs(found, len(prompt), place)]


def test_the_longest_are_chosen_first_and_a_token_that_two_claim_is_the_first_one_s() -> None:
    short, long, other = ids(*range(50, 66)), ids(*range(50, 90)), ids(89, *range(10, 26))
    assert choose([short, long], ids(1, *long, 2, *short)) == [(1, 1, 41, 0), (0, 42, 58, 0)]
    assert choose([long, other], ids(1, *long, *other[1:])) == [(0, 1, 41, 0), (1, 41, 57, 1)]


@given(SEQUENCES, st.lists(FEW, max_size=80))
def test_chosen_runs_do_not_overlap_and_leave_no_whole_sequence(sequences: list[TokenIds], tokens: list[int]) -> None:
    prompt = ids(*tokens)
    runs = choose(sequences, prompt)
    assert all(one[2] <= other[1] for one, other in itertools.pairwise(runs))
    for which, start, end, offset in runs:
        assert np.array_equal(prompt[start:end], sequences[which][offset : offset + end - start])
    is_taken = np.zeros(len(prompt) + 1, dtype=bool)
    for _, start, end, _ in runs:
        is_taken[start:end] = True
    for which, shift in places(sequences, prompt):
        assert is_taken[max(0, shift) : shift + len(sequences[which])].any()


def test_equal_hashes_are_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hashes that are all the same, only the tokens decide."""
    monkeypatch.setattr(HashedTokens, "parts", lambda self, starts, ends: np.zeros(len(starts), dtype=np.uint64))
    monkeypatch.setattr(
        HashedTokens, "windows", lambda self, width: np.zeros(max(0, len(self) - width + 1), dtype=np.uint64)
    )
    sequences = [ids(5, 6, 7), ids(7, 6, 5)]
    assert choose(sequences, ids(5, 6, 8, 7, 6, 5, 6, 7)) == [(1, 3, 6, 0)]


@pytest.mark.parametrize("step", [1, 40])
def test_work_is_bounded_whatever_the_texts_are(step: int) -> None:
    """A prompt of equal tokens, and one with another now and then; whatever is stored repeats that token."""
    length = 1 << 15
    prompt = np.full(length, 7, dtype=np.int32)
    prompt[::step] = 7 if step == 1 else 9
    sequences = [np.full(n, 7, dtype=np.int32) for n in range(16, 700, 3)]
    found = SearchTable.of(sequences).candidates(HashedTokens(prompt))
    widths = 4
    assert len(found.which) <= widths * (2 * length + 4096)
    calls = 0

    def place(which: int, shift: int, low: int, high: int) -> TokenRun | None:
        nonlocal calls
        calls += 1
        return run_at(prompt, sequences[which], shift, low, high) if step == 1 else None

    runs = choose_runs(found, length, place)
    assert sum(run.end - run.start for run in runs) > (0.9 * length if step == 1 else -1)
    assert calls <= len(runs) + search.MAX_REFUTED

"""Wrapped tokens: nothing is lost, nothing comes twice, nothing is wider than the line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from traces import make_trace

from pictool.tui.widgets.token_text import HEADING, TokenText

PIECES = st.lists(
    st.sampled_from([" a", "word", "\n", "東京", "x" * 30, "", "\t", "e\n\nf", "🙂", "\x1b[31m"]), min_size=1
)


@given(PIECES, st.integers(4, 40))
def test_every_piece_is_in_order_and_fits(pieces: list[str], width: int) -> None:
    wrapped = TokenText(tuple(pieces), (0,), ("── all",)).wrap(width)
    placed = [(token, text) for line in wrapped.lines for token, text in line if token != HEADING]
    assert [token for token, _ in placed] == sorted(token for token, _ in placed)
    assert {token for token, _ in placed} == set(range(len(pieces)))
    for token, piece in enumerate(pieces):
        text = "".join(text for other, text in placed if other == token)
        expected = piece.replace("\n", "↵").replace("\t", "\\t").replace("\x1b", "\\x1b")
        assert text == expected
    assert all(sum(cell_len(text) for _, text in line) <= width for line in wrapped.lines)


@given(PIECES, st.integers(4, 40))
def test_the_token_of_a_cell(pieces: list[str], width: int) -> None:
    wrapped = TokenText(tuple(pieces), (0,), ("── all",)).wrap(width)
    for token in range(len(pieces)):
        line = int(wrapped.line_of[token])
        if any(other == token and text for other, text in wrapped.lines[line]):
            assert wrapped.token_at(line, wrapped.column_of(token)) == token
    assert all(wrapped.token_at(line, 0) is None for line in (0, len(wrapped.lines), -1))


def test_parts_have_titles_with_their_span() -> None:
    wrapped = TokenText.of_trace(make_trace()).wrap(30)
    titles = [line[0][1] for line in wrapped.lines if line[0][0] == HEADING]
    assert titles == [
        "── head [0, 1)",
        "── 1 a.txt [1, 4)",
        "── 2 b.txt [4, 8)",
        "── tail [8, 10)",
        "── answer [10, 12)",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("b", [2]), ("a b", [1, 2]), ("A B", [1, 2]), ("", []), ("zz", []), ("f g", [6, 7]), ("<s>a", [0, 1]), ("(", [])],
)
def test_search_marks_the_tokens_that_a_text_touches(text: str, expected: list[int]) -> None:
    assert TokenText.of_prompt(make_trace()).find(text).nonzero()[0].tolist() == expected


def test_up_and_down_stay_near_the_column() -> None:
    wrapped = TokenText(tuple("abcdefgh"), (0,), ("──",)).wrap(4)
    assert wrapped.below(5, -1) == 1 and wrapped.below(1, 1) == 5
    assert wrapped.below(1, -1) == 1 and wrapped.below(5, 9) == 5


def test_a_long_prompt_is_wrapped() -> None:
    pieces = tuple(f" w{i % 100}" for i in range(32_000))
    wrapped = TokenText(pieces, (0,), ("──",)).wrap(100)
    assert np.diff(wrapped.line_of).min() >= 0 and wrapped.line_of[-1] == len(wrapped.lines) - 1

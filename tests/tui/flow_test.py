"""Tokens in lines: nothing lost, nothing twice, nothing wider than the line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from traces import make_trace

from pictool.tui.flow import HEADING, Shown, set_lines

PIECES = st.lists(
    st.sampled_from([" a", "word", "\n", "東京", "x" * 30, "", "\t", "e\n\nf", "🙂", "\x1b[31m"]), min_size=1
)


@given(PIECES, st.integers(4, 40))
def test_every_piece_stands_in_order_and_fits(pieces: list[str], width: int) -> None:
    flow = set_lines(Shown(tuple(pieces), (0,), ("── all",)), width)
    placed = [(token, text) for line in flow.lines for token, text in line if token != HEADING]
    assert [token for token, _ in placed] == sorted(token for token, _ in placed)
    assert {token for token, _ in placed} == set(range(len(pieces)))
    for token, piece in enumerate(pieces):
        text = "".join(text for other, text in placed if other == token)
        wanted = piece.replace("\n", "↵").replace("\t", "\\t").replace("\x1b", "\\x1b")
        assert text == wanted
    assert all(sum(cell_len(text) for _, text in line) <= width for line in flow.lines)


@given(PIECES, st.integers(4, 40))
def test_the_token_of_a_cell(pieces: list[str], width: int) -> None:
    flow = set_lines(Shown(tuple(pieces), (0,), ("── all",)), width)
    for token in range(len(pieces)):
        line = int(flow.line_of[token])
        if any(other == token and text for other, text in flow.lines[line]):
            assert flow.token_at(line, flow.column_of(token)) == token
    assert flow.token_at(0, 0) is None and flow.token_at(len(flow.lines), 0) is None and flow.token_at(-1, 0) is None


def test_parts_have_titles_with_their_span() -> None:
    flow = set_lines(Shown.of(make_trace()), 30)
    titles = [line[0][1] for line in flow.lines if line[0][0] == HEADING]
    assert titles == [
        "── head [0, 1)",
        "── 1 a.txt [1, 4)",
        "── 2 b.txt [4, 8)",
        "── tail [8, 10)",
        "── answer [10, 12)",
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("b", [2]), ("a b", [1, 2]), ("A B", [1, 2]), ("", []), ("zz", []), ("f g", [6, 7]), ("<s>a", [0, 1]), ("(", [])],
)
def test_search_marks_the_tokens_that_a_text_touches(text: str, wanted: list[int]) -> None:
    assert Shown.of_prompt(make_trace()).find(text).nonzero()[0].tolist() == wanted


def test_up_and_down_stay_near_the_column() -> None:
    flow = set_lines(Shown(tuple("abcdefgh"), (0,), ("──",)), 4)
    assert flow.beside(5, -1) == 1 and flow.beside(1, 1) == 5
    assert flow.beside(1, -1) == 1 and flow.beside(5, 9) == 5


def test_a_long_prompt_is_one_flow() -> None:
    pieces = tuple(f" w{i % 100}" for i in range(32_000))
    flow = set_lines(Shown(pieces, (0,), ("──",)), 100)
    assert np.diff(flow.line_of).min() >= 0 and flow.line_of[-1] == len(flow.lines) - 1

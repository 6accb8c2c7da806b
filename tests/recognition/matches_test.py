"""Objects that a request names, located in its prompt: whole, or but for edges whose text is there all the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pictool.core import TokenIds
from pictool.errors import InputError
from pictool.recognition.matches import NamedObject, locate


def ids(*tokens: int) -> TokenIds:
    return np.asarray(tokens, dtype=np.int32)


def decode(tokens: Sequence[int]) -> str:
    """Token 26 i + j is i copies of letter j, so that 0 to 25 are one letter each as 26 to 51 are; -1 is a space."""
    return "".join(" " if token < 0 else chr(97 + token % 26) * max(1, token // 26) for token in tokens)


def where(named: Sequence[NamedObject], *prompt: int) -> list[tuple[int, int, int]]:
    return [(match.start, match.end, match.offset) for match in locate(named, ids(*prompt), decode)]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_short_objects_are_located_as_a_whole_by_looking_at_every_place(prompt: list[int], pattern: list[int]) -> None:
    """Twice: the second comes after the first."""
    places, at = [], 0
    while at + len(pattern) <= len(prompt):
        is_here = prompt[at : at + len(pattern)] == pattern
        places += [(at, at + len(pattern), 0)] if is_here else []
        at += len(pattern) if is_here else 1
    named = [NamedObject("k", ids(*pattern))]
    for count in (1, 2):
        if len(places) < count:
            with pytest.raises(InputError, match=r"^object k: "):
                where(named * count, *prompt)
        else:
            assert where(named * count, *prompt) == places[:count]


TEXT = tuple(range(24))  # abcdefghijklmnopqrstuvwx, edges of 6
OBJECT = NamedObject("k" * 64, ids(*TEXT))


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ((30, *TEXT, 31), (1, 25, 0)),
        ((9, 26, *TEXT[1:]), (2, 25, 1)),  # another token of the same text
        ((9, *TEXT[:-1], 26 + 23, 3), (1, 24, 0)),
        ((9, 8, 27, *TEXT[2:]), None),  # "jibc…", and not "abc…": what is linked was computed after "ab"
        ((9, *TEXT[:-2], 26 + 23, 3), None),  # the end is not there
        ((9, 26, *TEXT[1:10], 99, *TEXT[11:]), None),
    ],
)
def test_edges_are_other_tokens_of_the_same_text(prompt: tuple[int, ...], place: tuple[int, int, int] | None) -> None:
    for named in (OBJECT, NamedObject(OBJECT.key, OBJECT.tokens, 1)):
        if place is None:
            with pytest.raises(InputError, match=r"^object kkkkkkkkkkkk: .* 24 "):
                where([named], *prompt)
        else:
            assert where([named], *prompt) == [place]


def test_whitespace_at_the_ends_of_a_document_may_be_gone() -> None:
    padded = NamedObject("k", ids(-1, -1, *TEXT, -1))
    assert where([padded], 9, *TEXT, 9) == [(1, 25, 2)]


def test_a_start_is_where_the_object_is_or_near_it() -> None:
    twice = (9, *TEXT, 8, 8, *TEXT)
    assert where([NamedObject("k", OBJECT.tokens, 27)], *twice) == [(27, 51, 0)]
    assert where([NamedObject("k", OBJECT.tokens, 20)], *twice) == [(27, 51, 0)]
    assert where([NamedObject("k", OBJECT.tokens, 5)], *twice) == [(1, 25, 0)]
    with pytest.raises(InputError, match=r"^object k: .* 90"):
        where([NamedObject("k", OBJECT.tokens, 90)], *twice)


def test_neighbours_share_no_token() -> None:
    """Two documents whose border is one token: it is the first one's. An exact place is never given away."""
    first, second = ids(*TEXT), ids(23, *reversed(range(23)))
    prompt = (9, *TEXT, *second[1:].tolist())
    assert where([NamedObject("a", first), NamedObject("b", second)], *prompt) == [(1, 25, 0), (25, 48, 1)]
    at = [NamedObject("a", first, 2), NamedObject("b", second, 24)]
    assert where(at, *prompt) == [(1, 24, 0), (24, 48, 0)]


def test_bytes_of_two_tokens_are_no_token() -> None:
    with pytest.raises(InputError, match=r"^object k: "):
        where([NamedObject("k", ids(0x01000000))], 0, 1, 0)

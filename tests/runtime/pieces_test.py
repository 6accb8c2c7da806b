"""Pieces: the text of each token, joining to what the tokenizer decodes."""

from __future__ import annotations

import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pictool.core import PromptText
from pictool.runtime.encoder import pieces_of
from pictool.runtime.model import load_model


def decode(tokens: list[int]) -> str:
    return str(tiny.tokenizer().decode(tokens))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, tiny.VOCAB - 1), max_size=40))
@example([97] * 7 + [129, 97])  # bytes that are no text, then a character of two bytes
def test_any_tokens_join_to_what_is_decoded(tokens: list[int]) -> None:
    """Also bytes that are no text, and special tokens among them."""
    pieces = pieces_of(tiny.tokenizer(), tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == decode(tokens)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_any_text_comes_back(text: str) -> None:
    tokens = tiny.tokenizer().encode(text, add_special_tokens=False)
    assert "".join(pieces_of(tiny.tokenizer(), tokens)) == text


def test_a_character_of_several_tokens_stands_at_its_last() -> None:
    tokens = tiny.tokenizer().encode("a🦀b", add_special_tokens=False)
    assert pieces_of(tiny.tokenizer(), tokens) == ("a", *[""] * (len(tokens) - 3), "🦀", "b")


def test_special_tokens_are_shown() -> None:
    model = load_model("embedded")
    assert pieces_of(model.tokenizer, model.encode(PromptText("<s>It holds</s>"))) == ("<s>", "It", " holds", "</s>")
    assert pieces_of(model.tokenizer, []) == ()

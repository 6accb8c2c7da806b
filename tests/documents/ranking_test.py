"""Which passages concern a question: words, names and their parts, and questions that say more than they ask."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from pictool.documents.ranking import OF_QUESTIONS, TextIndex, count_words, joined, words

NOISE = [
    "Where the wind blows, the mills are turning; this is what they do with it when it does.",
    "How do I set an option? Which options are there, and what do they set? You can set all of them.",
    "The release fixes what does not work: which options there are, how they are set, and why.",
]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Policies of libraries", ["policy", "of", "library"]),
        ("png_set_gamma", ["png", "set", "gamma", "png_set_gamma"]),
        ("readHeader HTTPServer", ["read", "header", "readheader", "http", "server", "httpserver"]),
        ("libcbor0 as-path", ["libcbor", "0", "libcbor0", "as", "path", "as-path"]),
        ("Größe straße", ["größe", "straße"]),
        ("", []),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("What does the option as-path do?", "With as-path='/x' a folder is known by another one."),
        ("How do I call png_set_gamma, and which option is there?", "Then png_set_gamma(png, 2.2, 0.45) is called."),
        ("What is libcbor?", "libcbor parses CBOR."),
        ("Which policies are there for retries?", "A retry has one policy."),
        ("How does readHeader work, and what does it do?", "The function read_header, once readHeader, is kept."),
    ],
)
def test_a_rare_name_outweighs_the_words_of_questions(question: str, text: str) -> None:
    texts = [*NOISE * 3, text, *NOISE * 3]
    assert TextIndex(texts).ranked(question)[0] == texts.index(text)


def test_a_question_of_such_words_alone_is_ranked_by_them() -> None:
    assert TextIndex([*NOISE, "Nothing."]).scored("Which are there?")[0][1] > 0
    assert TextIndex(["", " "]).scored("Why?") == [(0, 0.0), (1, 0.0)] and TextIndex(["A"]).scored("") == [(0, 0.0)]


TEXTS = ["the old harbour", "Harbour, harbour: the mill", "", "naïve Überblick 東京 x_1", "a mill of the mill", "…"]


@pytest.mark.parametrize(
    "query", ["the HARBOUR", "mill mill the", "東京", "überblick?", "nothing", "", "is the", "\ud800 mill"]
)
def test_scores_are_those_of_bm25(query: str) -> None:
    texts = [words(text) for text in TEXTS]
    mean = sum(map(len, texts)) / len(texts)
    asked = words(query)

    def score(text: list[str]) -> float:
        total = 0.0
        for word in [word for word in asked if word not in OF_QUESTIONS] or asked:
            having = sum(word in other for other in texts)
            rarity = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            total += rarity * text.count(word) / (text.count(word) + 1.2 * (0.5 + 0.5 * len(text) / mean))
        return total

    scored = TextIndex(TEXTS).scored(query)
    assert dict(scored) == pytest.approx({at: score(text) for at, text in enumerate(texts)})
    assert scored == sorted(scored, key=lambda one: (-one[1], one[0]))


def test_groups_of_texts_are_ranked_as_all_their_texts_with_their_headings() -> None:
    groups, headings = (
        [TEXTS[:2], [], TEXTS[2:5], TEXTS[5:]],
        ["docs/mill.txt", "none", "docs/harbour-mill/mill.txt", "x"],
    )
    together = TextIndex(joined([count_words(group) for group in groups], headings))
    each = TextIndex([f"{heading}\n{text}" for group, heading in zip(groups, headings, strict=True) for text in group])
    for query in ("mill", "the harbour of docs", "x txt"):
        assert together.scored(query) == each.scored(query)
    assert Counter(at for at, _ in together.scored("mill")) == Counter(range(len(TEXTS)))
    assert TextIndex([]).scored("mill") == []

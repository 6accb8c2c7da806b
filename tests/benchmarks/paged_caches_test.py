"""The worked examples of the paper: serialised queries (figs. 10–12) and hit rates (figs. 2, 3, 5)."""

from __future__ import annotations

import pytest

from benchmarks.span_queries.paged_caches import (
    ObjectCache,
    PrefixCache,
    SpanCache,
    Symbol,
    count_tokens,
    serialise_with_pointers,
)
from pictool.spans.dsl import assistant, cross, plus, seq, system, user
from pictool.spans.operators.messages import Message
from pictool.spans.query import Query

BLOCK = 2


def symbols(query: Query, block: int | None = BLOCK) -> tuple[Symbol, ...]:
    """The words of messages are their tokens; an assistant's are after its role."""
    return serialise_with_pointers(query, words, block)


def words(message: Message) -> list[str]:
    return ["a:"] * (message.role == "assistant") + message.text.split()


def drawn(symbols: tuple[Symbol, ...]) -> str:
    return " ".join(map(str, symbols))


RAG = cross(system("S1"), plus("F1", "F2 F2"), user("U1"))
INNER = cross(system("S1"), user("U1"))
JUDGE = cross(system("S2"), plus(INNER, assistant("A1 A1 A1"), INNER, assistant("A2 A2")), user("U2"))


@pytest.mark.parametrize(
    ("query", "block", "want"),
    [
        pytest.param(RAG, None, "S1 ( F1 ( F2 F2 ) 6 U1", id="fig. 10"),
        pytest.param(RAG, 2, "S1 □ ( F1 ( F2 F2 □ ) 7 U1", id="fig. 11"),
        pytest.param(
            JUDGE, 2, "S2 □ ( S1 U1 □ ( a: A1 A1 ( S1 U1 □ ( a: A2 A2 ) 17 U2", id="fig. 12: A1 loses its third token"
        ),
        pytest.param(seq(plus(), "U"), 2, "U", id="a + of nothing"),
        pytest.param(plus(plus("a", "b"), "c"), 2, "( □ ( a ( b ) 5 ( c ) 11", id="nested"),
    ],
)
def test_worked_examples(query: Query, block: int | None, want: str) -> None:
    assert drawn(symbols(query, block)) == want


def test_every_pointer_leads_to_the_beginning_of_its_sub_tree() -> None:
    found = symbols(plus(plus("a", "b b b"), seq("c", plus("d"))), 4)
    starts = [index - symbol.distance for index, symbol in enumerate(found) if hasattr(symbol, "distance")]
    assert [found[start] for start in starts] == ["("] * 3 and starts[-1] == 0
    assert all(index % 4 == 0 for index, symbol in enumerate(found) if symbol in ("(", ")"))


def test_chat_hits_80_percent() -> None:
    """Fig. 2: four of the five tokens of the chat so far."""
    cache = PrefixCache(BLOCK)
    assert cache.request(["Hello"], ["How", "are", "you", "?"]) == 0
    context = ["Hello", "How", "are", "you", "?"]
    assert cache.request([*context, "I", "am", "fine"]) / len(context) == 0.8


S, F1, F2, U = ["S", "S"], ["F1"], ["F2", "F2"], ["U"]


def test_rag_hits_33_percent_and_with_spans_all_but_the_question() -> None:
    """Fig. 3: the second question has the same fragments in the other order."""
    cache = PrefixCache(BLOCK)
    cache.request([*S, *F1, *F2, *U])
    assert cache.request([*S, *F2, *F1, *U]) == 2  # of 6
    spans, objects = SpanCache(BLOCK), ObjectCache()
    first, second = (cross(system("S S"), plus(*texts), user("U")) for texts in (("F1", "F2 F2"), ("F2 F2", "F1")))
    spans.request(symbols(first))
    found = symbols(second)
    assert count_tokens(found[: spans.request(found)]) == 5  # of 6: 83 %
    objects.request([S, F1, F2])
    assert objects.request([S, F2, F1]) == 5


def test_a_judge_hits_29_percent_and_with_spans_every_candidate() -> None:
    """Fig. 5, after an earlier round: of the judge's input only its instructions are cached."""
    judge, a1, a2 = ["S2", "S2"], ["A1"] * 3, ["A2"] * 2
    cache = PrefixCache(BLOCK)
    cache.request([*judge, "X", "X"])
    cache.request(["S1", "U1"], a1)
    assert cache.request(["S1", "U1"], a2) == 2  # the inner input
    assert cache.request([*judge, *a1, *a2]) == 2  # of 7
    objects = ObjectCache()
    objects.request([judge])
    objects.request([["S1", "U1"]], a1)
    objects.request([["S1", "U1"]], a2)
    assert objects.request([judge, a2, a1]) == 7
    spans = SpanCache(BLOCK)
    spans.request(symbols(cross(system("S2 S2"))))
    for text in ("A1 A1 A1", "A2 A2"):
        spans.request(symbols(plus(INNER, assistant(text))))
    whole = symbols(cross(system("S2 S2"), plus(INNER, assistant("A2 A2"), INNER, assistant("A1 A1 A1"))))
    found = whole[: spans.request(whole)]
    assert [symbol for symbol in found if symbol in ("A1", "A2")] == ["A2", "A2", "A1", "A1"]  # cropped


def test_what_follows_spans_depends_on_their_order() -> None:
    spans = SpanCache(BLOCK)
    spans.request(symbols(cross(plus("a", "b"), user("u u"))))
    same, other = symbols(cross(plus("a", "b"), user("u u"))), symbols(cross(plus("b", "a"), user("u u")))
    assert spans.request(same) == len(same)
    assert spans.request(other) == len(other) - 2 * BLOCK  # the closing block and the question

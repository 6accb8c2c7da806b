"""What a client has of an answer, when another replica goes on with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pictool.cluster.sent import EventMismatch, SentEvents
from pictool.serve.work import DeltaEvent, FinishEvent, Reuse, StartEvent, TokenInfo


def told(*texts: str, index: int = 0) -> list[DeltaEvent]:
    """Deltas, each with one token for each letter."""
    return [DeltaEvent(index, text, tuple(TokenInfo(letter, -0.5) for letter in text)) for text in texts]


STARTED = StartEvent(Reuse("legolink-4", chunks=1, exact=3, linked=5, cached=5))
ENDED = FinishEvent(0, "stop", 5)


def run(attempts: Sequence[Sequence[Any]]) -> list[Any]:
    """What a client has after these attempts."""
    sent, events = SentEvents(), list[Any]()
    for attempt in attempts:
        sent.begin_again()
        events += [rest for event in attempt if (rest := sent.rest(event)) is not None]
    return events


@pytest.mark.parametrize("cut", [["hel", "lo"], ["h", "e", "l", "l", "o"], ["hello"], ["he", "llo"]])
def test_an_answer_goes_on_however_it_is_cut(cut: list[str]) -> None:
    events = run([told("hel"), told("h"), [*told(*cut), STARTED, ENDED]])
    deltas = [event for event in events if isinstance(event, DeltaEvent)]
    assert "".join(delta.text for delta in deltas) == "hello" and events[-2:] == [STARTED, ENDED]
    assert [token.text for delta in deltas for token in delta.tokens] == list("hello")


def test_answers_side_by_side_and_noise() -> None:
    """Another cache had other tokens, and a batch other noise; answers may come in another order."""
    noisy = DeltaEvent(0, "h", (TokenInfo("h", -0.5001),))
    again = StartEvent(Reuse("legolink-4", chunks=1, exact=3, linked=5, cached=0))
    first = [STARTED, *told("h"), *told("x", index=1)]
    events = run([first, [*told("xy", index=1), noisy, again, ENDED]])
    assert events == [*first, *told("y", index=1), ENDED]
    assert run([[{"text": "ab"}], [{"text": "a"}, {"text": "bc"}, {"report": 1}]])[1:] == [{"text": "c"}, {"report": 1}]
    assert not SentEvents()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (told("hel"), told("me")),
        (told("hel"), [DeltaEvent(0, "hel", (TokenInfo("hel", -0.5),))]),
        (told("hel"), [*told("he"), ENDED]),  # it is shorter
        ([*told("h"), FinishEvent(0, "stop", 1)], [*told("h"), FinishEvent(0, "length", 1)]),
        ([STARTED], [StartEvent(Reuse("full", exact=8, problem="damaged"))]),
        ([{"compiled": "a"}], [{"compiled": "b"}]),
        ([0.5], [0.6]),
    ],
)
def test_another_answer_is_none(first: list[Any], second: list[Any]) -> None:
    with pytest.raises(EventMismatch):
        run([first, second])

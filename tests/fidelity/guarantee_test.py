"""The guarantee: its bounds against the truth of simulated streams, and its decisions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from scipy.stats import binomtest

from benchmarks.guarantee import DECLARED, STREAMS, run_stream, simulate
from pictool.errors import InputError
from pictool.fidelity.guarantee import Guarantee, Guarantor, Window, chain_of
from pictool.linker.policies import make_policy

FIXUP = make_policy("fixup", {"ratio": 0.1})
ALL = Guarantee(kl=0.1, level=0.9, share=1.0)


@pytest.mark.parametrize("name", ["at the limit", "shifted", "adversary"])
def test_a_window_is_wrongly_said_to_hold_as_rarely_as_declared(name: str) -> None:
    """A fast form of benchmarks/guarantee.py: the declared level is within the binomial interval, or above it."""
    assert simulate(name, 20)["interval"][0] <= 1 - DECLARED.level


def test_a_bound_of_a_window_at_the_limit_fails_as_rarely_as_declared() -> None:
    wrong, count = 0, 1000
    for seed in range(count):
        rng, window = random.Random(seed), Window(1, 0.1, 0.9)
        for _ in range(200):
            is_bad, is_chosen = rng.random() < 0.1, rng.random() < 0.5
            window.add(0.5, float(is_bad) if is_chosen else None)
            if window.holds:
                wrong += 1
                break
    level = 0.1 * 6 / math.pi**2
    assert binomtest(wrong, count).proportion_ci(0.99).low <= level


def test_the_bound_is_that_of_the_textbook_for_zeros() -> None:
    """A bet b wins exp(b n m) on n zeros: with weight w the bound is log(1 / (w δ)) / (b n), a mixture near it."""
    window = Window(1, 0.05, 0.95)
    for _ in range(400):
        window.add(1.0, 0.0)
    odds = math.log(math.pi**2 / 6 / 0.05)
    assert odds / 400 < window.bound <= (odds - math.log(0.4)) / (0.97 * 400) + 1e-6
    assert window.holds and not window.is_breached


def drive(guarantor: Guarantor, values: Iterator[float], count: int) -> list[bool]:
    """Whether each answer was linked; all are verified at once."""
    linked = list[bool]()
    for _ in range(count):
        ticket = guarantor.draw("t", FIXUP, 3)
        assert ticket is not None and ticket.is_chosen
        linked.append(not ticket.is_exact)
        guarantor.finish(ticket)
        guarantor.verify(ticket, next(values))
    return linked


def test_answers_are_linked_once_it_is_shown_and_a_breach_strengthens_the_policy() -> None:
    events = list[str]()
    guarantor = Guarantor(ALL, events.append, coin=lambda: 0.0)
    linked = drive(guarantor, itertools.repeat(0.0), 100)
    assert not any(linked[:20]) and linked[-1] and events[0].endswith("holds: answers are linked")
    (of,) = guarantor.classes.values()
    linked = list[bool]()
    while not of.breaches:
        linked += drive(guarantor, itertools.repeat(5.0), 1)
    assert linked[0] and not linked[-1] and len(linked) < 40
    assert [event.rpartition(": ")[0] for event in events[1:2]] == [
        "guarantee of t, fixup-10, 2 to 3 documents: KL at most 0.1 at 0.9 is not shown any more"
    ]
    assert "is breached: answers are exact until it is shown for fixup-20" in events[2]
    drive(guarantor, itertools.repeat(0.0), 2000)
    assert of.is_linked and of.strength == 0
    assert any("a cheaper policy is tried" in event for event in events)


def test_what_is_not_resolved_or_not_given_does_not_count_and_what_cannot_be_verified_is_the_worst() -> None:
    guarantor = Guarantor(ALL, lambda text: None, coin=lambda: 0.0)
    first, second, third = (guarantor.draw("t", FIXUP, 3) for _ in range(3))
    assert first is not None and second is not None and third is not None
    of = first.of
    guarantor.verify(third, 0.0)
    assert of.verified == 0 and guarantor.pending == 2
    guarantor.withdraw(first)
    guarantor.verify(second, None)
    assert (of.verified, guarantor.pending, second.value) == (2, 0, 1.0)


def test_where_too_many_wait_answers_are_exact_and_none_is_dropped() -> None:
    guarantor = Guarantor(ALL, lambda text: None, coin=lambda: 0.0)
    tickets = [guarantor.draw("t", FIXUP, 3) for _ in range(70)]
    assert None not in tickets[:64] and tickets[64:] == [None] * 6 and guarantor.pending == 64


def test_a_chain_doubles_what_is_computed() -> None:
    assert [policy.params["ratio"] for policy in chain_of(FIXUP)] == [0.1, 0.2, 0.4, 0.8]
    assert chain_of(make_policy("naive")) == [make_policy("naive")]


WRONG = ["kl", "kl=x", "level=0.9", "kl=0.1,kl=0.2", "kl=0.1,more=1", "kl=0", "kl=2", "kl=0.1,level=1"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_guarantee_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--guarantee"):
        Guarantee.parse(text, 0.1)


def test_streams_repeat() -> None:
    assert repr(run_stream(STREAMS["good"], 3)) == repr(run_stream(STREAMS["good"], 3))

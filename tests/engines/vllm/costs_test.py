"""The cost rule: what was measured decides, and it is measured again."""

from __future__ import annotations

import pytest

from pictool.engines.vllm.scheduler import costs
from pictool.engines.vllm.scheduler.costs import LinkCosts


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(f"{costs.__name__}.time.perf_counter", lambda: self.now)

    def prefill(self, known: LinkCosts, seconds: float, tokens: int = 100, has_links: bool = False) -> None:
        """A step of so many tokens."""
        known.begin_step(tokens, has_links)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def measured(clock: Clock, prefill_s: float, link_s: float, tokens: int = 100) -> LinkCosts:
    known = LinkCosts()
    for _ in range(20):
        clock.prefill(known, prefill_s)
    for _ in range(5):
        known.linked("naive", tokens, link_s)
    return known


def test_links_that_take_longer_than_a_prefill_are_declined(clock: Clock) -> None:
    assert measured(clock, prefill_s=1.0, link_s=1.1).declines("naive", 100)
    assert not measured(clock, prefill_s=1.0, link_s=0.9).declines("naive", 100)


def test_one_of_sixteen_is_linked_and_a_faster_one_is_noticed(clock: Clock) -> None:
    known = measured(clock, prefill_s=1.0, link_s=5.0)
    declined = [known.declines("naive", 100) for _ in range(48)]
    assert declined.count(False) == 3 and declined[15] is declined[31] is declined[47] is False
    for _ in range(5):
        known.linked("naive", 100, 0.5)
    assert not known.declines("naive", 100)


def test_what_was_not_measured_is_linked(clock: Clock) -> None:
    known = measured(clock, prefill_s=1.0, link_s=5.0)
    assert not known.declines("legolink-16", 100) and not known.declines("naive", 300)  # another policy, another size
    assert known.declines("naive", 120)
    only_links = LinkCosts()
    for _ in range(9):
        only_links.linked("naive", 100, 1e9)
    assert not only_links.declines("naive", 100)


def test_pauses_decoding_and_steps_with_links_are_not_prefills(clock: Clock) -> None:
    known = LinkCosts()
    for _ in range(40):
        clock.prefill(known, 1.0)
        clock.prefill(known, 100.0, tokens=8)
        clock.prefill(known, 100.0, has_links=True)
    clock.now += 1e6
    for _ in range(5):
        known.linked("naive", 100, 1.1)
    assert known.declines("naive", 100)


def test_its_memory_is_bounded(clock: Clock) -> None:
    known = LinkCosts()
    for number in range(10_000):
        known.linked(f"legolink-{number}", 100, 1.0)
    assert len(known._links) <= 256

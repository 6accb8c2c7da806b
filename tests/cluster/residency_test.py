"""What a router knows of replicas, without Ray."""

from __future__ import annotations

from pictool.cluster.residency import Residency, report_of
from pictool.routing import Routing, rank

KEYS = [f"{number:064x}"[::-1] for number in range(40)]
NAMES = ["a", "b", "c"]
IDLE = dict.fromkeys(NAMES, 0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def residency(clock: Clock | None = None, queue_bytes: float = 1.0) -> Residency:
    made = Residency(Routing(queue_bytes), clock or Clock())
    made.keep(NAMES)
    return made


def test_the_replica_that_reports_most_bytes_is_first() -> None:
    made = residency()
    made.take_report("b", report_of([(KEYS[0], 100)]))
    made.take_report("c", report_of([(KEYS[0], 100), (KEYS[1], 50)]))
    assert made.order(KEYS[:2], IDLE) == ["c", "b", "a"]
    assert made.order(KEYS[:2], IDLE | {"c": 51.0})[0] == "b"
    made.take_report("c", report_of([]))
    assert made.order(KEYS[:1], IDLE)[0] == "b"


def test_what_was_sent_counts_until_it_is_reported_or_long_past() -> None:
    clock = Clock()
    made = residency(clock)
    made.take_report("a", report_of([(KEYS[9], 100)]))
    home = made.order([KEYS[0]], IDLE)[0]
    other = next(name for name in NAMES if name != home)
    made.was_sent([KEYS[0]], other)
    assert made.order([KEYS[0]], IDLE)[0] == other
    clock.now = 11.0
    assert made.order([KEYS[0]], IDLE)[0] == home
    made.was_sent([KEYS[1]], other)
    assert list(made._sent[other]) == [KEYS[1][:16]]  # what is past is forgotten


def test_a_cold_object_has_the_size_of_others_and_a_word_has_none() -> None:
    made = residency(queue_bytes=60.0)
    made.take_report("a", report_of([(KEYS[9], 100)]))
    cold = made.order([KEYS[0]], IDLE)[0]
    busy = dict.fromkeys(NAMES, 1.0) | {cold: 2.0}
    assert made.order([KEYS[0]], busy)[0] == cold  # 100 bytes are more than one request
    word = made.order(["text 1"], IDLE)[0]
    assert made.order(["text 1"], IDLE | {word: 1.0})[0] != word
    assert len({made.order([f"text {number}"], IDLE)[0] for number in range(30)}) == 3


def test_no_replica_gets_far_more_than_others_whatever_it_holds() -> None:
    made = residency()
    made.take_report("a", report_of((key, 100) for key in KEYS))
    counts = dict.fromkeys(NAMES, 0)
    for number in range(600):
        first = made.order([KEYS[number % 40]], IDLE)[0]
        made.count(first)
        counts[first] += 1
    assert max(counts.values()) <= 1.25 * 200 + 17


def test_a_replica_that_left_is_not_chosen_and_one_that_joined_is() -> None:
    made = residency()
    made.take_report("b", report_of([(KEYS[0], 100)]))
    made.keep(["a", "d"])
    assert sorted(made.order([KEYS[0]], {"a": 0.0, "d": 0.0})) == ["a", "d"]
    assert rank({KEYS[0]: 1}, {}, {"a": 0.0, "d": 0.0}) == made.order([KEYS[0]], {"a": 0.0, "d": 0.0})

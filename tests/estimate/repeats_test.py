"""Repeats against a suffix automaton, on random logs; and the sample within the error that it tells."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from estimate.references import SuffixAutomaton, repeated
from pictool.estimate.hashing import Rolling
from pictool.estimate.repeats import ExactRepeats, RepeatIndex, SampledRepeats, ScannedPrompts


def random_log(draw: random.Random, window: int) -> list[bytes]:
    """Prompts made of pieces of common documents, some cut, and of noise."""
    letters = draw.choice([1, 2, 3, 26])

    def text(length: int) -> bytes:
        return bytes(draw.randrange(letters) for _ in range(length))

    documents = [text(draw.randrange(1, 3 * window + 20)) for _ in range(6)]

    def piece() -> bytes:
        document = draw.choice(documents)
        return draw.choice([document, document[draw.randrange(5) :], text(draw.randrange(window + 5))])

    return [b"".join(piece() for _ in range(draw.randrange(5))) for _ in range(draw.randrange(1, 14))]


def scanned(repeats: RepeatIndex, log: list[Any], seed: int = 0) -> list[float]:
    """Of each prompt, the units in repeats; all of them are scanned together."""
    sizes = np.asarray([len(prompt) for prompt in log])
    ends, seeds = np.cumsum(sizes), np.full(len(log), seed, dtype=np.uint64)
    prompts = ScannedPrompts(Rolling(np.concatenate(log)), ends, seeds, ends - sizes, ends)
    places, counts = repeats.scan(prompts, np.ones(int(sizes.sum()), dtype=np.bool_))
    found: list[float] = np.bincount(prompts.numbers(places), counts, len(log)).tolist()
    return found


def counts_of(
    repeats: RepeatIndex, log: list[bytes], kind: Any = np.uint8, seed: int = 0, batch: int = 1
) -> list[float]:
    units = [np.frombuffer(prompt, dtype=np.uint8).astype(kind) for prompt in log]
    return [count for at in range(0, len(units), batch) for count in scanned(repeats, units[at : at + batch], seed)]


@pytest.mark.parametrize("part", range(10))
def test_repeats_are_those_of_a_suffix_automaton(part: int) -> None:
    """On 1,200 random logs, of bytes and of token ids; the sample is exact as long as its memory lasts."""
    for number in range(120):
        draw = random.Random(1000 * part + number)
        window = draw.choice([1, 2, 3, 4, 5, 8, 16, 64])
        log, kind = random_log(draw, window), draw.choice([np.uint8, np.int32])
        expected = repeated(log, window)
        for repeats in (ExactRepeats(window), SampledRepeats(window, 1 << 30)):
            assert counts_of(repeats, log, kind, batch=draw.choice([1, 2, 5, 20])) == expected
            assert repeats.error() == 0


def test_the_automaton_knows_all_substrings() -> None:
    draw = random.Random(5)
    for _ in range(50):
        texts = [bytes(draw.randrange(2) for _ in range(draw.randrange(12))) for _ in range(3)]
        asked = bytes(draw.randrange(2) for _ in range(12))
        automaton = SuffixAutomaton()
        for text in texts:
            automaton.add(text)
        for end, length in enumerate(automaton.longest(asked), 1):
            assert any(asked[end - length : end] in text for text in texts)
            assert length == end or not any(asked[end - length - 1 : end] in text for text in texts)


def test_tenants_repeat_nothing_of_each_other() -> None:
    repeats, text = ExactRepeats(8), bytes(range(100))
    assert counts_of(repeats, [text], seed=1) == [0]
    assert counts_of(repeats, [text], seed=2) == [0]
    assert counts_of(repeats, [text], seed=1) == [100]


def test_a_long_region_is_scanned_in_parts_that_share_windows() -> None:
    text = np.random.default_rng(1).integers(0, 256, 3 << 19).astype(np.uint8)
    repeats = ExactRepeats(64)
    assert scanned(repeats, [text]) == [0]
    assert scanned(repeats, [text]) == [len(text)]


@pytest.mark.parametrize("seed", range(8))
def test_a_sample_is_within_the_error_that_it_tells(seed: int) -> None:
    draw = np.random.default_rng(seed)
    documents = [draw.integers(0, 256, int(draw.integers(300, 3000))).astype(np.uint8) for _ in range(200)]
    exact, sampled = ExactRepeats(64), SampledRepeats(64, 1 << 20)
    sums = np.zeros(2)
    for _ in range(150):
        chosen = [documents[i] for i in draw.integers(0, len(documents), 3)]
        parts = [part for document in chosen for part in (document, draw.integers(0, 256, 50).astype(np.uint8))]
        prompt = np.concatenate(parts)
        sums += [scanned(repeats, [prompt])[0] for repeats in (exact, sampled)]
    assert sampled.rate > 1 and sampled.num_bytes <= 1 << 20
    assert abs(sums[1] - sums[0]) <= sampled.error() < 0.2 * sums[0]

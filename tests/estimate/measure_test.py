"""The pass over a log against plain forms of its own definitions."""

from __future__ import annotations

import random
import string
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from estimate.references import prefixes
from pictool.estimate.hashing import Rolling
from pictool.estimate.measure import Measure
from pictool.estimate.segments import LoggedPrompt, Segment, TokenScale, split_text

SCALE = TokenScale(4)


def random_prompts(draw: random.Random) -> list[LoggedPrompt]:
    """Chats over common documents, pasted, marked, cut, with headings."""
    letters = draw.choice(["ab", string.ascii_lowercase + " \n"])

    def text(most: int) -> str:
        return "".join(draw.choice(letters) for _ in range(draw.randrange(most)))

    documents = [text(900) for _ in range(5)]

    def message() -> Segment:
        kind = draw.choice(["user", "system", "assistant", "tool"])
        shown = draw.choices(documents, k=draw.randrange(4))
        heading = draw.choice(["", "\nDocument {}:\n", "<doc>"])
        body = "".join(heading.format(number) + document for number, document in enumerate(shown)) + text(60)
        marked = draw.random() < 0.2
        return Segment("document" if marked else kind, body[draw.choice([0, 0, 7]) :], marked)

    return [
        LoggedPrompt(tuple(message() for _ in range(draw.randrange(4))), tenant=draw.choice(["", "", "b"]))
        for _ in range(draw.randrange(2, 10))
    ]


def blocks_of(segment: Segment) -> list[tuple[bytes, bytes]]:
    """The blocks of a message, each with the part that it is in."""
    assert isinstance(segment.content, str)
    is_whole = segment.is_marked or segment.kind == "assistant"
    parts = [segment.content] if is_whole else [text for _, text in split_text(segment.kind, segment.content)]
    found = []
    for part in parts:
        data, at = part.encode(), 0
        rolling = Rolling(np.frombuffer(data, dtype=np.uint8))
        for end in SCALE.cut(rolling, np.asarray([0]), np.asarray([len(data)])).tolist():
            found.append((data[at:end], data))
            at = end
    return found


def linked(prompts: Sequence[LoggedPrompt], starts: Sequence[int]) -> list[int]:
    """Of each prompt, the bytes beyond its prefix that are in blocks, or parts, of an earlier one."""
    counts, known = [], set[bytes]()
    for prompt, start in zip(prompts, starts, strict=True):
        at = count = 0
        blocks = [block for segment in prompt.segments for block in blocks_of(segment)]
        for block, part in blocks:
            is_known = any(len(text) >= SCALE.window and text in known for text in (block, part))
            count += max(0, at + len(block) - max(start, at)) if is_known else 0
            at += len(block)
        counts.append(count)
        known.update(text for block in blocks for text in block)
    return counts


def data_of(prompt: LoggedPrompt) -> bytes:
    return b"".join(str(segment.content).encode() for segment in prompt.segments)


@pytest.mark.parametrize("part", range(6))
def test_prefix_and_linkable_are_those_of_their_definitions(part: int) -> None:
    for number in range(30):
        prompts = random_prompts(random.Random(100 * part + number))
        measure = Measure()
        for prompt in prompts:
            measure.add(prompt)
        measure.finish()
        found = np.asarray(measure.series).reshape(-1, 4)[:, 1:] * 4
        for tenant in {prompt.tenant for prompt in prompts}:
            own = [i for i, prompt in enumerate(prompts) if prompt.tenant == tenant]
            texts = [data_of(prompts[i]) for i in own]
            starts = prefixes(texts, 64)
            assert found[own, 0].tolist() == [len(text) for text in texts]
            assert found[own, 1].tolist() == starts
            assert found[own, 2].tolist() == linked([prompts[i] for i in own], starts)


def test_a_long_prompt_takes_a_bounded_memory_beside_what_is_remembered() -> None:
    """One of 11 MB took 2.5 GB: all its windows were looked up at once."""
    text, memory = random.Random(1).randbytes(1 << 21).hex(), 16 << 20
    measure = Measure(memory=memory)
    tracemalloc.start()
    try:
        for start in (0, 1000):
            measure.add(LoggedPrompt((Segment("user", text[start:]),)))
        tokens = measure.finish().tokens
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tokens.prefix == 0 and tokens.linked > 0.49 * tokens.total  # the second has almost all of the first
    assert peak < memory + (64 << 20) + 20 * len(text)


def test_parts_are_the_whole_text() -> None:
    for number in range(200):
        for prompt in random_prompts(random.Random(number)):
            for segment in prompt.segments:
                assert "".join(text for _, text in split_text("user", str(segment.content))) == segment.content

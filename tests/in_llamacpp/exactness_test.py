"""The exactness rules on GGUF files: linked logits equal a dense float32 reference of `transformers`.

`PIC_LAYOUTS=200` is the number of random layouts for each architecture: chunks of random tokens and lengths, one of
them perhaps twice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import tiny
import torch
from alone import compile
from in_llamacpp.pairs import NAMES, TOLERANCE, Pair, make_pair

from pictool.core import Chunk
from pictool.doctor import reference
from pictool.linker.grid import named_policy
from pictool.linker.link import Linked, link
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.linker.spec import Spec

LAYOUTS = int(os.environ.get("PIC_LAYOUTS", "200"))
POLICIES = ("full", "naive", "legolink-1", "legolink-4", "legolink-16", "legolink-1000", "prefix")


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield make_pair(tmp_path_factory.mktemp(request.param), request.param)


def draw_chunks(draw: random.Random) -> list[Chunk]:
    """Up to five chunks, which may be longer than windows; sometimes one is there twice."""
    chunks = [
        Chunk(f"chunk {i}", tuple(draw.randrange(3, tiny.VOCAB) for _ in range(draw.randint(1, 40))), f"chunk {i}")
        for i in range(draw.randint(1, 5))
    ]
    return [*chunks, draw.choice(chunks)] if draw.random() < 0.2 else chunks


def linked(pair: Pair, chunks: list[Chunk], policy: Policy) -> Linked:
    head = "<s>You answer." if len(chunks) % 2 else ""
    return link(pair.model, pair.store, replace(Spec.raw(chunks, "Really?", policy, head), after="none"))


def expected(pair: Pair, done: Linked) -> torch.Tensor:
    layout = done.image.layout
    parts = [layout.tokens[start:end].tolist() for start, end in (layout.head, *layout.chunks, layout.tail)]
    return reference.link(pair.module, parts, torch.from_numpy(done.rows[0])).logits


def test_links_equal_the_dense_reference(pair: Pair) -> None:
    """Rules 2, 4, 5 and 6: any layout, under a policy in turn; each policy has its share of the layouts."""
    apart: dict[str, float] = {}
    for number in range(LAYOUTS):
        draw = random.Random(number)
        chunks = draw_chunks(draw)
        for name in {"full", "naive", POLICIES[number % len(POLICIES)], POLICIES[(number + 3) % len(POLICIES)]}:
            done = linked(pair, chunks, named_policy(name))
            assert done.image.logits is not None
            apart[name] = max(apart.get(name, 0.0), float((done.image.logits - expected(pair, done)).abs().max()))
    assert set(apart) == set(POLICIES) and max(apart.values()) <= pair.tolerance, apart


def test_linking_changes_the_answer(pair: Pair) -> None:
    """Otherwise agreement would say nothing."""
    chunks = draw_chunks(random.Random(5))
    full, naive = (linked(pair, chunks, named_policy(name)).image.logits for name in ("full", "naive"))
    assert full is not None and naive is not None
    assert float((full - naive).abs().max()) > 100 * TOLERANCE


def test_legolink_of_whole_chunks_is_full(pair: Pair) -> None:
    for seed in range(5):
        chunks = draw_chunks(random.Random(seed))
        full, lego = (linked(pair, chunks, named_policy(name)).image.logits for name in ("full", "legolink-1000"))
        assert full is not None and lego is not None
        assert float((full - lego).abs().max()) <= TOLERANCE


@dataclass(frozen=True)
class Scattered(Policy):
    """Every third row: runs that are shorter than any window, in the middle of chunks."""

    name: ClassVar[str] = "every-third"
    reference: ClassVar[str] = "for checking only"

    def select(self, prompt: Prompt) -> Selection:
        return Selection(np.arange(prompt.layout.num_context) % 3 == 1)


def test_scattered_rows_attend_to_all_that_precedes_them(pair: Pair) -> None:
    """Rule 5. A row in the middle of a chunk attends to what the end of the chunk does not."""
    for number in range(min(LAYOUTS, 20)):
        done = linked(pair, draw_chunks(random.Random(number)), Scattered())
        assert done.image.logits is not None
        assert float((done.image.logits - expected(pair, done)).abs().max()) <= pair.tolerance


def test_decoding_goes_on_in_a_larger_context_and_can_be_taken_back(pair: Pair) -> None:
    """More tokens than a context has room for after the prompt, then the first ones again."""
    done = linked(pair, draw_chunks(random.Random(3)), named_policy("legolink-4"))
    image, draw = done.image, random.Random(1)
    before = image.context  # type: ignore[attr-defined]
    tokens = [draw.randrange(3, tiny.VOCAB) for _ in range(before.num_cells)]
    first = [image.append(token) for token in tokens]
    assert image.num_tokens == image.layout.num_tokens + len(tokens)
    assert image.context is not before  # type: ignore[attr-defined]
    image.rewind()
    again = [image.append(token) for token in tokens[:40]]
    assert max(float((a - b).abs().max()) for a, b in zip(first, again, strict=False)) <= pair.tolerance


def test_objects_of_chunks_have_the_same_bytes_each_time(pair: Pair) -> None:
    chunks = draw_chunks(random.Random(11))
    before = [done.path.read_bytes() for done in compile(pair.model, pair.store, chunks)]
    again = compile(pair.model, pair.store, chunks, force=True)
    assert [done.path.read_bytes() for done in again] == before

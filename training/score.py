"""Whole-answer scores by question kind, on prompts that were never trained on. Quick form, for training logs.

The committed scores come from the package itself (`training/evaluate.py`): compile, link, generate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from training.data import Batch, Encoder
from training.network import forward
from training.world.generate import PageShape

HELD_OUT = "held-out"  # seeds of training begin with "train-", of the tokenizer with "tokenizer"


@torch.no_grad()
def score(
    model: Any, encoder: Encoder, pages: int, prompts: int, shape: PageShape = PageShape(), p_bos: float = 1.0
) -> dict[str, float]:
    """Share of whole answers that are right under full attention, by kind (every token the most likely one)."""
    kinds = encoder.kinds
    right, asked = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    encoder.restated = 0.0
    for index in range(0, prompts, 8):
        batch = encoder.batch(random.Random(f"{HELD_OUT}-{pages}-{index}"), 8, pages, shape, 24, p_bos)
        for kind, is_right in answers(model, batch):
            asked[kinds[kind]] += 1
            right[kinds[kind]] += is_right
    return {kind: round(right[kind] / asked[kind], 3) for kind in kinds if asked[kind]}


@torch.no_grad()
def answers(model: Any, batch: Batch) -> Iterator[tuple[int, bool]]:
    """Each question's kind, and whether its whole answer is right."""
    where = batch.kinds[:, 1:] >= 0
    hit = torch.ones(batch.tokens.shape, dtype=torch.bool)
    hit[:, 1:][where] = forward(model, batch, where)[0].argmax(-1) == batch.tokens[:, 1:][where]
    for row in range(len(batch.tokens)):
        for question in range(1, int(batch.blocks[row].max()) + 1):
            cells = (batch.blocks[row] == question) & (batch.kinds[row] >= 0)
            yield int(batch.kinds[row][cells][0]), bool(hit[row][cells].all())

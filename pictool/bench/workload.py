"""Random documents and queries of an exact number of tokens, whose texts give these tokens again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pictool.core import Chunk
from pictool.errors import InputError
from pictool.linker.grid import Labelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pictool.runtime.model import Model

_TRIES = 100  # texts whose cut end does not give its tokens again are drawn anew
_MOST_WORDS = 2000
_TAIL = 1 << 32  # keeps the seeds of tails apart from those of chunks


def random_chunks(model: Model, count: int, tokens: int, seed: int = 0) -> list[Chunk]:
    """Different chunks of random words, each of exactly `tokens` tokens.

    Raises:
        InputError: no tokens, or a tokenizer that gives no text its tokens again.
    """
    texts = (random_text(model, tokens, [seed, index]) for index in range(count))
    return [Chunk(text, model.encode(text), f"random {index}") for index, text in enumerate(texts)]


def random_tail(model: Model, tokens: int, seed: int = 0) -> str:
    """A text of exactly `tokens` tokens.

    Raises:
        InputError: as of `random_chunks`.
    """
    return random_text(model, tokens, [seed, _TAIL])


def random_text(model: Model, tokens: int, seed: Sequence[int]) -> str:
    """A text of random words that has exactly `tokens` tokens, without special ones.

    Raises:
        InputError: as of `random_chunks`.
    """
    if tokens < 1:
        raise InputError(f"a random text of {tokens} tokens: must have 1 or more")
    known, draw = words(model.tokenizer), np.random.default_rng(list(seed))
    for _ in range(_TRIES):
        text = " ".join(draw.choice(known, tokens))  # a word has one token or more
        ids = model.encode(text)[:tokens]
        cut = str(model.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if len(ids) == tokens and model.encode(cut) == ids:
            return cut
    raise InputError(f"{model.name}: its tokenizer gives no random text of {tokens} tokens; use --shape")


@lru_cache(maxsize=8)
def words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The first words of this tokenizer that are one token behind a space, or else single letters."""
    found: dict[str, None] = {}
    for token in range(len(tokenizer)):
        piece = str(tokenizer.decode([token])).strip()
        if re.fullmatch("[A-Za-z]+", piece) and len(tokenizer.encode(" " + piece, add_special_tokens=False)) == 1:
            found[piece] = None
        if len(found) == _MOST_WORDS:
            break
    return list(found) or list("abcdefghijklmnopqrstuvwxyz")


def with_speculative(policies: Sequence[Labelled], spec_dir: str) -> list[Labelled]:
    """The same policies; those that need a small model and name none get that of `spec_dir`."""
    return [replace(labelled, policy=labelled.policy.with_default_model(spec_dir)) for labelled in policies]


def needs_speculative(policies: Sequence[Labelled]) -> bool:
    """Whether `with_speculative` would change something that is used."""
    return any(labelled.policy.needs.model_field and not labelled.policy.second_model for labelled in policies)


def require_positions(model: Model, tokens: int, remedy: str) -> None:
    """Refuse a prompt before anything is compiled for it.

    Raises:
        InputError: the model takes fewer positions.
    """
    if tokens > model.max_positions:
        raise InputError(
            f"a prompt of {tokens} tokens, but {model.name} takes {model.max_positions} positions; use {remedy}"
        )


def require_disk(directory: Path, num_bytes: int) -> None:
    """Refuse to fill a disk.

    Raises:
        InputError: less is free than `num_bytes`.
    """
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise InputError(
            f"{directory}: {num_bytes / 1e9:.1f} GB of objects, but {free / 1e9:.1f} GB are free; "
            "use --store on another disk, or a smaller workload"
        )

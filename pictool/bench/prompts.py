"""Random prompts of an exact number of tokens, with the objects that policies reuse of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pictool.bench.options import PromptOptions
from pictool.compiler.compile import CODEC, compile_chunks
from pictool.core import Chunk
from pictool.errors import InputError
from pictool.linker.grid import LabelledPolicy
from pictool.linker.policies import object_kinds
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.store.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pictool.runtime.model import Model

_TRIES = 100  # a text that is cut and does not give its tokens again is drawn anew
_MOST_WORDS = 2000
_TAIL = 1 << 32  # keeps the seeds of tails apart from those of chunks


@dataclass(frozen=True)
class BenchPrompt:
    """Documents, whose objects are in the store, and a tail; there is no head."""

    store: Store
    chunks: tuple[Chunk, ...]
    tail: str

    def ids(self, model: Model) -> list[int]:
        """The tokens of the whole prompt."""
        return [*(token for chunk in self.chunks for token in chunk.tokens), *model.encode(self.tail)]

    def spec(self, policy: Policy) -> Spec:
        return Spec.raw(self.chunks, self.tail, policy)


def make_prompt(
    model: Model, policies: Sequence[LabelledPolicy], options: PromptOptions, directory: Path
) -> BenchPrompt:
    """The random prompt of the options; its objects are compiled into a store in `directory`.

    Raises:
        InputError: a prompt that is too long for the model, or no room for the objects.
    """
    require_positions(model, options.num_tokens, "fewer --chunks or --chunk-tokens")
    chunks = random_chunks(model, options.chunks, options.chunk_tokens, options.seed)
    tail = random_tail(model, options.tail_tokens, options.seed)
    prompt = BenchPrompt(Store(directory / "objects"), tuple(chunks), tail)
    compile_for(model, prompt.store, chunks, policies)
    return prompt


def compile_for(model: Model, store: Store, chunks: Sequence[Chunk], policies: Sequence[LabelledPolicy]) -> None:
    """Put the objects into the store that these policies reuse, so that no link that is measured compiles.

    Raises:
        InputError: they do not fit on its disk.
    """
    kinds = object_kinds([labelled.policy for labelled in policies], CODEC)
    store.root.mkdir(parents=True, exist_ok=True)
    require_disk(store.root, len(kinds) * sum(map(len, chunks)) * model.token_bytes)
    for kind in kinds:
        compile_chunks(model, store, chunks, kind)


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
    """A text of random words that has exactly `tokens` tokens, without special ones. Encoding it gives them again.

    Raises:
        InputError: as of `random_chunks`.
    """
    if tokens < 1:
        raise InputError(f"a random text of {tokens} tokens: must have at least 1")
    vocabulary, draw = words(model.tokenizer), np.random.default_rng(list(seed))
    for _ in range(_TRIES):
        text = " ".join(draw.choice(vocabulary, tokens))  # a word has one token or more
        ids = model.encode(text)[:tokens]
        cut = str(model.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if len(ids) == tokens and model.encode(cut) == ids:
            return cut
    raise InputError(f"{model.name}: its tokenizer cannot produce a random text of {tokens} tokens; use --shape")


@lru_cache(maxsize=8)
def words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The first words of this tokenizer that are one token after a space, or else single letters."""
    known: dict[str, None] = {}
    for token in range(len(tokenizer)):
        piece = str(tokenizer.decode([token])).strip()
        if re.fullmatch("[A-Za-z]+", piece) and len(tokenizer.encode(" " + piece, add_special_tokens=False)) == 1:
            known[piece] = None
        if len(known) == _MOST_WORDS:
            break
    return list(known) or list("abcdefghijklmnopqrstuvwxyz")


def with_speculative(policies: Sequence[LabelledPolicy], spec_dir: str) -> list[LabelledPolicy]:
    """The same policies; those that need a second model and name none get the one in `spec_dir`."""
    return [replace(labelled, policy=labelled.policy.with_default_model(spec_dir)) for labelled in policies]


def needs_speculative(policies: Sequence[LabelledPolicy]) -> bool:
    """Whether a policy needs a second model and names none, so that `with_speculative` changes it."""
    return any(labelled.policy.needs.model_field and not labelled.policy.second_model for labelled in policies)


def require_positions(model: Model, tokens: int, remedy: str) -> None:
    """Refuse a prompt before anything is compiled for it.

    Raises:
        InputError: the model takes fewer positions.
    """
    if tokens > model.max_positions:
        raise InputError(
            f"a prompt of {tokens} tokens, but {model.name} has {model.max_positions} positions; use {remedy}"
        )


def require_disk(directory: Path, num_bytes: int) -> None:
    """Refuse to fill a disk.

    Raises:
        InputError: less is free than `num_bytes`.
    """
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise InputError(
            f"{directory}: {num_bytes / 1e9:.1f} GB of objects, but only {free / 1e9:.1f} GB are free; "
            "use --store on another disk, or a smaller workload"
        )

"""Answers that are JSON values of a schema: which tokens may come next, by llguidance (the extra `structured`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pictool.core import AnswerFormat
from pictool.errors import InputError
from pictool.runtime.chat.schemas import grammar_of, refused

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class CompiledFormat(AnswerFormat):
    """An answer format with the matcher of its schema, at its beginning."""

    matcher: Any = field(default=None, compare=False, repr=False)


def compiled(model: Model, answer_format: AnswerFormat) -> AnswerFormat:
    """An answer format whose schema, if it has one, is compiled here and not on the thread that computes answers.

    Raises:
        InputError: llguidance does not follow it; or the tokenizer is not one of `tokenizers`.
    """
    if answer_format.schema is None or isinstance(answer_format, CompiledFormat):
        return answer_format
    matcher = _matcher(model.tokenizer, model.config.vocab_size, model.eos_ids, answer_format.schema)
    return CompiledFormat(**vars(answer_format), matcher=matcher)


class Grammar:
    """The tokens that an answer may go on with, so that it is a JSON value of a schema.

    Raises:
        InputError: as `compiled`.
    """

    def __init__(self, model: Model, answer_format: AnswerFormat) -> None:
        format_ = compiled(model, answer_format)
        assert isinstance(format_, CompiledFormat), "it has no schema"
        self._matcher = format_.matcher.deep_copy()

    def masked(self, logits: Tensor) -> Tensor:
        """The logits [vocabulary] with minus infinity where a token may not come next."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        self._require()
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        known = min(len(bits), len(logits))
        allowed[:known] = torch.from_numpy(bits[:known].astype(bool))
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))

    def push(self, token: int) -> None:
        """Go on with a token, one that may come next."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._require()

    def _require(self) -> None:
        if self._matcher.is_error():
            raise refused(self._matcher.get_error())


@lru_cache(8)
def _matcher(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int], schema: str) -> Any:
    """The matcher of a schema, to be copied."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_tokenizer(tokenizer, vocab_size, eos_ids), grammar_of(schema), log_level=0)
    if matcher.is_error():
        raise refused(matcher.get_error())
    return matcher


@lru_cache(4)
def _tokenizer(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """The tokenizer as llguidance has it, which takes a second for a large one."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except ValueError as error:
        raise InputError(f"unsupported schema: {error}") from error

"""Decoding: greedy or sampled, with stop strings, over a growing image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from pictool.core import Sampling as Sampling
from pictool.errors import InputError
from pictool.runtime.image import Image
from pictool.runtime.support import rope_switch
from pictool.runtime.tensors import require_finite

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Generated:
    """An answer: its text and the ids of all generated tokens, an end token included.

    `logprobs` are theirs under the model's own distribution (temperature 1), in nats.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class _Chooser:
    def __init__(self, sampling: Sampling) -> None:
        self._greedy = sampling.temperature == 0
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor) -> int:
        if self._greedy:
            return int(logits.argmax())
        scores = self._warpers(None, logits[None].cpu())
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=self._generator))


class TextStream:
    """Turns tokens into text as it becomes certain: whole characters, and nothing that may be part of a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self.text = ""
        self.is_stopped = False
        self._shown = 0

    def push(self, token: int) -> str:
        """Add a token; returns the text that has become certain."""
        self._tokens.append(token)
        self.text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        if starts := [start for stop in self._stop if (start := self.text.find(stop)) >= 0]:
            self.text, self.is_stopped = self.text[: min(starts)], True
            return self._show(len(self.text))
        return self._show(len(self.text) - self._uncertain())

    def finish(self) -> str:
        """The rest of the text."""
        return self._show(len(self.text))

    def _uncertain(self) -> int:
        """Characters at the end that the next token may change (an incomplete character) or turn into a stop string."""
        if self.text.endswith("\ufffd"):
            return len(self.text) - len(self.text.rstrip("\ufffd"))
        lengths = (n for stop in self._stop for n in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:n]))
        return max(lengths, default=0)

    def _show(self, end: int) -> str:
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new


def generate(
    model: Model,
    image: Image,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Continue a linked prompt. The image grows by the generated tokens.

    Args:
        on_text: called with each piece of the answer as soon as it is certain.

    Raises:
        ModelError: logits that are not finite.
        InputError: the prompt and `max_new_tokens` cross the length at which long RoPE changes its frequencies.
    """
    _require_same_rope(model, image, max_new_tokens)
    stream = TextStream(model.tokenizer, sampling.stop)
    tokens, logprobs = [], []
    show = on_text or (lambda _: None)
    for token, logprob in _tokens(model, image, max_new_tokens, _Chooser(sampling)):
        tokens.append(token)
        logprobs.append(logprob)
        show(stream.push(token))
        if stream.is_stopped:
            break
    show(stream.finish())
    return Generated(stream.text, tuple(tokens), tuple(logprobs))


def _tokens(model: Model, image: Image, max_new_tokens: int, choose: _Chooser) -> Iterator[tuple[int, float]]:
    """Tokens and their log-probabilities."""
    assert image.logits is not None, "the image is not linked"
    token = choose(image.logits)
    yield token, _logprob(image.logits, token)
    for _ in range(min(max_new_tokens - 1, model.max_positions - image.num_tokens)):
        if token in model.eos_ids:
            return
        logits = image.append(token)
        require_finite(model.name, model.dtype, logits)
        token = choose(logits)
        yield token, _logprob(logits, token)


def _logprob(logits: Tensor, token: int) -> float:
    return float(logits[token] - logits.logsumexp(-1))


def _require_same_rope(model: Model, image: Image, max_new_tokens: int) -> None:
    switch = rope_switch(model.config)
    end = image.num_tokens + max_new_tokens
    if switch is not None and image.num_tokens <= switch < end - 1:
        raise InputError(
            f"the prompt ({image.num_tokens} tokens) and {max_new_tokens} new tokens cross {switch}, where the model's "
            f"RoPE changes every key; use --max-new-tokens {max(1, switch - image.num_tokens)} at most"
        )

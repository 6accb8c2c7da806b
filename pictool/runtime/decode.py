"""Decoding: greedy or sampled, with stop strings, over a growing image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


@dataclass(frozen=True)
class Step:
    """One generated token. `text` has become certain with it; the last step of an answer, `token` -1, has the rest.

    `logprob` and `top`, the most likely tokens with theirs, are of the model's own distribution, in nats. The last step
    says whether the answer `is_complete`: it ended with an end token or at a stop string.
    """

    token: int
    text: str
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    is_complete: bool = False


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
    steps = []
    for step in generate_steps(model, image, max_new_tokens, sampling):
        steps.append(step)
        if on_text is not None:
            on_text(step.text)
    return generated_of(steps)


def generate_steps(
    model: Model, image: Image, max_new_tokens: int, sampling: Sampling = Sampling(), num_top: int = 0
) -> Iterator[Step]:
    """As `generate`, a step at a time: the caller may do other work between two steps, or go no further.

    Args:
        num_top: how many of the most likely tokens each step has.
    """
    _require_same_rope(model, image, max_new_tokens)
    stream, token = TextStream(model.tokenizer, sampling.stop), -1
    for token, logits in _tokens(model, image, max_new_tokens, _Chooser(sampling)):
        text = stream.push(token)
        yield Step(token, text, *_logprobs(logits, token, num_top))
        if stream.is_stopped:
            break
    yield Step(-1, stream.finish(), is_complete=stream.is_stopped or token in model.eos_ids)


def generated_of(steps: Sequence[Step]) -> Generated:
    """The whole of an answer's steps."""
    *tokens, _ = steps
    text = "".join(step.text for step in steps)
    return Generated(text, tuple(step.token for step in tokens), tuple(step.logprob for step in tokens))


def _tokens(model: Model, image: Image, max_new_tokens: int, choose: _Chooser) -> Iterator[tuple[int, Tensor]]:
    """Tokens and the logits that they were chosen by."""
    assert image.logits is not None, "the image is not linked"
    token = choose(image.logits)
    yield token, image.logits
    for _ in range(min(max_new_tokens - 1, model.max_positions - image.num_tokens)):
        if token in model.eos_ids:
            return
        logits = image.append(token)
        require_finite(model.name, model.dtype, logits)
        token = choose(logits)
        yield token, logits


def _logprobs(logits: Tensor, token: int, num_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of a token, and the most likely ones with theirs."""
    total = logits.logsumexp(-1)
    own = float(logits[token] - total)
    if not num_top:
        return own, ()
    values, ids = logits.topk(min(num_top, len(logits)))
    return own, tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))


def _require_same_rope(model: Model, image: Image, max_new_tokens: int) -> None:
    switch = rope_switch(model.config)
    end = image.num_tokens + max_new_tokens
    if switch is not None and image.num_tokens <= switch < end - 1:
        raise InputError(
            f"the prompt ({image.num_tokens} tokens) and {max_new_tokens} new tokens cross {switch}, where the model's "
            f"RoPE changes every key; use --max-new-tokens {max(1, switch - image.num_tokens)} at most"
        )

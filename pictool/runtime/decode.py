"""Decoding: greedy or sampled, with stop strings, over a growing image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from pictool.core import AnswerFormat
from pictool.core import Sampling as Sampling
from pictool.errors import InputError
from pictool.runtime import turns
from pictool.runtime.chat.grammar import Grammar
from pictool.runtime.memory.image import Image
from pictool.runtime.support import rope_switch
from pictool.runtime.tensors import require_finite

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pictool.runtime.model import Model


_NO_TOKENS = torch.empty(1, 0, dtype=torch.long)
_KEPT_TOKENS = 32  # of an answer, at least, that are decoded again with the next one


@dataclass(frozen=True)
class Generated:
    """An answer: its text and the ids of all generated tokens, an end token included.

    `logprobs` are theirs under the model's own distribution (temperature 1), in nats. `is_complete`: it ended with an
    end token or at a stop string, and was not cut.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_complete: bool = True


class _Chooser:
    def __init__(self, sampling: Sampling, grammar: Grammar | None = None) -> None:
        self._greedy, self._grammar = sampling.temperature == 0, grammar
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._penalties, self._counts = (sampling.frequency_penalty, sampling.presence_penalty), Counter[int]()
        self._biases, self._warpers = LogitsProcessorList(), LogitsProcessorList()
        if sampling.logit_bias:
            self._biases.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor) -> int:
        logits = self._biased(logits)
        token = self._choose(logits if self._grammar is None else self._grammar.masked(logits))
        if self._grammar is not None:
            self._grammar.push(token)
        self._counts[token] += 1
        return token

    def _biased(self, logits: Tensor) -> Tensor:
        """The logits [vocabulary] with biases, and penalties of the chosen tokens (OpenAI's API reference)."""
        if self._biases:
            logits = self._biases(_NO_TOKENS, logits[None].cpu())[0]
        if any(self._penalties) and self._counts:
            frequency, presence = self._penalties
            lowered = [frequency * count + presence for count in self._counts.values()]
            logits = logits.index_add(
                0, torch.tensor([*self._counts], device=logits.device), -logits.new_tensor(lowered)
            )  # fmt: skip
        return logits

    def _choose(self, logits: Tensor) -> int:
        if self._greedy:
            return int(logits.argmax())
        scores = self._warpers(None, logits[None].cpu())
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=self._generator))


@dataclass(frozen=True)
class Step:
    """One generated token. `text` has become certain with it; the last step of an answer, `token` -1, has the rest.

    `logprob` and `top`, the most likely tokens with theirs, are of the model's own distribution, in nats. The last step
    says whether the answer `is_complete`: it ended with an end token or at a stop string, `stop`.
    """

    token: int
    text: str
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    is_complete: bool = False
    stop: str | None = None


class _StopSearch:
    """Searches text that comes in pieces for a stop string; each character costs the same (Knuth, Morris, Pratt).

    Attributes:
        num_matched: characters of it that the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text, self.num_matched = text, 0
        self._borders = [0]  # of text[: i + 1]: characters of its longest proper prefix that it ends with
        for char in text[1:]:
            self._borders.append(self._longer(self._borders[-1], char))

    def push(self, char: str) -> bool:
        """Add a character of the text; True if it completes the stop string."""
        self.num_matched = self._longer(self.num_matched, char)
        return self.num_matched == len(self.text)

    def _longer(self, matched: int, char: str) -> int:
        """Characters that are matched once `char` follows `matched` of them."""
        while matched and self.text[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == char)


class TextStream:
    """Turns tokens into text as it becomes certain: whole characters, and nothing that may be part of a stop string.

    A token costs the same however many came before it, and however long the stop strings are.

    Attributes:
        stop: the stop string that ended the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = (), keeps_special: bool = False
    ) -> None:
        self._tokenizer, self._stops = tokenizer, [_StopSearch(text) for text in stop]
        self._skips_special = not keeps_special
        self.stop: str | None = None
        self._tokens = list[int]()  # the last ones
        self._before = self._text = ""  # text that precedes theirs; both, without what was shown and is not needed
        self._shown = self._searched = 0  # characters of `_text`
        self._pieces: list[str] = []

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    @property
    def text(self) -> str:
        """All text that has become certain."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Add a token; returns the text that has become certain."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        searched, self._text = self._text[: self._searched], self._before + self._decode(self._tokens)
        if not self._text.startswith(searched):  # the token changed what precedes it, as a blank
            self._searched = min(self._shown, len(self._text))
            for search in self._stops:
                search.num_matched = 0
        certain = len(self._text.rstrip("\ufffd"))  # the next token may complete a character
        for end in range(self._searched, certain) if self._stops else ():
            found = [search.text for search in self._stops if search.push(self._text[end])]
            if found:
                self.stop = max(found, key=len)
                self._text = self._text[: end + 1 - len(self.stop)]
                return self.finish()
        self._searched = certain
        new = self._show(certain - max((search.num_matched for search in self._stops), default=0))
        self._forget()
        return new

    def finish(self) -> str:
        """The rest of the text."""
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        self._pieces.append(self._text[self._shown : end])
        self._shown = max(self._shown, end)
        return self._pieces[-1]

    def _forget(self) -> None:
        """Drop tokens that the text of the last ones does not depend on, and text that was shown."""
        if len(self._tokens) >= 2 * _KEPT_TOKENS:
            tokens = self._tokens[-_KEPT_TOKENS:]
            text = self._decode(tokens)
            if self._text.endswith(text):
                self._tokens, self._before = tokens, self._text[: len(self._text) - len(text)]
        if drop := min(len(self._before), self._shown, self._searched):
            self._before, self._text = self._before[drop:], self._text[drop:]
            self._shown, self._searched = self._shown - drop, self._searched - drop

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skips_special))


def generate(
    model: Model,
    image: Image,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    on_text: Callable[[str], None] | None = None,
    answer_format: AnswerFormat = AnswerFormat(),
) -> Generated:
    """Continue a linked prompt. The image grows by the generated tokens.

    Args:
        on_text: called with each piece of the answer as soon as it is certain.

    Raises:
        ModelError: logits that are not finite.
        InputError: the prompt and `max_new_tokens` cross the length at which long RoPE changes its frequencies.
    """
    steps = []
    for step in generate_steps(model, image, max_new_tokens, sampling, answer_format=answer_format):
        steps.append(step)
        if on_text is not None:
            on_text(step.text)
    return generated_of(steps)


def generate_steps(
    model: Model, image: Image, max_new_tokens: int, sampling: Sampling = Sampling(), num_top: int = 0,
    answer_format: AnswerFormat = AnswerFormat(),
) -> Iterator[Step]:  # fmt: skip
    """As `generate`, a step at a time: the caller may do other work between two steps, or go no further.

    Args:
        num_top: how many of the most likely tokens each step has.
    """
    _require_same_rope(model, image, max_new_tokens)
    stream, token = TextStream(model.tokenizer, sampling.stop, answer_format.keeps_special), -1
    grammar = None if answer_format.schema is None else Grammar(model, answer_format)
    turns.checkpoint("step")
    for token, logits in _tokens(model, image, max_new_tokens, _Chooser(sampling, grammar)):
        text = "" if answer_format.keeps_special and token in model.eos_ids else stream.push(token)
        yield Step(token, text, *_logprobs(logits, token, num_top))
        turns.checkpoint("step")
        if stream.is_stopped:
            break
    yield Step(-1, stream.finish(), is_complete=stream.is_stopped or token in model.eos_ids, stop=stream.stop)


def forced_logits(image: Image, tokens: Sequence[int]) -> Iterator[Tensor]:
    """The logits by which each token of a given answer would be chosen (teacher forcing), float32 [vocab] each.

    The image is rewound first, and has grown by all tokens but the last one after it.
    """
    image.rewind()
    assert image.logits is not None, "the image is not linked"
    yield image.logits
    for token in tokens[:-1]:
        yield image.append(token)


def generated_of(steps: Sequence[Step]) -> Generated:
    """The whole of an answer's steps."""
    *tokens, last = steps
    text, logprobs = "".join(step.text for step in steps), tuple(step.logprob for step in tokens)
    return Generated(text, tuple(step.token for step in tokens), logprobs, last.is_complete)


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
            f"RoPE changes every key; use at most --max-new-tokens {max(1, switch - image.num_tokens)}"
        )

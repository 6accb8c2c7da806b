"""Linear layers over the layout of a batch: the documents first, then every question from the state at their end.

A state is read from left to right, so in one pass over a row its second question would start from the first one. The
mixer of each linear layer is `transformers`' own and runs twice: over the documents, whose padding is moved to their
left and masked, so that states and the windows of convolutions stay zero over it; and over the questions side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pictool.core import StateShape
from pictool.runtime.architectures import geometry_of, mixer_of
from pictool.runtime.memory.caches import StatefulCache
from pictool.runtime.memory.states import LinearState
from training.data import PADDING, Batch

_CHUNK = 32  # tokens that a rule takes at once, at most: small states are cheaper in small chunks


@dataclass(frozen=True)
class Spans:
    """Where documents and questions are in the flattened cells of a batch, int64; one cell more is zero.

    Fields:
        docs: [rows, num_docs], to the right; is_doc: which of these are no padding.
        asks: [questions, length of the longest], to the left; of_row: [questions], the row of each.
        back: [rows * length], where a cell is among the documents', then the questions' outputs, and then a zero.
        tokens: [rows, length], of the batch.
    """

    docs: Tensor
    is_doc: Tensor
    asks: Tensor
    of_row: Tensor
    back: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Spans:
        rows, length = batch.blocks.shape
        cells = torch.arange(rows * length).view(rows, length)
        shift = (batch.blocks[:, : batch.num_docs] == PADDING).sum(1, keepdim=True)
        from_column = torch.arange(batch.num_docs) - shift
        is_doc = from_column >= 0
        docs = cells.gather(1, from_column.clamp(min=0))
        named = [
            cells[row][of == block] for row, of in enumerate(batch.blocks) for block in range(1, int(of.max()) + 1)
        ]
        asks = torch.nn.utils.rnn.pad_sequence(named, batch_first=True, padding_value=rows * length)
        joined = torch.cat([docs.masked_fill(~is_doc, rows * length).flatten(), asks.flatten()])
        back = torch.full((rows * length + 1,), len(joined)).scatter(0, joined, torch.arange(len(joined)))[:-1]
        return cls(docs, is_doc, asks, torch.tensor([int(one[0]) // length for one in named]), back, batch.tokens)


class _Differentiable(StatefulCache):
    """A cache that is replaced and not written to, so that gradients pass through states."""

    def update_conv_state(self, inputs: Tensor, layer_idx: int, **_: Any) -> Tensor:
        states = self.layers[layer_idx].conv_states
        seen = torch.cat([states[0], inputs], -1)
        states[0] = seen[..., -states[0].shape[-1] :]
        return seen

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> Tensor:
        self.layers[layer_idx].recurrent_states[0] = state
        return state


def read_batches(model: Any) -> None:
    """Let the linear layers of a hybrid read the layout of batches, when `spans` are passed to its decoder."""
    shape = geometry_of(model.config).states
    assert shape is not None
    for index, layer in enumerate(model.model.layers):
        if (mixer := mixer_of(layer)) is not None:
            mixer.forward = partial(_over_spans, mixer, mixer.forward, index, shape, model.get_input_embeddings())


def _over_spans(
    mixer: Any, run: Any, layer: int, shape: StateShape, embedding: Any, hidden_states: Tensor,
    spans: Spans | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """A mixer's output [rows, length, hidden] over a batch; without spans its own forward."""
    if spans is None:
        out: Tensor = run(hidden_states=hidden_states, **more)
        return out
    flat = torch.cat([hidden_states.flatten(0, 1), hidden_states.new_zeros(1, hidden_states.shape[-1])])
    zero = LinearState.zero(shape, hidden_states)
    start = _repeated(zero, torch.zeros(len(spans.docs), dtype=torch.int64))
    docs, end = _run(mixer, run, layer, start, flat[spans.docs], spans.is_doc)
    asks, _ = _run(mixer, run, layer, _repeated(end, spans.of_row), flat[spans.asks], None)
    outputs = torch.cat([docs.flatten(0, 1), asks.flatten(0, 1), flat[-1:]])[spans.back].view(hidden_states.shape)
    for hint in more["hints"]:
        if hint.layer == layer:
            more["hint_losses"].append(_hint_loss(outputs, embedding.weight, spans.tokens, hint.cells))
    return outputs


def _hint_loss(outputs: Tensor, embedding: Tensor, tokens: Tensor, cells: Tensor) -> Tensor:
    """Cross-entropy of the tokens that outputs, read as embeddings, name, with those that attention would look at."""
    row, at, target = cells.T
    named = F.rms_norm(outputs[row, at], outputs.shape[-1:])
    return F.cross_entropy(named @ embedding.T, tokens[row, target])


def _repeated(state: LinearState, of: Tensor) -> LinearState:
    assert state.recurrent is not None
    return LinearState(state.tail[of], state.recurrent[of])


def _run(
    mixer: Any, run: Any, layer: int, start: LinearState, inputs: Tensor, mask: Tensor | None
) -> tuple[Tensor, LinearState]:
    """A mixer's output over inputs [batch, n, hidden] from a state, and the state after it."""
    cache = _Differentiable(None, layer, start)
    more: dict[str, Any] = {"chunk_size": min(_CHUNK, inputs.shape[1])}
    if hasattr(mixer, "chunk_size"):  # Mamba2's own; a delta rule takes an argument
        mixer.chunk_size = more.pop("chunk_size")
    return run(hidden_states=inputs, cache_params=cache, attention_mask=mask, **more), cache.state

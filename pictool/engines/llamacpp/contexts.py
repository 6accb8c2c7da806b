"""Contexts of llama.cpp over one model's weights, of which a few wait for the next prompt."""

from __future__ import annotations

import torch

from pictool.engines.llamacpp.library import MAX_SEQUENCES, LlamaContext, LlamaContextOptions, Weights
from pictool.engines.llamacpp.state import StateFormat
from pictool.engines.llamacpp.trial import Facts

_IDLE = 2  # contexts that are kept for the next link
_FEWEST_SEQUENCES = 16


class Contexts:
    """Contexts over one model's weights; a few idle ones wait for the next prompt.

    Attributes:
        device, dtype, num_layers, format: of the KV of objects. facts: of the file.
    """

    def __init__(self, weights: Weights, options: LlamaContextOptions, form: StateFormat, facts: Facts) -> None:
        self._weights, self._options, self.format, self.facts = weights, options, form, facts
        self._idle: list[LlamaContext] = []
        self.geometry, self.num_layers = form.geometry, form.geometry.layers
        self.device, self.dtype = torch.device("cpu"), getattr(torch, options.dtype)

    def take(self, num_cells: int, num_sequences: int) -> LlamaContext:
        """An empty context with so much room. Raises ModelError: there is no memory for it."""
        threads = torch.get_num_threads()
        fitting = [c for c in self._idle if c.num_cells >= num_cells and c.num_sequences >= num_sequences]
        if fitting:
            context = min(fitting, key=lambda context: context.num_cells)
            self._idle.remove(context)
            context.set_threads(threads)
            return context
        sequences = min(MAX_SEQUENCES, max(_FEWEST_SEQUENCES, 1 << (num_sequences - 1).bit_length()))
        return LlamaContext(self._weights, self._options, num_cells, sequences, threads)

    def give_back(self, context: LlamaContext) -> None:
        """The context is not used any more."""
        context.clear()
        self._idle.append(context)
        for old in self._idle[:-_IDLE]:
            old.close()
        del self._idle[:-_IDLE]

    def rotation_id(self, _: int) -> str:
        """See `LayerStack.rotation_id`: no rotation depends on the length of a prompt."""
        return ""

    def is_length_dependent(self, *_: int) -> bool:
        return False

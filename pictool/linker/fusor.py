"""The fusor (CacheBlend §5.1): computes the rows that a policy selects, layer by layer, over the KV that is loaded."""

from __future__ import annotations

import numpy as np
import torch

from pictool.core import RowMask
from pictool.linker.narrowing import Narrowing
from pictool.linker.policies.base import Prompt, Scores
from pictool.runtime.attention import Rows
from pictool.runtime.memory.image import Image
from pictool.runtime.tensors import require_finite, to_device


def always_computed(prompt: Prompt, required: RowMask | None) -> RowMask:
    """bool [n]: the tail, what no object has (`required` [N]), a head whose rotation depends on the prompt's length."""
    layout, always = prompt.layout, np.zeros(prompt.layout.num_tokens, dtype=bool)
    always[layout.tail[0] :] = True
    if required is not None:
        always[: layout.num_context] |= required
    if prompt.model.stack.is_length_dependent(layout.head[1], layout.num_tokens):
        always[: layout.head[1]] = True
    return always


class Fusor:
    """One link's way through the layers.

    Args:
        required: bool [N], the rows of which nothing is cached.

    Attributes:
        rows: bool [layers, n], whose K and V were computed at each layer that has some.
    """

    def __init__(self, image: Image, narrowing: Narrowing, required: RowMask | None = None) -> None:
        self._image, self._narrowing, self._required = image, narrowing, required
        prompt, self._checked = narrowing.prompt, narrowing.policy.check_layers(image.stack.num_layers)
        self.rows = np.zeros((image.stack.geometry.layers, prompt.layout.num_tokens), dtype=bool)
        self._rows = _rows_of(narrowing.on, image)
        tokens = torch.from_numpy(prompt.layout.tokens[narrowing.on].astype(np.int64)).to(image.stack.device)
        self._hidden = image.stack.embed(tokens[None])

    @property
    def scores(self) -> Scores | None:
        """float32 [n], what the policy chose by, or None; 0 where it has none."""
        return self._narrowing.scores

    def prefill_layer(self, layer: int) -> None:
        """Compute one layer; cached K and V of the other rows are in the image already.

        Of the last layer only K and V are computed, and the prompt's last row.
        """
        if (index := self._image.stack.kv_index[layer]) is not None:
            self.rows[index] = self._narrowing.on
        if layer in self._checked:
            self._narrow(layer)
        if layer == self._image.stack.num_layers - 1:
            self._hidden = self._image.compute_last(self._hidden, self._rows)
        else:
            self._hidden = self._image.compute(layer, self._hidden, self._rows)

    def finish(self) -> None:
        """The logits of the last row. Raises ModelError if they are not finite."""
        model = self._narrowing.prompt.model
        self._image.logits = self._image.stack.logits(self._hidden[0, -1:])[0]
        require_finite(model.name, model.dtype, self._image.logits)

    def _narrow(self, layer: int) -> None:
        """Compare fresh K and V with the cached ones, keep the fresh ones, narrow the rows."""
        key, value = self._image.project(layer, self._hidden, self._rows)
        deviation = self._image.deviation(layer, key, value, self._rows)
        self._image.write(layer, key, value, self._rows)
        of_key, of_value = torch.stack(deviation).cpu().numpy()
        if self._required is not None:  # nothing is cached of these
            none = np.zeros(len(self._narrowing.on), dtype=bool)
            none[: len(self._required)] = self._required
            none = none[self._narrowing.on]
            of_key, of_value = np.where(none, 0, of_key), np.where(none, 0, of_value)
        stay = self._narrowing.narrow(layer, of_key, of_value)
        self._hidden = self._hidden[:, to_device(stay, self._hidden.device)]
        self._rows = _rows_of(self._narrowing.on, self._image)


def _rows_of(mask: RowMask, image: Image) -> Rows:
    return Rows.of(torch.from_numpy(np.flatnonzero(mask))).to(image.stack.device)

"""The fusor (CacheBlend §5.1): computes the rows that a policy selects, layer by layer, over the KV that is loaded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pictool.core import RowMask
from pictool.linker.narrowing import Narrowing, RankedRows
from pictool.linker.policies.base import Prompt, Ranking, Scores
from pictool.runtime.memory.image import Image
from pictool.runtime.rows import DeviceRows, Rows
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

    Attributes:
        rows: bool [layers, n], whose K and V were computed at each layer that has some; whole once it is finished.
        scores: float32 [n], what the policy chose by, or None; 0 where it has none. Whole likewise.
    """

    def __init__(self, image: Image, narrowing: Narrowing) -> None:
        self._image, self._narrowing = image, narrowing
        self._ranked: RankedRows | None = None  # once the device has ranked them
        self._on_device = list[tuple[int, Tensor]]()  # layers whose `rows` are read after the logits, and the positions
        prompt, self._checked = narrowing.prompt, narrowing.policy.check_layers(image.stack.num_layers)
        self.rows = np.zeros((image.stack.geometry.layers, prompt.layout.num_tokens), dtype=bool)
        self.scores: Scores | None = None
        if narrowing.ranking is None:
            self._rows, self._hidden = image.begin(narrowing.on)
        else:
            self._rows, self._hidden = self._begin_ranked(narrowing.ranking)

    def prefill_layer(self, layer: int) -> None:
        """Compute one layer; cached K and V of the other rows are in the image already.

        Of the last layer only K and V are computed, and the prompt's last row.
        """
        if (index := self._image.stack.kv_index[layer]) is not None:
            if self._ranked is None:
                self.rows[index] = self._narrowing.on
            else:
                self._on_device.append((index, self._ranked.positions))
        if layer in self._checked:
            self._narrow(layer)
        if layer == self._image.stack.num_layers - 1:
            self._hidden = self._image.compute_last(self._hidden, self._rows)
        else:
            self._hidden = self._image.compute(layer, self._hidden, self._rows)

    def finish(self) -> None:
        """The logits of the last row. Raises ModelError if they are not finite."""
        model = self._narrowing.prompt.model
        self._image.finish(self._hidden)
        assert self._image.logits is not None
        require_finite(model.name, model.dtype, self._image.logits)
        self.scores = self._narrowing.scores if self._ranked is None else self._ranked.scores.cpu().numpy()
        if self._on_device:
            layers, positions = zip(*self._on_device, strict=True)
            at = torch.cat(positions).cpu().numpy()
            self.rows[np.repeat(layers, [len(each) for each in positions]), at] = True

    def _begin_ranked(self, ranking: Ranking) -> tuple[Rows, Tensor]:
        """The rows that the device chooses of all that are on, and what they begin with."""
        stack, layout = self._image.stack, self._image.layout
        scores = functional.pad(ranking.scores, (0, layout.num_tokens - layout.num_context))
        on = to_device(np.flatnonzero(self._narrowing.on), stack.device)
        of_rows = Ranking(scores[on], ranking.count)
        self._ranked = RankedRows(self._narrowing, of_rows, stack.device)
        self._ranked.scores = scores
        self._ranked.narrow(of_rows)
        tokens = to_device(layout.tokens.astype(np.int64), stack.device)
        return DeviceRows(self._ranked.positions), stack.embed(tokens[self._ranked.positions][None])

    def _narrow(self, layer: int) -> None:
        """Compare fresh K and V with the cached ones, keep the fresh ones, narrow the rows."""
        key, value = self._image.project(layer, self._hidden, self._rows)
        deviation = self._image.deviation(layer, key, value, self._rows)
        self._image.write(layer, key, value, self._rows)
        ranking = self._narrowing.policy.rank(self._narrowing.prompt, layer, *deviation)
        if ranking is None:
            of_key, of_value = torch.stack(deviation).cpu().numpy()
            stay = to_device(self._narrowing.narrow(layer, of_key, of_value), self._hidden.device)
            self._rows = _rows_of(self._narrowing.on, self._image)
        else:
            self._ranked = self._ranked or RankedRows(self._narrowing, ranking, self._hidden.device)
            stay = self._ranked.narrow(ranking)
            self._rows = DeviceRows(self._ranked.positions)
        self._hidden = self._hidden[:, stay]


def _rows_of(mask: RowMask, image: Image) -> Rows:
    return Rows.of(torch.from_numpy(np.flatnonzero(mask))).to(image.stack.device)

"""How much of the context a prompt's tail attends to, over what is stored (ProphetKV's first stage)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pictool.core import RowMask
from pictool.linker.policies.base import Prompt, Scores
from pictool.runtime.memory.image import Image
from pictool.runtime.rows import Rows
from pictool.runtime.tensors import to_device

_MOST_ROWS = 64  # of the tail that are scored, the last ones: the scores of a layer are heads × rows × n numbers


def where_asked(attend: Callable[[], Tensor], may_stay: bool, on_host: bool = True) -> Scores | Tensor:
    """What the tail attends to, on the host, which waits for it; or, if that is not asked for, on the device.

    Args:
        may_stay: whether the host can do without the numbers.
    """
    scores = attend()
    return scores if may_stay and not on_host else scores.cpu().numpy()


def attended_by_tail(image: Image, prompt: Prompt, on: RowMask, wait: Callable[[int], float]) -> Tensor:
    """Compute the rows `on` [n], the tail and what no object has, over what the image holds of the others.

    Their K and V are in the image then, as they are without any row recomputed: what follows replaces them.

    Args:
        wait: called before each layer, until what is stored of it is in the image.

    Returns:
        for each token of the context, the weight that it gets: the highest of the heads, summed over the tail's last
        rows and the layers of each kind of attention, as a share of what the context gets there; the mean of the kinds,
        so that a few layers without a window count as much as many with one. float32 [N], 0 of what is computed anyway.
    """
    layout, stack = prompt.layout, image.stack
    stack.require_attention()
    asking = on.copy()
    asking[: max(layout.tail[0], layout.num_tokens - _MOST_ROWS)] = False
    passes = [_Pass(image, layout.tokens, rows) for rows in (on & ~asking, asking) if rows.any()]
    kinds = {kind: torch.zeros(layout.num_context, device=stack.device) for kind in stack.attention_kinds}

    def add(kind: str, scores: Tensor) -> None:
        kinds[kind].add_(scores[0].softmax(-1).amax(0).sum(0)[: layout.num_context])

    for layer in range(stack.num_layers):
        wait(layer)
        for part in passes[:-1]:
            part.compute(layer)
        passes[-1].compute(layer, partial(add, stack.attention_kinds[layer]))
    shares = [weights / weights.sum().clamp(min=1e-9) for weights in kinds.values()]
    return torch.stack(shares).mean(0).masked_fill(to_device(on[: layout.num_context], stack.device), 0)


class _Pass:
    """Rows on their way through the layers."""

    def __init__(self, image: Image, tokens: np.ndarray, on: RowMask) -> None:
        device, at = image.stack.device, np.flatnonzero(on)
        self._image, self._rows = image, Rows.of(torch.from_numpy(at)).to(device)
        self._hidden = image.stack.embed(to_device(tokens[at].astype(np.int64), device)[None])

    def compute(self, layer: int, on_scores: Callable[[Tensor], None] | None = None) -> None:
        self._hidden = self._image.compute(layer, self._hidden, self._rows, on_scores)

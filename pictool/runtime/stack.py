"""The decoder layers of a model, driven one at a time on chosen rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pictool.runtime.attention import Pass, Run
from pictool.runtime.rope import Rope, Table, identity
from pictool.runtime.support import depends_on_length

if TYPE_CHECKING:
    from pictool.runtime.model import Model

Tables = dict[str | None, Table]


class LayerCache(Protocol):
    """What a decoder layer writes its fresh K and V to, and reads all K and V from (transformers' cache interface)."""

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the rows' un-rotated K and V [batch, kv_heads, rows, head_dim]; return all K (rotated) and V."""
        ...


class LayerStack:
    """Embedding, layers and head of one model. Every tensor has a leading batch dimension."""

    def __init__(self, model: Model) -> None:
        self._module = model.module
        self._decoder = self._module.model
        self.rope = Rope(self._decoder)
        self.num_layers, self.geometry = len(self._decoder.layers), model.geometry
        self.device, self.dtype = torch.device(model.device), model.torch_dtype

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, rows] → hidden states [batch, rows, hidden]."""
        hidden: Tensor = self._decoder.embed_tokens(tokens)
        return hidden

    def tables(self, positions: Tensor) -> Tables:
        """RoPE tables of a prompt's positions, int64 [n] (see `Rope.tables`)."""
        return self.rope.tables(positions, self._like())

    def next_tables(self, positions: Tensor) -> Tables:
        """RoPE tables of positions that continue the prompt (see `Rope.next_tables`)."""
        return self.rope.next_tables(positions, self._like())

    def is_length_dependent(self, length: int, prompt: int) -> bool:
        """Whether the rotation of the first `length` positions is another one in a prompt of `prompt` tokens.

        So it is beyond the switch of long RoPE, and with dynamic scaling. KV of a beginning is then not exact.
        """
        if not length or not depends_on_length(self._module.config):
            return False
        alone = self.tables(torch.arange(length, device=self.device))
        within = self.tables(torch.arange(prompt, device=self.device))
        return any(not torch.equal(alone[kind][i], within[kind][i][:, :length]) for kind in alone for i in (0, 1))

    def rotation_id(self, prompt: int) -> str:
        """What tells how a prompt of `prompt` tokens is rotated, where that depends on its length; else empty.

        Equal ones mean equal frequencies: those show in the tables of any positions but the first.
        """
        if not depends_on_length(self._module.config):
            return ""
        tables = self.tables(torch.arange(max(prompt, 2), device=self.device))
        seen = [one[:, 1].float().cpu().numpy().tobytes() for pair in tables.values() for one in pair]
        return hashlib.sha256(b"".join(seen)).hexdigest()

    def table(self, tables: Tables, layer: int) -> Table:
        """The table that this layer uses."""
        return tables[self.rope.layer_types[layer]]

    @torch.inference_mode()
    def layer(
        self,
        layer: int,
        hidden: Tensor,
        cache: LayerCache,
        tables: Tables,
        runs: tuple[Run, ...],
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Run one decoder layer on rows [batch, rows, hidden]; `tables` are those of the rows' positions.

        Args:
            observe: is given the rows' attention scores (QKᵀ before the softmax), float32 [batch, heads, rows, n];
                -inf where a row does not see.
        """
        table = self.table(tables, layer)
        out: Tensor = self._decoder.layers[layer](
            hidden,
            attention_mask=None,
            position_embeddings=identity(table),
            past_key_values=cache,
            use_cache=True,
            pic=Pass(self.rope, table, runs, observe),
        )
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] of the last layer → logits, float32 [rows, vocab]."""
        logits: Tensor = self._module.lm_head(self._decoder.norm(hidden))
        softcap = getattr(self._module.config, "final_logit_softcapping", None)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits.float()

    def _like(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

"""The decoder layers of a model, run one at a time on chosen rows."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from pictool.core import Geometry
from pictool.runtime import turns
from pictool.runtime.architectures import (
    architecture_of,
    cache_name,
    chunk_of,
    decoder_of,
    has_attention,
    is_linear,
    language_model_of,
    layer_kinds,
    mixer_of,
    require_no_states,
)
from pictool.runtime.attention import Pass, Runs
from pictool.runtime.memory.caches import CountingCache, Projected, ProjectionCache, StatefulCache
from pictool.runtime.rope import Rope, RotaryTable, RotaryTables, identity_table, joined_tables, tables_at
from pictool.runtime.support import depends_on_length

if TYPE_CHECKING:
    from pictool.runtime.memory.caches import LayerCache, LayerKV


class LayerStack:
    """Embedding, layers and head of one model. Every tensor has a leading batch dimension."""

    def __init__(self, module: Any, config: Any, geometry: Geometry, device: str, dtype: torch.dtype) -> None:
        self._module, self._config = module, config
        self._decoder = decoder_of(module)
        self._rope, self._head = Rope(self._decoder), _head_of(module)
        architecture = architecture_of(config)
        scale = architecture.embedding_scale
        self._embedding_scale: float | None = None if scale is None else getattr(config, scale)
        self._counts_cached = architecture.counts_cached
        self.depends_on_length = depends_on_length(config)
        self.num_layers, self.geometry = len(self._decoder.layers), geometry
        kinds = ["full_attention"] * self.num_layers if geometry.states is None else layer_kinds(config)
        # Which of the layers with KV, and which of those with a state, a decoder layer is; None: it is none of them.
        self.kv_index, self.state_index = _indices(map(has_attention, kinds)), _indices(map(is_linear, kinds))
        self.kv_layers = [layer for layer, index in enumerate(self.kv_index) if index is not None]
        self.attention_kinds: Sequence[str] = getattr(config, "layer_types", None) or kinds
        layers = self._decoder.layers
        self._cache_names = [cache_name(layer) for layer in layers]
        self._chunks = [chunk_of(layer.self_attn) if self.geometry.states is None else None for layer in layers]
        self.device, self.dtype = torch.device(device), dtype
        self.graphs: Any = None  # on an accelerator its layers as steps (`graphs/stack.py`), once a link needs them
        is_sparse = hasattr(config, "output_router_logits")
        self._no_router_logits = {"output_router_logits": False} if is_sparse else {}

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, rows] → hidden states [batch, rows, hidden]."""
        hidden: Tensor = self._decoder.get_input_embeddings()(tokens)
        return hidden if self._embedding_scale is None else hidden * self._embedding_scale

    @property
    def rotary_kinds(self) -> Sequence[str | None]:
        """Of each layer the kind of rotary table that it uses (`RotaryTables`)."""
        return self._rope.kinds

    def rotary_tables(self, positions: Tensor) -> RotaryTables:
        """RoPE tables of a prompt's positions, int64 [n] (see `Rope.tables`)."""
        return self._rope.tables(positions, self._like())

    def pack_tables(self, lengths: Sequence[int]) -> RotaryTables:
        """RoPE tables of sequences of these lengths, one after the other, each a prompt of its own."""
        if self.depends_on_length:
            alone = {length: self.rotary_tables(torch.arange(length, device=self.device)) for length in set(lengths)}
            return joined_tables([alone[length] for length in lengths])
        longest = self.rotary_tables(torch.arange(max(lengths), device=self.device))
        return joined_tables([tables_at(longest, slice(length)) for length in lengths])

    def rotate(self, x: Tensor, tables: RotaryTables, layer: int) -> Tensor:
        """Rotate a layer's keys [batch, heads, positions, head_dim] to the tables' positions; returns a new tensor."""
        return self._rope.rotate(x, self._table(tables, layer))

    def by_rotation(self, first: Tensor, second: Tensor) -> LayerKV:
        """Two parts of a layer, the one that is rotated before the other; or, from this order, back."""
        return (first, second) if self.geometry.parts[0].rotated else (second, first)

    def rotate_parts(self, parts: LayerKV, tables: RotaryTables, layer: int) -> LayerKV:
        """A layer's parts with the rotated one rotated (see `rotate`), as K and V."""
        rotated, other = self.by_rotation(*parts)
        return self.by_rotation(self.rotate(rotated, tables, layer), other)

    def is_length_dependent(self, length: int, prompt: int) -> bool:
        """Whether the first `length` positions are rotated differently in a prompt of `prompt` tokens than alone.

        So it is beyond the switch of long RoPE, and with dynamic scaling. KV of a beginning is then not exact.
        """
        if not length or not self.depends_on_length:
            return False
        alone = self.rotary_tables(torch.arange(length, device=self.device))
        within = self.rotary_tables(torch.arange(prompt, device=self.device))
        pairs = zip(alone.parts(), within.parts(), strict=True)
        return any(not torch.equal(own, other[:, :length]) for own, other in pairs)

    def rotation_id(self, prompt: int) -> str:
        """An id of how a prompt of `prompt` tokens is rotated, where that depends on its length; else empty.

        Equal ids mean equal frequencies: those show in the tables of any positions but the first.
        """
        if not self.depends_on_length:
            return ""
        tables = self.rotary_tables(torch.arange(max(prompt, 2), device=self.device))
        rotations = [part[:, 1].float().cpu().numpy().tobytes() for part in tables.parts()]
        return hashlib.sha256(b"".join(rotations)).hexdigest()

    @torch.inference_mode()
    def layer(
        self,
        layer: int,
        hidden: Tensor,
        cache: LayerCache,
        tables: RotaryTables,
        runs: Runs,
        on_scores: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Run one decoder layer on rows [batch, rows, hidden]; `tables` are those of the rows' positions.

        Other requests may run before it (`turns.checkpoint`), and none while it runs.

        Args:
            on_scores: called with the rows' attention scores (QKᵀ before the softmax), float32 [batch, heads, rows, n];
                -inf where a row does not see.
        """
        if self.state_index[layer] is not None and not isinstance(cache, StatefulCache):
            self.require_attention()
        turns.checkpoint()
        table = self._table(tables, layer)
        own = table if cache.takes_rotated else identity_table(table)  # what the layer rotates by
        inputs = cache.inputs if isinstance(cache, StatefulCache) else None
        with nullcontext() if inputs is None else self._noting_inputs(layer, inputs):
            out = self._decoder.layers[layer](
                hidden,
                attention_mask=None,
                position_ids=tables.positions[None],
                position_embeddings=None if not own[0].shape[-1] else own if len(own) > 1 else own[0],
                use_cache=True,
                pic=Pass(self._rope, None if cache.takes_rotated else table, runs, on_scores, self._chunks[layer]),
                **{self._cache_names[layer]: CountingCache(cache, tables.positions) if self._counts_cached else cache},
            )
        rows: Tensor = out[0] if isinstance(out, tuple) else out
        return rows

    def require_attention(self) -> None:
        """Refuse to read the attention, or K and V, of every layer of a hybrid. Raises ModelError."""
        require_no_states(self._config, "attention and second models")

    def mixer(self, layer: int) -> Any:
        """The module of a linear layer that reads and writes its state."""
        return mixer_of(self._decoder.layers[layer])

    @contextmanager
    def _noting_inputs(self, layer: int, inputs: list[Tensor]) -> Iterator[None]:
        """Add what a linear layer's mixer is called with to `inputs`."""

        def note(_: Any, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            inputs.append(args[0] if args else named["hidden_states"])

        hook = self.mixer(layer).register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def project(self, layer: int, hidden: Tensor, tables: RotaryTables) -> LayerKV:
        """Un-rotated K and V (or other parts) of rows [batch, rows, hidden] at a layer, which ends once it has them."""
        try:
            self.layer(layer, hidden, ProjectionCache(), tables, ())
        except Projected as projected:
            return projected.key, projected.value
        raise AssertionError("a layer handed no K and V to its cache")

    def layers(
        self,
        hidden: Tensor,
        cache: LayerCache,
        tables: RotaryTables,
        runs: Runs,
        on_scores: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Run all decoder layers, one after the other (see `layer`)."""
        for layer in range(self.num_layers):
            hidden = self.layer(layer, hidden, cache, tables, runs, on_scores)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] of the last layer → logits, float32 [rows, vocab]."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, **self._no_router_logits).logits
        return logits[0].float()

    def _table(self, tables: RotaryTables, layer: int) -> RotaryTable:
        """The table that a layer uses."""
        return tables.of_kind[self._rope.kinds[layer]]

    def _like(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)


class _Decoded(nn.Module):
    """Takes the decoder's place in a model whose layers were run already: only the final norm is left."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, inputs_embeds: Tensor, **_: Any) -> MoeModelOutputWithPast:
        return _Output(last_hidden_state=self._norm(inputs_embeds))


class _Output(MoeModelOutputWithPast):  # type: ignore[misc]
    """Has none of what a wrapper asks for beside, as the features of images."""

    image_hidden_states = image_outputs = video_outputs = audio_outputs = rope_deltas = None
    image_pooler_output = video_pooler_output = None


def _indices(chosen: Iterable[bool]) -> list[int | None]:
    """The index of each that is chosen among those; None for the others."""
    count = itertools.count()
    return [next(count) if is_chosen else None for is_chosen in chosen]


def _head_of(module: Any) -> Any:
    """What a model does after its layers, by its own forward: norm, head, and how some scale or squash logits."""
    language = language_model_of(module)
    head = copy.copy(language)
    decoder = decoder_of(module)
    decoded = _Decoded(getattr(decoder, architecture_of(decoder.config).norm))
    if hasattr(decoder, "lm_head_multiplier"):  # Falcon-H1's head asks the decoder
        decoded.lm_head_multiplier = decoder.lm_head_multiplier
    head._modules = {**language._modules, "model": decoded}
    return head

"""Relocation and repair of caches that `transformers` filled: the steps of a link, for systems with their own store.

A link gets keys before rotation from objects. A `Cache` has them rotated, so they are rotated on, by the quotient of
two of the model's own rotary tables. Rows are computed over an image, as in a link; afterwards the model is as before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from pictool.core import Layout, RowMask
from pictool.errors import InputError, ModelError
from pictool.linker.grid import named_policy
from pictool.linker.policies.base import Policy, Prompt
from pictool.runtime.architectures import decoder_of
from pictool.runtime.attention import NAME
from pictool.runtime.memory.caches import LayerKV
from pictool.runtime.memory.image import Image
from pictool.runtime.model import Model, wrap_model
from pictool.runtime.rope import tables_at, tables_between
from pictool.runtime.stack import LayerStack
from pictool.runtime.support import depends_on_length, require_transformers

Numbers = Sequence[int] | Tensor
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@torch.no_grad()
def relocate(past_key_values: Cache, from_positions: Numbers, to_positions: Numbers, model: Any) -> Cache:
    """Rotate a cache's keys from the positions where they were computed to others (RoPE).

    Each key is turned once, in float32, and rounded once; where both positions are equal it stays as it is, to the bit.
    Values, latents and the keys of layers without RoPE are copied. A layer with a window may hold the last tokens
    alone; of others than RoPE's angles the position of a token changes nothing here (`repair` does).

    Args:
        past_key_values: a `DynamicCache` as the model's forward fills it, for one position per token; it is not
            written to. One of several chunks, one after the other, can have the same position several times.
        from_positions: int [n], where each of the n tokens was computed.
        to_positions: int [n], ascending.
        model: the `transformers` causal model that filled the cache, or a `Model`.

    Returns:
        a new cache, which shares no tensor with the given one.

    Raises:
        ModelError: a model that is not supported, a hybrid, or one whose RoPE depends on the prompt's length.
        InputError: a cache of another kind or another model; positions that overlap, are too many or too few, or
            beyond the model's.
    """
    owner, stack = _stack_of(model, "relocate")
    length, bound = _length_of(past_key_values, owner), owner.max_positions
    before = _whole_numbers("from_positions", from_positions, bound, length)
    after = _whole_numbers("to_positions", to_positions, bound, length, ascend=True)
    tables = tables_between(*(stack.rotary_tables(positions.to(stack.device)) for positions in (before, after)))

    def moved(index: int, layer: Any) -> LayerKV:
        rotated, other = stack.by_rotation(layer.keys, layer.values)
        held = tables_at(tables, slice(length - rotated.shape[2], None))
        return stack.by_rotation(stack.rotate(rotated.float(), held, index).to(rotated.dtype), other.clone())

    return _replaced(past_key_values, (moved(*layer) for layer in enumerate(past_key_values.layers)))


@torch.no_grad()
def repair(
    past_key_values: Cache,
    tokens: Numbers,
    rows: Policy | str | Sequence[bool] | Tensor | RowMask,
    model: Any,
    starts: Numbers = (),
) -> Cache:
    """Recompute some rows of a cache through all layers; their keys and values replace those that it has.

    A row attends to all before it, recomputed or not (docs/design.md §2, rule 5). No other thread may run the model
    meanwhile: its attention function is ours for that time.

    Args:
        past_key_values: a `DynamicCache` of one sequence, whose keys are where they are in the prompt, position j in
            column j (`relocate`). It holds all tokens in every layer, and is not written to.
        tokens: int [n] or [1, n], those of the cache.
        rows: which to recompute: bool [n], or a policy that needs to know no more than `starts`, as ``legolink-16``
            (EPIC §4.2), ``full`` or one of `make_policy`.
        model: the `transformers` causal model, or a `Model`.
        starts: where chunks begin, ascending; what comes before the first is the head. For a policy.

    Returns:
        a new cache, which shares no tensor with the given one.

    Raises:
        ModelError: as `relocate`, and a model in training mode.
        InputError: as `relocate`; other tokens or rows than the cache has, layers that dropped some, or a policy that
            needs more.
    """
    owner, stack = _stack_of(model, "repair")
    length = _length_of(past_key_values, owner)
    if any(layer.keys.shape[::2] != (1, length) for layer in past_key_values.layers):
        raise InputError(
            "past_key_values: repair needs one sequence, with all its tokens in every layer; DynamicCache() without a "
            "config keeps them where the model has windows"
        )
    ids = _whole_numbers("tokens", tokens, owner.config.vocab_size, length).numpy().astype(np.int32)
    begins = _whole_numbers("starts", starts, length, None, ascend=True).tolist()
    on = _rows_of(rows, Prompt(owner, Layout(ids, (0, *begins, length)), ()))
    image, last = Image(stack, Layout.of((), (), ids.tolist())), stack.num_layers - 1
    for index, layer in enumerate(past_key_values.layers):
        image.fill(index, 0, layer.keys[0], layer.values[0])
    if on.any():
        computed, hidden = image.begin(on)
        with _our_attention(model.module if isinstance(model, Model) else model):
            for index in range(last):
                hidden = image.compute(index, hidden, computed)
            image.write(last, *image.project(last, hidden, computed), computed)
    kv = ((image.key(index).clone(), image.value(index).clone()) for index in range(stack.num_layers))
    return _replaced(past_key_values, kv)


def _stack_of(model: Any, what: str) -> tuple[Model, LayerStack]:
    """A model and its layers; a module stays as it is. Raises ModelError: what `what` cannot be done with."""
    require_transformers()
    owner = model if isinstance(model, Model) else wrap_model(model, None, type(model).__name__)
    owner.require_no_states(what)
    if not owner.is_of_transformers or depends_on_length(owner.config):
        raise ModelError(
            f"{what}: {owner.name} runs in llama.cpp, or its RoPE depends on the prompt's length; not supported"
        )
    if owner is model:
        return owner, owner.stack
    if model.training:
        raise ModelError(f"{what}: {owner.name} is in training mode; call its eval()")
    return owner, LayerStack(model, owner.config, owner.geometry, owner.device, owner.torch_dtype)


def _length_of(cache: Cache, owner: Model) -> int:
    """How many tokens a cache is of. Raises InputError: not one that this model's forward filled."""
    layers, geometry = list(getattr(cache, "layers", ())), owner.geometry
    kinds = {DynamicLayer, DynamicSlidingWindowLayer, *map(type, layers)}
    if len(layers) != geometry.layers or len(kinds) > 2:
        raise InputError(
            f"past_key_values: must be a DynamicCache of {geometry.layers} layers that {owner.name} filled"
        )
    for index, layer in enumerate(layers):
        for part, held in zip(geometry.parts, (layer.keys, layer.values), strict=True):
            needed = (part.heads, part.width, owner.torch_dtype, torch.device(owner.device).type)
            if held is None or (held.shape[1], held.shape[3], held.dtype, held.device.type) != needed:
                found = "missing" if held is None else f"{held.dtype} {list(held.shape)} on {held.device}"
                raise InputError(
                    f"past_key_values: the {part.name} of layer {index} is {found}, but {owner.name} has "
                    f"{owner.torch_dtype} [batch, {part.heads}, n, {part.width}] on {owner.device}"
                )
    return int(layers[0].get_seq_length())


def _whole_numbers(what: str, values: Numbers, bound: int, count: int | None, ascend: bool = False) -> Tensor:
    """Values as int64 [n] on the CPU. Raises InputError: not `count` whole numbers from 0 to below `bound`."""
    numbers = torch.as_tensor(values).cpu().flatten()
    is_whole = numbers.dtype in _WHOLE and bool((numbers >= 0).all() and (numbers < bound).all())
    is_in_order = not ascend or bool((numbers.diff() > 0).all())
    if len(numbers) != (len(numbers) if count is None else count) or (len(numbers) and not (is_whole and is_in_order)):
        form = f"{'' if count is None else f'{count} '}{'ascending ' if ascend else ''}whole numbers"
        raise InputError(f"{what}: must be {form} from 0 to {bound - 1}")
    return numbers.long()


def _rows_of(rows: Any, prompt: Prompt) -> RowMask:
    """bool [n]. Raises InputError: a mask of another size, or a policy that needs more than the layout."""
    if not isinstance(rows, Policy | str):
        mask = torch.as_tensor(rows).cpu()
        if mask.dtype != torch.bool or mask.shape != (prompt.layout.num_tokens,):
            raise InputError(f"rows: must be a policy, or bool [{prompt.layout.num_tokens}]")
        return mask.numpy()
    policy = named_policy(rows) if isinstance(rows, str) else rows
    if policy.needs.selects_late or policy.check_layers(prompt.model.geometry.layers):
        raise InputError(f"{policy.name}: needs more than where chunks begin; use full, legolink-16 or a mask")
    selected = policy.select(prompt).rows
    if not (prompt.layout.chunks or selected.all()):
        raise InputError(f"{policy.name}: needs starts, where chunks begin")
    return selected


@contextmanager
def _our_attention(module: Any) -> Iterator[None]:
    """Meanwhile a model's layers attend by our function."""
    config = decoder_of(module).config
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _replaced(cache: Cache, parts: Iterable[LayerKV]) -> Cache:
    """A cache like the given one, with other keys and values."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer, kv in zip(other.layers, parts, strict=True):
        layer.keys, layer.values = kv
    return other

"""Prefill of isolated chunks: what compiling runs. Many chunks share one forward, without padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pictool.core import Layout, StateShape
from pictool.runtime import turns
from pictool.runtime.architectures import cache_name
from pictool.runtime.device import is_accelerator
from pictool.runtime.memory.caches import CapturingCache, LayerKV, StatefulCache
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.states import LinearState, StateMap
from pictool.runtime.rows import Pack, Rows
from pictool.runtime.stack import LayerStack

ChunkKV = list[LayerKV]  # per layer: un-rotated key and value, [kv_heads, tokens, head_dim]

# Tokens of one forward: enough to fill the arithmetic units; more costs a CPU its caches (docs/studies/benchmarks.md).
_PACK_TOKENS, _ON_ACCELERATOR = 512, 8192


def pack_tokens(stack: LayerStack) -> int:
    """Tokens of one forward on the model's device."""
    return _ON_ACCELERATOR if is_accelerator(stack.device) else _PACK_TOKENS


def plan_packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of chunks that are computed together, within a budget of tokens; a longer chunk is alone.

    Each pack is the longest chunk that is left, and then always the longest that still fits.
    """
    packs: list[list[int]] = []
    left = sorted(range(len(lengths)), key=lambda index: lengths[index])
    while left:
        packs.append([left.pop()])
        room = max_tokens - lengths[packs[-1][0]]
        while fitting := bisect_right(left, room, key=lambda index: lengths[index]):
            packs[-1].append(left.pop(fitting - 1))
            room -= lengths[packs[-1][-1]]
    return packs


def prefill_chunks(
    stack: LayerStack, chunks: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = (), alone: bool = False
) -> Iterator[tuple[int, ChunkKV]]:
    """Compute each chunk on its own, from position 0 on; yields (index of the chunk, its KV) as they are ready.

    Linear layers see the tokens of a whole pack, as one large product; attention and rotation see each chunk alone.
    `before` has what comes before each chunk, if anything does; its KV is dropped. What several have in common is
    computed once. `alone`: every chunk has a forward of its own.
    """
    before = before or [()] * len(chunks)
    if any(before) and not stack.depends_on_length:
        of_context: dict[tuple[int, ...], list[int]] = {}
        for index, context in enumerate(before):
            of_context.setdefault(tuple(context), []).append(index)
        for context, own in of_context.items():
            found = _prefill_after(stack, context, [chunks[index] for index in own])
            yield from zip(own, found, strict=True)
        return
    lengths = [len(first) + len(chunk) for first, chunk in zip(before, chunks, strict=True)]
    for pack in plan_packs(lengths, 1 if alone else pack_tokens(stack)):
        own = [lengths[index] for index in pack]
        tokens = torch.tensor([[token for index in pack for token in (*before[index], *chunks[index])]])
        if own[0] > _PACK_TOKENS and not is_accelerator(stack.device):
            layers = _prefill_long(stack, tokens)
        else:
            layers = _prefill(stack, tokens, own)
        for index, end in zip(pack, accumulate(own), strict=True):
            rows = slice(end - len(chunks[index]), end)
            yield index, [(key[0, :, rows], value[0, :, rows]) for key, value in layers]


def last_hidden(stack: LayerStack, tokens: Sequence[int]) -> tuple[Image, Tensor]:
    """Prefill tokens alone to an image, of which all are the tail, and the hidden states [1, n, hidden] at the end."""
    image = Image(stack, Layout.of([], [], tokens))
    rows = Rows.of(torch.arange(len(tokens))).to(stack.device)
    hidden = stack.embed(torch.tensor([list(tokens)], device=stack.device))
    for layer in range(stack.num_layers):
        hidden = image.compute(layer, hidden, rows)
    return image, hidden


def _prefill(stack: LayerStack, tokens: Tensor, lengths: Sequence[int]) -> list[LayerKV]:
    """Un-rotated K and V of every layer, [1, kv_heads, rows, head_dim], of sequences of these lengths, each apart.

    Of the last layer no more is computed.
    """
    tables, pack = stack.pack_tables(lengths), Pack(tuple(lengths))
    cache = CapturingCache(stack, tables)
    hidden, last = stack.embed(tokens.to(stack.device)), stack.num_layers - 1
    for layer in range(last):
        hidden = stack.layer(layer, hidden, cache, tables, pack)
    return [*cache.layers, stack.project(last, hidden, tables)]


def _prefill_long(stack: LayerStack, tokens: Tensor) -> list[LayerKV]:
    """The same of one long sequence on a CPU, of each layer some rows at a time, as a link computes them."""
    image, length = Image(stack, Layout.of((), (), tokens[0].tolist())), tokens.shape[1]
    image.keep_keys()
    assert image.fresh_keys is not None
    rows, hidden, last = Rows.of(torch.arange(length)), stack.embed(tokens), stack.num_layers - 1
    for layer in range(last):
        hidden = image.compute(layer, hidden, rows)
    before = (image.unrotated(layer, key[0], 0, length) for layer, key in enumerate(image.fresh_keys))
    layers = [(first[None], second[None]) for first, second in before]
    return [*layers, stack.project(last, hidden, stack.rotary_tables(rows.positions))]


def _prefill_after(stack: LayerStack, context: Sequence[int], chunks: Sequence[Sequence[int]]) -> Iterator[ChunkKV]:
    """The same of chunks that each follow one context: what a chunk computes takes the place of the one before."""
    start, last = len(context), stack.num_layers - 1
    image = Image(stack, Layout.of((), (), [0] * (start + max(map(len, chunks)))))

    def advance(tokens: Sequence[int], at: int) -> tuple[Tensor, Rows]:
        """The hidden states before the last layer."""
        rows = Rows.of(torch.arange(at, at + len(tokens))).to(stack.device)
        hidden = stack.embed(torch.tensor([list(tokens)], device=stack.device))
        for layer in range(last):
            hidden = image.compute(layer, hidden, rows)
        return hidden, rows

    if start:
        advance(context, 0)
    for chunk in chunks:
        image.keep_keys()
        hidden, rows = advance(chunk, start)
        assert image.fresh_keys is not None
        end = start + len(chunk)
        pairs = [image.unrotated(layer, key[0], start, end) for layer, key in enumerate(image.fresh_keys)]
        projected = stack.project(last, hidden, stack.rotary_tables(rows.positions))
        yield [*((first.clone(), second.clone()) for first, second in pairs), (projected[0][0], projected[1][0])]


_PROBE = 2.0**20  # of the identity: so large that what the tokens add to a state is lost in it, and not the reverse


@torch.inference_mode()
def prefill_stateful(stack: LayerStack, tokens: Sequence[int], cut: int) -> tuple[ChunkKV, list[StateMap]]:
    """Compute a hybrid's chunk on its own: KV of the layers with attention, and the map of each linear layer.

    A map is that of the tokens from `cut` on, with the chunk's own inputs; none if the chunk ends before.
    """
    image, bounds = Image(stack, Layout.of((), [tokens], ())), sorted({0, min(cut, len(tokens)), len(tokens)})
    image.keep_keys()
    assert image.states is not None and image.fresh_keys is not None
    rows = [Rows.of(torch.arange(*span)).to(stack.device) for span in pairwise(bounds)]
    hidden = [stack.embed(torch.tensor([tokens[slice(*span)]], device=stack.device)) for span in pairwise(bounds)]
    maps: list[StateMap] = []
    for layer, index in enumerate(stack.state_index):
        *first, last = zip(hidden, rows, strict=True)
        before = [image.compute(layer, *part) for part in first]
        if index is None or cut >= len(tokens):
            hidden = [*before, image.compute(layer, *last)]
            continue
        state = image.states.before(layer, cut)
        image.states.inputs = inputs = list[Tensor]()
        hidden, image.states.inputs = [*before, image.compute(layer, *last)], None
        tail = image.states.before(layer, len(tokens)).tail[0]
        maps.append(_map_of(stack, layer, torch.cat(inputs, 1), state, tail))
    count = len(rows)
    keys = [torch.cat(image.fresh_keys[at : at + count], 2) for at in range(0, count * stack.geometry.layers, count)]
    return [image.unrotated(layer, key[0], 0, len(tokens)) for layer, key in enumerate(keys)], maps


def _map_of(stack: LayerStack, layer: int, inputs: Tensor, before: LinearState, tail: Tensor) -> StateMap:
    """The map of a linear layer's state over `inputs` [1, rows, hidden], by the model's own rule.

    The rule is affine in the state. So B is what it makes of zero, and A what it adds to that from the identity, which
    is scaled so that B does not cost A its last bits. All are one batch.
    """
    shape, length = stack.geometry.states, inputs.shape[1]
    assert shape is not None
    if before.recurrent is None:
        return StateMap(length, tail.clone())
    probes = _identity(shape).to(stack.device) * _PROBE
    starts = torch.cat([torch.zeros_like(before.recurrent), probes])
    cache = StatefulCache(None, layer, LinearState(before.tail.expand(len(starts), -1, -1), starts))
    mixer = stack.mixer(layer)
    for part in torch.split(inputs, _PACK_TOKENS, 1):
        turns.checkpoint()
        mixer(part.expand(len(starts), -1, -1), **{cache_name(mixer): cache})
    after = cache.state.recurrent
    assert after is not None
    moved = (after[1:] - after[:1]) / _PROBE
    operator = moved[0, :, :1, :1] if shape.operator == 1 else torch.cat(list(moved), -1)[..., : shape.rows]
    return StateMap(length, tail.clone(), operator.clone(), after[0].clone())


def _identity(shape: StateShape) -> Tensor:
    """States [count, heads, rows, width] whose columns, one after the other, are the identity; or one of ones."""
    if shape.operator == 1:
        return torch.ones(1, shape.heads, shape.rows, shape.width)
    count = -(-shape.rows // shape.width)
    columns = torch.eye(shape.rows, count * shape.width).view(shape.rows, count, shape.width).transpose(0, 1)
    return columns[:, None].expand(-1, shape.heads, -1, -1)


def round_anew(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """The numbers, changed at random by what rounding in their dtype may change."""
    noise = torch.empty_like(numbers, dtype=torch.float32).uniform_(-1, 1, generator=generator)
    return (numbers * (1 + noise * torch.finfo(numbers.dtype).eps)).to(numbers.dtype)


@contextmanager
def rounded_anew(stack: LayerStack, seed: int) -> Iterator[None]:
    """Meanwhile what the layers get as their input is rounded anew: what is computed has the noise of the dtype."""
    embed, generator = stack.embed, torch.Generator(stack.device).manual_seed(seed)
    stack.embed = lambda tokens: round_anew(embed(tokens), generator)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del stack.embed

"""Sensitivity: how much every token's KV depends on what precedes its chunk, measured after the model's own texts.

Probes are prefixes that a model wrote itself. Text of the model's own distribution names what its documents name, so a
chunk that refers to what came before it finds a referent in the probe; after random tokens it rarely does. Probes
depend on the model only. They are made once, and kept in the user's cache directory.

A chunk is prefilled after each probe, and once after a copy of itself: there all that it names was named before, which
it rarely is in a probe where names are many. A token's score in the chunk's `FixupTable` is

    max(1 - p, EXPECTED) · (dependence after probes + dependence after itself) / 2

each the highest, over layers and KV heads, of a squared distance of the token's un-rotated key, as a share of
spread(key): the variance over the probes, and the squared distance from their mean. spread is the variance of the
head's keys over tokens, a constant of the model, so that heads, layers and chunks are comparable. p is the probability
that the model gives the token at its place, the mean over the probes: nothing has to be looked up at a token that can
be predicted, mostly. Where a model does look there, `EXPECTED` lets such tokens follow when the others are done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from pictool.core import FixupTable, Layout
from pictool.reading import read_file
from pictool.runtime.attention import Pack, Rows, Run
from pictool.runtime.memory.caches import GrowingCache, LayerKV, PrefixedCache
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.user_cache import cache_dir, write_cache_file
from pictool.runtime.prefill import pack_tokens, plan_packs, prefill_batch, prefill_chunks, prefill_stateful
from pictool.runtime.rope import joined_tables, tables_at
from pictool.runtime.stack import LayerStack
from pictool.runtime.support import depends_on_length
from pictool.runtime.tensors import require_finite

if TYPE_CHECKING:
    from pictool.runtime.model import Model

EXPECTED = 0.1  # what a score keeps at least, however well its token is expected
_LOGIT_ROWS = 256  # rows whose logits are in memory at once
_LENGTHS_WRITTEN = 3  # a text is so many times as long as a probe, so that it can be cut where a line ends
_DIGEST_BYTES = 32
_MAX_PROBES_BYTES = 1 << 32


@dataclass(frozen=True)
class Probes:
    """Prefixes of one model and their KV. Each ends with a line break, if its text has one late enough."""

    tokens: Tensor  # int64 [probes, length]
    layers: list[LayerKV]  # un-rotated, [probes, kv_heads, length, head_dim]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def spread(self) -> list[Tensor]:
        """Per layer the variance of keys over the probes' tokens, float32 [kv_heads]: how much keys differ at all.

        The first token of each probe, an outlier, is left out.
        """
        keys = [key[:, :, 1:].float().transpose(0, 1).flatten(1, 2) for key, _ in self.layers]
        smallest = torch.finfo(torch.float32).tiny
        return [key.var(1, correction=0).sum(-1).clamp_min(smallest) for key in keys]


_probes: WeakKeyDictionary[Model, dict[tuple[int, int], Probes]] = WeakKeyDictionary()  # of this process


def probes_of(model: Model, count: int, length: int) -> Probes:
    """The model's `count` probes of `length` tokens: of this process, from the user's cache, or made now and kept."""
    of_model = _probes.setdefault(model, {})
    if (count, length) not in of_model:
        path = _path(model, count, length)
        probes = _read(path, model)
        if probes is None:
            probes = make_probes(model, count, length)
            _write(path, probes)
        of_model[count, length] = probes
    return of_model[count, length]


def fixup_tables(
    model: Model, probes: Probes, chunks: Sequence[Sequence[int]], alone: bool = False
) -> Iterator[tuple[int, FixupTable]]:
    """Measure chunks; yields (index of the chunk, its table, float16 [n]) as they are ready.

    A chunk is measured after all probes in one batch, with other chunks. `alone`: no two chunks share one.
    """
    if model.geometry.states is not None:  # its linear layers run one sequence after the other
        measured = ((index, _measure_stateful(model, probes, chunk)) for index, chunk in enumerate(chunks))
        yield from ((index, _table(model, scores)) for index, scores in measured)
        return
    # What comes before the chunks of a pack is rotated alike for all, which it is not where RoPE depends on the length.
    budget = 1 if alone or depends_on_length(model.config) else max(1, pack_tokens(model.stack) // len(probes.tokens))
    for pack in plan_packs([len(chunk) for chunk in chunks], budget):
        scores = _measure(model, probes, [chunks[index] for index in pack], alone)
        for own, index in zip(scores, pack, strict=True):
            yield index, _table(model, own)


def _table(model: Model, scores: Tensor) -> FixupTable:
    require_finite(f"{model.name}: a table of fixups", model.dtype, scores)
    table: FixupTable = scores.clamp_max(torch.finfo(torch.float16).max).numpy().astype("<f2")
    return table


def _twice(model: Model, chunk: Sequence[int]) -> list[int]:
    """A chunk after itself; where the model has too few positions, after its last tokens."""
    room = model.max_positions - 1 - len(chunk)  # beside the first token
    return [*chunk[max(0, len(chunk) - room) :], *chunk]


def _keys_after_itself(model: Model, chunks: Sequence[Sequence[int]], alone: bool) -> list[Tensor]:
    """Un-rotated keys of the rows of `_measure`, by layer [kv_heads, rows, head_dim]; 0 in a chunk's row before it."""
    twice, keys = [_twice(model, chunk) for chunk in chunks], [list[Tensor]()] * len(chunks)
    for index, layers in prefill_chunks(model.stack, twice, (_first_token(model),), alone):
        keys[index] = [pad(key[:, -len(chunks[index]) :], (0, 0, 1, 0)) for key, _ in layers]
    return [torch.cat(of_chunks, 1) for of_chunks in zip(*keys, strict=True)]


def _dependence(after_probes: Tensor, after_itself: Tensor, spread: Tensor) -> Tensor:
    """Of a layer's keys [probes, kv_heads, rows, head_dim] and [kv_heads, rows, head_dim]: float32 [2, rows]."""
    var, mean = torch.var_mean(after_probes.float(), 0, correction=0)
    shares = torch.stack([var, (after_itself.float() - mean).square()]).sum(-1) / spread[:, None]
    return shares.amax(1)


@torch.inference_mode()
def _measure(model: Model, probes: Probes, chunks: Sequence[Sequence[int]], alone: bool) -> list[Tensor]:
    """Scores of each chunk, float32 [tokens], on the CPU.

    The rows are a pack: for each chunk the probe's last token, which predicts the chunk's first, and the chunk. The
    batch are the probes.
    """
    stack, after_itself = model.stack, _keys_after_itself(model, chunks, alone)
    end = probes.length - 1  # of the prefix that is not run again
    lengths = [1 + len(chunk) for chunk in chunks]
    is_first = torch.tensor([at == 0 for length in lengths for at in range(length)], device=stack.device)
    tokens = torch.tensor([token for chunk in chunks for token in (0, *chunk)], device=stack.device)
    tokens = torch.where(is_first, probes.tokens[:, end:], tokens)  # [probes, rows]
    tables = stack.rotary_tables(torch.arange(end + max(lengths), device=stack.device))
    row_tables = joined_tables([tables_at(tables, slice(end, end + length)) for length in lengths])
    prefix_tables = tables_at(tables, slice(end))
    prefix = {
        layer: stack.rotate_parts((key[:, :, :end], value[:, :, :end]), prefix_tables, layer)
        for layer, (key, value) in enumerate(probes.layers)
    }
    dependence = torch.zeros(2, tokens.shape[1], device=stack.device)

    def on_key(layer: int, key: Tensor) -> None:
        nonlocal dependence
        if layer:  # layer 0 depends on no context
            dependence = torch.maximum(dependence, _dependence(key, after_itself[layer], probes.spread[layer]))

    cache, pack = PrefixedCache(stack, row_tables, prefix, on_key), Pack(tuple(lengths))
    hidden = stack.layers(stack.embed(tokens), cache, row_tables, pack)
    scores = dependence.mean(0)[1:] * _improbability(stack, hidden, tokens).clamp_min(EXPECTED)
    return list(torch.split(scores[~is_first[1:]].cpu(), [len(chunk) for chunk in chunks]))


def _improbability(stack: LayerStack, hidden: Tensor, tokens: Tensor) -> Tensor:
    """1 - p of every token but the first, by the row before it, float32 [rows - 1]; p is the mean over the probes."""
    rows, targets = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    parts = zip(torch.split(rows, _LOGIT_ROWS), torch.split(targets, _LOGIT_ROWS), strict=True)
    entropies = [cross_entropy(stack.logits(part), target, reduction="none") for part, target in parts]
    return 1 - torch.exp(-torch.cat(entropies)).view(len(tokens), -1).mean(0)


@torch.inference_mode()
def _measure_stateful(model: Model, probes: Probes, chunk: Sequence[int]) -> Tensor:
    """The scores of one chunk of a hybrid, float32 [tokens], on the CPU."""
    stack = model.stack
    keys, expected = list[list[Tensor]](), list[Tensor]()
    for probe in probes.tokens.tolist():
        own, hidden = _run_over(stack, [*probe, *chunk])
        keys.append([key[:, -len(chunk) :] for key in own])
        rows = zip(torch.split(hidden[-len(chunk) - 1 : -1], _LOGIT_ROWS), _split(chunk, _LOGIT_ROWS), strict=True)
        shares = [stack.logits(part).softmax(-1)[range(len(targets)), targets] for part, targets in rows]
        expected.append(torch.cat(shares))
    after_itself, _ = _run_over(stack, [_first_token(model), *_twice(model, chunk)])
    dependence = torch.zeros(2, len(chunk), device=stack.device)
    for *of_probes, itself, spread in zip(*keys, after_itself, probes.spread, strict=True):
        share = _dependence(torch.stack(of_probes), itself[:, -len(chunk) :], spread)
        dependence = torch.maximum(dependence, share)
    return (dependence.mean(0) * (1 - torch.stack(expected).mean(0)).clamp_min(EXPECTED)).cpu()


def _split(tokens: Sequence[int], size: int) -> list[list[int]]:
    return [list(tokens[at : at + size]) for at in range(0, len(tokens), size)]


def _run_over(stack: LayerStack, tokens: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Run a hybrid over tokens: un-rotated keys [kv_heads, n, head_dim] of its layers with attention; hidden states."""
    image, rows = Image(stack, Layout.of((), [tokens], ())), Rows.of(torch.arange(len(tokens))).to(stack.device)
    image.keep_keys()
    hidden = stack.embed(torch.tensor([list(tokens)], device=stack.device))
    for layer in range(stack.num_layers):
        hidden = image.compute(layer, hidden, rows)
    assert image.fresh_keys is not None
    return [key[0] for key in image.fresh_keys], hidden[0]


def make_probes(model: Model, count: int, length: int) -> Probes:
    """Let the model write `count` texts, sampled with a seed that is its fingerprint, and cut them where lines end."""
    seed = int.from_bytes(hashlib.sha256(f"probes {model.fingerprint}".encode()).digest()[:8], "little", signed=True)
    num_written = min(_LENGTHS_WRITTEN * length, model.max_positions)
    texts = write_texts(model, count, num_written, torch.Generator().manual_seed(seed))
    return probes_from(model, cut_at_lines(model, texts, length))


def probes_from(model: Model, tokens: Tensor) -> Probes:
    """Probes of given prefixes, int64 [probes, length]."""
    tokens = tokens.to(model.stack.device)
    if model.geometry.states is None:
        return Probes(tokens, prefill_batch(model.stack, tokens))
    alone = [prefill_stateful(model.stack, probe, len(probe))[0] for probe in tokens.tolist()]
    layers = [tuple(map(torch.stack, zip(*of_probes, strict=True))) for of_probes in zip(*alone, strict=True)]
    return Probes(tokens, [(key, value) for key, value in layers])


@torch.inference_mode()
def write_texts(model: Model, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Texts of the model itself, int64 [count, length]: sampled at temperature 1 from its first token on."""
    stack, first = model.stack, _first_token(model)
    if model.geometry.states is not None:
        return torch.tensor([_write_stateful(model, length, generator) for _ in range(count)])
    tokens, cache = torch.full((count, 1), first), GrowingCache(stack)
    for position in range(length - 1):
        at = torch.tensor([position], device=stack.device)
        cache.tables = stack.rotary_tables(at)
        hidden = stack.embed(tokens[:, -1:].to(stack.device))
        hidden = stack.layers(hidden, cache, cache.tables, (Run(0, position, position + 1),))
        logits = stack.logits(hidden[:, -1]).cpu()
        require_finite(model.name, model.dtype, logits)
        logits[:, sorted({first, *model.eos_ids})] = float("-inf")
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return tokens


def _write_stateful(model: Model, length: int, generator: torch.Generator) -> list[int]:
    """One text of a hybrid, as of `write_texts`."""
    image, tokens = Image(model.stack, Layout.of((), (), ())), [_first_token(model)]
    while len(tokens) < length:
        logits = image.append(tokens[-1]).cpu()
        require_finite(model.name, model.dtype, logits)
        logits[sorted({tokens[0], *model.eos_ids})] = float("-inf")
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return tokens


def cut_at_lines(model: Model, texts: Tensor, length: int) -> Tensor:
    """Of every text its first token and the `length` - 1 that end with a line; its last ones, if no line ends there."""
    cut = []
    for text in texts.tolist():
        ends = (at for at in range(length - 1, len(text)) if str(model.tokenizer.decode([text[at]])).endswith("\n"))
        end = next(ends, len(text) - 1) + 1
        cut.append([text[0], *text[end - length + 1 : end]])
    return torch.tensor(cut)


def _first_token(model: Model) -> int:
    """BOS; for models that begin with none (Qwen2), a token that ends a text."""
    return model.bos_id if model.bos_id is not None else min(model.eos_ids, default=0)


def _path(model: Model, count: int, length: int) -> Path:
    name = f"{model.target} {model.device} {count} {length} 1"
    return cache_dir() / "probes" / f"{hashlib.sha256(name.encode()).hexdigest()}.safetensors"


def _read(path: Path, model: Model) -> Probes | None:
    """The probes that were kept in a file: their BLAKE3, then safetensors. None if it is missing or damaged."""
    from safetensors.torch import load

    try:
        data = read_file(path, _MAX_PROBES_BYTES)
    except OSError:
        return None
    digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if blake3(data).digest() != digest:  # what has one that holds is ours
        return None
    tensors = {name: tensor.to(model.device) for name, tensor in load(data).items()}
    layers = [(tensors[f"{layer}.key"], tensors[f"{layer}.value"]) for layer in range(model.geometry.layers)]
    return Probes(tensors["tokens"], layers)


def _write(path: Path, probes: Probes) -> None:
    from safetensors.torch import save

    tensors = {"tokens": probes.tokens.cpu()}
    for layer, (key, value) in enumerate(probes.layers):
        tensors |= {f"{layer}.key": key.cpu().contiguous(), f"{layer}.value": value.cpu().contiguous()}
    data = save(tensors)
    write_cache_file(path, blake3(data).digest() + data)

"""Corrections beside computed rows: is what `fixup` leaves low-rank, and can a linker know it? (docs/studies/fixups.md)

    python -m benchmarks.corrections choose           # penalties and forms, on one model of the zoo
    python -m benchmarks.corrections zoo              # every variant on the zoo
    python -m benchmarks.corrections hold-outs        # the same on the hold-outs, once
    python -m benchmarks.corrections table            # what they say; all of it is in corrections.json

`fixup` computes 0.5, 1 or 2 % of a prompt's rows, at least one; its image is `pictool.link`'s own. Its *change* is KV
computed less KV stored, keys before rotation. From that a change is predicted for the rows that it did not compute, in
every layer but the first, and added; then the questions are asked.

- `ridge`: from a row's stored K and V, fitted to the computed rows of the prompt or chunk. Objects keep nothing.
- `shift`: objects keep a vector for K and V of each layer, the mean change after the 8 probes of the chunk's table, or
  the leading direction. It is added to each row, times a coefficient: least squares over the chunk's computed rows; if
  it has none, 0, or the prompt's (`leading`). `pattern`: a matrix [tokens, width] of rank 1, of the leading change.
- `probes`: objects keep the change after each of the 8 probes, whole or of rank 1; their weights are fitted to the
  chunk's computed rows, all layers at once. `again`: these are then computed again over the corrected ones.
- `before-m`: Kamera's (2606.23581) conditioning patch of rank m, of the change after the page that precedes the chunk
  *here*; `reordered-m`: of the change among the same pages in another order. Added before rows are computed.
  `before`: KV compiled after that page, in place of the chunk's own.
- `oracle-m`: the true change, of rank m in each chunk's K and V of a layer, of computed rows as well.

KL to full: of the first token, and summed over the right answer. Prompts: held-out worlds, 6 chunks of about 20 or 60
tokens, of draws that no other study used. Intervals: 95 %, bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.fixup_zoo import PROBE_TOKENS, PROBES, SIZES, Subject, hold_outs, subjects
from benchmarks.fixups import Numbers, Record, hidden_after_image, interval, questions_of
from benchmarks.output import write_results
from pictool import Chunk, Linked, Model, Policy, Store, compile, link, make_policy
from pictool.core import Layout
from pictool.runtime.attention import Rows, Run
from pictool.runtime.chat.template import make_frame
from pictool.runtime.memory.caches import CapturingCache
from pictool.runtime.memory.image import Image
from pictool.runtime.sensitivity import probes_of
from pictool.runtime.stack import LayerStack
from training.world.generate import Question

RATIOS = (0.005, 0.01, 0.02)
PER_KIND = 3
WHOLE = 10_000  # a rank that none exceeds
RESULTS = Path("benchmarks/results/corrections.json")
FRESH, CHOOSING = 300_000, 200_000  # the first prompt of the draws that are reported, and of that for `choose`
CHOSEN_ON = "llama-gqa"
HALF = 2  # bytes of a number that an object keeps

KV = Tensor  # [2, layers, kv_heads, tokens, head_dim]: keys and values


# Asking


@dataclass(frozen=True)
class Asker:
    """The questions over one context, fed with their right answers."""

    model: Model
    layout: Layout
    questions: Sequence[Question]

    @cached_property
    def _sequences(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of each question its tail, and the right answer with the token that ends it."""
        model = self.model
        return [
            (
                tuple(model.encode(make_frame(model, each.text).tail)),
                (*model.encode(" " + each.answer), *sorted(model.eos_ids)),
            )
            for each in self.questions
        ]

    def ask(self, placed: KV) -> list[Tensor]:
        """Log-probabilities of every question over a context [rotated keys], float64 [answer, vocab]."""
        stack, image = self.model.stack, Image(self.model.stack, self.layout)
        for layer in range(stack.num_layers):
            image.fill(layer, 0, *placed[:, layer])
        hidden = hidden_after_image(image, [tail + gold[:-1] for tail, gold in self._sequences])
        rows = zip(hidden, self._sequences, strict=True)
        return [
            stack.logits(row[len(tail) - 1 : len(tail) - 1 + len(gold)]).double().log_softmax(-1)
            for row, (tail, gold) in rows
        ]


def divergence(full: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[float, float]:
    """KL(full ‖ other) in nats, summed over the questions: of the first tokens, and of all tokens of the answers."""
    each = [(p.exp() * (p - q)).sum(-1).clamp_min(0) for p, q in zip(full, other, strict=True)]
    return float(sum(one[0] for one in each)), float(sum(one.sum() for one in each))


# KV, changes, and where they are


def placed_of(image: Image) -> KV:
    """KV of a linked prompt's context; keys are rotated."""
    end = image.layout.num_context
    layers = range(image.stack.num_layers)
    return torch.stack([
        torch.stack([image.key(layer)[0, :, :end] for layer in layers]),
        torch.stack([image.value(layer)[0, :, :end] for layer in layers]),
    ])  # fmt: skip


def rotated(stack: LayerStack, kv: KV, by: int = 1) -> KV:
    """KV with keys rotated to their places in the prompt; `by` -1: back."""
    tables, out = stack.rotary_tables(by * torch.arange(kv.shape[3])), kv.clone()
    for layer in range(stack.num_layers):
        out[0, layer] = stack.rotate(kv[0, layer][None], tables, layer)[0]
    return out


@torch.no_grad()
def read(stack: LayerStack, tokens: Tensor) -> Tensor:
    """Un-rotated KV of sequences [batch, n] that are read from their beginnings, [batch, 2, layers, kv_heads, n, d]."""
    tables = stack.rotary_tables(torch.arange(tokens.shape[1]))
    cache = CapturingCache(stack, tables)
    stack.layers(stack.embed(tokens), cache, tables, (Run(0, 0, tokens.shape[1]),))
    return torch.stack([torch.stack([layer[part] for layer in cache.layers], 1) for part in (0, 1)], 1)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a prompt, and what compiling them could keep beside their KV; tensors are un-rotated.

    Fields:
        stored: KV of the context as it is stored, [2, layers, kv_heads, N, d].
        spans: [start, end) of each chunk that is not exact anyway.
        probed: for each span the change after each probe, [probes, 2, layers, kv_heads, n, d].
        before: for each span the change after the page before it, [2, layers, kv_heads, n, d]; zero for the first.
        reordered: for each span the change among the same pages in another order.
    """

    stored: KV
    spans: Sequence[tuple[int, int]]
    probed: Sequence[Tensor]
    before: Sequence[KV]
    reordered: Sequence[KV]


def measure_chunks(model: Model, layout: Layout, stored: KV, seed: int) -> Chunks:
    """Read every chunk after its probes, after the page before it, and among all others in another order."""
    stack, probes = model.stack, probes_of(model, PROBES, PROBE_TOKENS)
    tokens, spans = torch.from_numpy(layout.tokens.astype(np.int64)), list(layout.chunks)
    order = random.Random(f"corrections {seed}").sample(range(len(spans)), len(spans))
    head = tokens[: layout.head[1]]
    there = read(stack, torch.cat([head, *(tokens[slice(*spans[index])] for index in order)])[None])[0]
    starts = dict(zip(order, np.cumsum([len(head), *(spans[i][1] - spans[i][0] for i in order)]), strict=False))
    probed, before, reordered = list[Tensor](), list[KV](), list[KV]()
    first = 0 if len(head) else 1
    for index, (start, end) in enumerate(spans[first:], first):
        own, alone, count = tokens[start:end], stored[:, :, :, start:end], end - start
        after = read(stack, torch.cat([probes.tokens, own.expand(PROBES, -1)], 1))[..., -count:, :]
        probed.append(after - alone)
        page = tokens[slice(*spans[index - 1])] if index else tokens[:0]
        before.append(read(stack, torch.cat([head, page, own])[None])[0][..., -count:, :] - alone)
        at = int(starts[index])
        reordered.append(there[..., at : at + count, :] - alone)
    return Chunks(stored, spans[first:], probed, before, reordered)


# Corrections


@dataclass(frozen=True)
class Seen:
    """What a linker has once rows are computed: `change` is theirs [2, layers, kv_heads, N, d], 0 elsewhere."""

    chunks: Chunks
    rows: Tensor  # bool [N]
    change: KV


class Correction(Protocol):
    """A prediction of every row's change. Those of computed rows are not used."""

    def __call__(self, seen: Seen) -> KV: ...

    def numbers(self, tokens: int, width: int) -> int:
        """How many numbers an object of so many tokens keeps for it, for K or V of a layer of `width` kv_heads · d."""
        ...


def flat(kv: Tensor) -> Tensor:
    """[…, kv_heads, n, d] → [n, … · kv_heads · d]."""
    return kv.movedim(-2, 0).flatten(1)


def low_rank(kv: Tensor, rank: int) -> Tensor:
    """The best approximation of each layer's K and of its V as matrices [n, kv_heads · d], in […, kv_heads, n, d]."""
    heads, width = kv.shape[-3], kv.shape[-1]
    matrix = kv.transpose(-3, -2).flatten(-2)  # [..., n, heads · d]
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]
    found: Tensor = kept.unflatten(-1, (heads, width)).transpose(-3, -2)
    return found


@dataclass(frozen=True)
class Ridge:
    """Kernel ridge on stored rows, each layer for itself.

    Fields:
        by_chunk: fit a chunk's rows alone, else all of the prompt's.
        by_head: from a head's own K and V to its own change, else all together.
        rank: of what the computed rows changed, as fitted.
        penalty: as a share of the kernel's mean diagonal.
    """

    by_chunk: bool = False
    by_head: bool = False
    rank: int = 2
    penalty: float = 1.0

    def __call__(self, seen: Seen) -> KV:
        found, spans = torch.zeros_like(seen.change), seen.chunks.spans
        groups = [slice(*span) for span in spans] if self.by_chunk else [slice(spans[0][0], spans[-1][1])]
        for group in groups:
            rows = seen.rows[group]
            if rows.any():
                self._fit(found[..., group, :], seen.change[..., group, :], seen.chunks.stored[..., group, :], rows)
        return found

    def numbers(self, tokens: int, width: int) -> int:
        return 0

    def _fit(self, out: Tensor, change: Tensor, stored: Tensor, rows: Tensor) -> None:
        heads = [slice(at, at + 1) for at in range(stored.shape[2])] if self.by_head else [slice(None)]
        for layer in range(1, stored.shape[1]):
            for head in heads:
                own = stored[:, layer, head]
                features = flat(own / own.square().mean((1, 2, 3), keepdim=True).sqrt()).double()
                known = features[rows]
                size = float(known.square().sum(1).mean())
                kernel = features @ known.T / size
                weights = kernel @ torch.linalg.inv(kernel[rows] + self.penalty * torch.eye(len(known)).double())
                target = low_rank(change[:, layer, head][:, :, rows], self.rank)
                out[:, layer, head] = torch.einsum("nr,phrd->phnd", weights.float(), target)


def coefficient(own: Tensor, change: Tensor, penalty: float) -> Tensor:
    """Least squares of rows' changes on what is known of them, [2, layers, kv_heads, rows, d] → [2, layers]."""
    power = own.square().sum((2, 3, 4))
    return (own * change).sum((2, 3, 4)) / (power * (1 + penalty)).clamp_min(1e-12)


@dataclass(frozen=True)
class Scaled:
    """A pattern of each chunk, times a coefficient for each layer's K and V, from the computed rows.

    Fields:
        pattern: of the changes after probes, [probes, 2, layers, kv_heads, n, d] → [2, layers, kv_heads, n, d].
        pooled: chunks without a computed row take the coefficient of all of the prompt's; else they stay as they are.
        penalty: as a share of the power of what is known of the computed rows.
    """

    pattern: Callable[[Tensor], KV]
    pooled: bool = True
    penalty: float = 1.0

    def numbers(self, tokens: int, width: int) -> int:
        return width + (tokens if self.pattern is leading_pattern else 0)

    def __call__(self, seen: Seen) -> KV:
        found = torch.zeros_like(seen.change)
        for (start, end), probed in zip(seen.chunks.spans, seen.chunks.probed, strict=True):
            found[..., start:end, :] = self.pattern(probed)
        own = coefficient(found[..., seen.rows, :], seen.change[..., seen.rows, :], self.penalty)
        for start, end in seen.chunks.spans:
            part, rows = found[..., start:end, :], seen.rows[start:end]
            of_chunk = coefficient(part[..., rows, :], seen.change[..., start:end, :][..., rows, :], self.penalty)
            scale = of_chunk if rows.any() else own * self.pooled
            found[..., start:end, :] = part * scale[:, :, None, None, None]
        return found


def mean_vector(probed: Tensor) -> KV:
    """The mean change over probes and tokens, at every token."""
    return probed.mean((0, -2), keepdim=True)[0].expand(probed.shape[1:])


def leading_vector(probed: Tensor) -> KV:
    """The leading direction of the changes over probes and tokens, as long as their root mean square."""
    samples = probed.permute(1, 2, 0, 4, 3, 5).flatten(2, 3).flatten(-2)  # [2, layers, probes · n, kv_heads · d]
    _, s, v = torch.linalg.svd(samples, full_matrices=False)
    direction = v[..., :1, :] * s[..., :1, None] / samples.shape[-2] ** 0.5
    shape = probed.shape[1:]
    vector: Tensor = direction.unflatten(-1, (shape[-3], shape[-1])).transpose(-3, -2)
    return vector.expand(shape)


def leading_pattern(probed: Tensor) -> KV:
    """The leading change over probes as one vector of all tokens, of rank 1."""
    samples = probed.movedim(0, -4).flatten(-3)  # [2, layers, probes, kv_heads · n · d]
    _, s, v = torch.linalg.svd(samples, full_matrices=False)
    pattern = v[..., 0, :] * s[..., :1] / len(probed) ** 0.5
    return low_rank(pattern.unflatten(-1, probed.shape[-3:]), 1)


@dataclass(frozen=True)
class Conditional:
    """A chunk's changes after its probes, with weights by ridge regression on its computed rows, all layers at once.

    Fields:
        rank: of each change as it is kept; None: whole.
        penalty: as a share of the mean diagonal of the regression's matrix.
    """

    rank: int | None = None
    penalty: float = 0.1

    def numbers(self, tokens: int, width: int) -> int:
        return PROBES * (tokens * width if self.rank is None else self.rank * (tokens + width))

    def __call__(self, seen: Seen) -> KV:
        found = torch.zeros_like(seen.change)
        for (start, end), probed in zip(seen.chunks.spans, seen.chunks.probed, strict=True):
            rows = seen.rows[start:end]
            if not rows.any():
                continue
            probed = probed if self.rank is None else low_rank(probed, self.rank)
            size = seen.chunks.stored.square().mean((2, 3, 4)).sqrt()[:, :, None, None, None]
            known = (probed[..., rows, :] / size).flatten(1).double()
            target = (seen.change[..., start:end, :][..., rows, :] / size).flatten().double()
            gram = known @ known.T
            eye = torch.eye(len(gram)).double() * gram.diagonal().mean() * self.penalty
            weights = torch.linalg.solve(gram + eye, known @ target)
            found[..., start:end, :] = torch.einsum("p,p...->...", weights.float(), probed)
        return found


@dataclass(frozen=True)
class Patch:
    """What the objects keep of one context, of a rank; None: they keep that KV in place of their own. Coefficient 1."""

    field: str  # of `Chunks`
    rank: int | None

    def numbers(self, tokens: int, width: int) -> int:
        return 0 if self.rank is None else self.rank * (tokens + width)

    def __call__(self, seen: Seen) -> KV:
        found = torch.zeros_like(seen.change)
        for (start, end), change in zip(seen.chunks.spans, getattr(seen.chunks, self.field), strict=True):
            found[..., start:end, :] = change if self.rank is None else low_rank(change, self.rank)
        return found


# Forms and penalties: those that `choose` found
CORRECTIONS: dict[str, Correction] = {
    "ridge, prompt": Ridge(by_chunk=False, by_head=False, rank=2, penalty=3.0),
    "ridge, chunk": Ridge(by_chunk=True, by_head=True, rank=1, penalty=1.0),
    "shift": Scaled(mean_vector, pooled=False, penalty=10.0),
    "shift, leading": Scaled(leading_vector, pooled=True, penalty=10.0),
    "pattern": Scaled(leading_pattern, pooled=False, penalty=10.0),
    "probes": Conditional(None, penalty=0.03),
    "probes, rank 1": Conditional(1, penalty=0.03),
    "before-1": Patch("before", 1),
    "before": Patch("before", None),
    "reordered-4": Patch("reordered", 4),
}


def families() -> dict[str, dict[str, Correction]]:
    """What `choose` chooses from: by variant, by its fields."""
    ridges = [
        Ridge(by_chunk, by_head, rank, penalty)
        for by_chunk, by_head, rank, penalty in product((False, True), (False, True), (1, 2), (0.3, 1.0, 3.0))
    ]
    scaled = {
        label: [Scaled(pattern, pooled, penalty) for pooled, penalty in product((False, True), (0.1, 1.0, 3.0, 10.0))]
        for label, pattern in (
            ("shift", mean_vector), ("shift, leading", leading_vector), ("pattern", leading_pattern)
        )
    }  # fmt: skip
    every: dict[str, Sequence[Correction]] = {
        "ridge, prompt": [each for each in ridges if not each.by_chunk],
        "ridge, chunk": [each for each in ridges if each.by_chunk],
        **scaled,
        "probes": [Conditional(None, penalty) for penalty in (0.03, 0.1, 0.3, 1.0)],
    }
    return {label: {fields_of(each): each for each in some} for label, some in every.items()}


def fields_of(correction: Any) -> str:
    values = {name: value for name, value in vars(correction).items() if name != "pattern"}
    return ", ".join(f"{name} {value}" for name, value in values.items())


# One prompt under every budget and correction


def corrected(stack: LayerStack, placed: KV, change: KV, at: Tensor) -> KV:
    """KV with a change (of un-rotated keys) added to the rows `at`, bool [N], in every layer but the first."""
    change = change * at[:, None]
    change[:, 0] = 0
    return placed + rotated(stack, change)


def compute_rows(stack: LayerStack, layout: Layout, placed: KV, rows: Tensor) -> KV:
    """KV of a context whose `rows` are computed over other rows' KV as given, as a linker does it."""
    image, at = Image(stack, layout), Rows.of(rows.nonzero()[:, 0])
    hidden = stack.embed(torch.from_numpy(layout.tokens[: len(rows)].astype(np.int64))[rows][None])
    for layer in range(stack.num_layers):
        image.fill(layer, 0, *placed[:, layer])
        hidden = image.compute(layer, hidden, at)
    return placed_of(image)


def oracle(stack: LayerStack, full: KV, placed: KV, spans: Sequence[tuple[int, int]], rank: int) -> KV:
    """What is missing to full recompute, of a rank in each chunk."""
    change = rotated(stack, full - placed, -1)
    found = torch.zeros_like(change)
    for start, end in spans:
        found[..., start:end, :] = low_rank(change[..., start:end, :], rank)
    return found


@dataclass(frozen=True)
class Case:
    """One prompt, linked by the package: objects that have tables, and KV of the context under each policy."""

    asker: Asker
    chunks: Chunks
    full: KV
    naive: KV
    fixup: dict[float, tuple[KV, Tensor]]  # by ratio: KV, and which rows were computed, bool [N]
    tokens: list[int]

    @property
    def stack(self) -> LayerStack:
        return self.asker.model.stack

    @property
    def all_rows(self) -> Tensor:
        return torch.ones(self.naive.shape[3], dtype=torch.bool)

    def seen(self, ratio: float) -> Seen:
        placed, rows = self.fixup[ratio]
        return Seen(self.chunks, rows, rotated(self.stack, placed - self.naive, -1) * rows[:, None])

    def patched(self, patch: Patch) -> KV:
        """`naive`, patched."""
        change = patch(Seen(self.chunks, ~self.all_rows, torch.zeros_like(self.naive)))
        return corrected(self.stack, self.naive, change, self.all_rows)

    def compute(self, placed: KV, rows: Tensor) -> KV:
        return compute_rows(self.stack, self.asker.layout, placed, rows)


@torch.no_grad()
def case_of(subject: Subject, size: int, index: int, per_kind: int = PER_KIND) -> Case:
    model, world = subject.model, subject.prompt(size, index)
    pages = [Chunk(page, model.encode(page), "page") for page in world.pages]
    questions = questions_of(world, per_kind)
    frame = make_frame(model, questions[0].text)

    def linked(policy: Policy) -> Linked:
        return link(model, store, pages, frame.tail, policy, head=frame.head)

    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        compile(model, store, pages, probes=PROBES, probe_model=model)
        full, naive = (linked(make_policy(name)).image for name in ("full", "naive"))
        fixup = {ratio: linked(make_policy("fixup", {"ratio": ratio})) for ratio in RATIOS}
    kv, layout = placed_of(naive), naive.layout
    chunks = measure_chunks(model, layout, rotated(model.stack, kv, -1), index)
    by_ratio = {
        ratio: (placed_of(each.image), torch.from_numpy(each.rows[0][: layout.num_context].copy()))
        for ratio, each in fixup.items()
    }
    return Case(Asker(model, layout, questions), chunks, placed_of(full), kv, by_ratio, [len(page) for page in pages])


@torch.no_grad()
def measure(case: Case, corrections: Mapping[str, Correction]) -> Iterator[tuple[str, tuple[float, float]]]:
    """By variant the sum of KL over one prompt's questions: of the first token, and of the answer."""
    stack, spans, best = case.stack, case.chunks.spans, case.asker.ask(case.full)

    def kl(placed: KV) -> tuple[float, float]:
        return divergence(best, case.asker.ask(placed))

    def by_oracle(placed: KV, rank: int) -> tuple[float, float]:
        return kl(corrected(stack, placed, oracle(stack, case.full, placed, spans, rank), case.all_rows))

    assert max(by_oracle(case.naive, WHOLE)) <= 1e-6 * len(best)  # the whole change gives full recompute
    patched = {label: case.patched(each) for label, each in corrections.items() if isinstance(each, Patch)}
    yield "naive", kl(case.naive)
    for rank in (1, 2):
        yield f"oracle-{rank}, no row", by_oracle(case.naive, rank)
    for label, placed in patched.items():
        yield f"{label}, no row", kl(placed)
    for ratio, (placed, rows) in case.fixup.items():
        seen = case.seen(ratio)
        yield f"fixup @ {ratio}", kl(placed)
        yield f"oracle-1 @ {ratio}", by_oracle(placed, 1)
        for label, correction in corrections.items():
            if label in patched:
                yield f"{label} @ {ratio}", kl(case.compute(patched[label], rows))
                continue
            change = correction(seen)
            yield f"{label} @ {ratio}", kl(corrected(stack, placed, change, ~rows))
            if label == "probes":
                over = corrected(stack, case.naive, change, ~rows)
                yield f"probes, again @ {ratio}", kl(case.compute(over, rows))


# Many prompts


def left(values: Numbers, naive: Numbers) -> list[float]:
    """What is left of naive's KL, and its interval."""
    low, high = interval(values, naive)
    return [round(float(values.sum() / naive.sum()), 4), low or 0.0, high or 0.0]


def summary_of(sums: Sequence[dict[str, tuple[float, float]]]) -> Record:
    """Of every variant: KL left of the first token and of answers; and the first less half of what fixup leaves."""
    first, answer = ({label: np.asarray([one[label][i] for one in sums]) for label in sums[0]} for i in (0, 1))
    found: Record = {}
    for label, values in first.items():
        found[label] = {
            "first": left(values, first["naive"]), "answer": left(answer[label], answer["naive"]),
        }  # fmt: skip
        if "@" in label:
            half = first[f"fixup @ {label.partition(' @ ')[2]}"] / 2
            found[label]["less_half_of_fixup"] = left(values - half, first["naive"])
    return found


def extra_bytes(cases: Sequence[Case]) -> Record:
    """Bytes a token beside float16 KV, of objects' mean: of the table, and of what each correction keeps."""
    _, layers, heads, _, width = cases[0].naive.shape
    lengths = [end - start for case in cases for start, end in case.chunks.spans]
    each = {
        label: HALF * 2 * (layers - 1) * sum(correction.numbers(n, heads * width) for n in lengths) / sum(lengths)
        for label, correction in CORRECTIONS.items()
    }
    found = {"KV": HALF * 2 * layers * heads * width, "table": HALF, **each}
    return {label: round(value, 1) for label, value in found.items()}


def earlier_results() -> Record:
    """What is in the results, but not of the last command's name and machine."""
    results: Record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {key: value for key, value in results.items() if key not in ("command", "machine")}


def measure_all(options: argparse.Namespace, kind: str, some: Sequence[Subject]) -> None:
    """Every variant on each model and size, all draws together; what is in the results already is kept."""
    results = earlier_results()
    for subject, size in product(some, SIZES):
        done = results.setdefault(kind, {}).setdefault(subject.name, {})
        if str(size) in done or (options.models and subject.name not in options.models):
            continue
        cases, sums = list[Case](), list[dict[str, tuple[float, float]]]()
        for seed in range(options.seeds):
            questions, number = 0, FRESH + 10_000 * seed
            while questions < options.questions:
                cases.append(case_of(subject, size, number))
                sums.append(dict(measure(cases[-1], CORRECTIONS)))
                questions, number = questions + len(cases[-1].asker.questions), number + 1
        done[str(size)] = {
            "prompts": len(cases), "questions": sum(len(case.asker.questions) for case in cases),
            "seeds": options.seeds, "tokens": round(float(np.mean([sum(case.tokens) for case in cases])), 1),
            "rows": {
                str(ratio): round(float(np.mean([int(case.fixup[ratio][1].sum()) for case in cases])), 2)
                for ratio in RATIOS
            },
            "bytes_a_token": extra_bytes(cases), "variants": summary_of(sums),
        }  # fmt: skip
        print(f"{subject.name} {size}: {done[str(size)]['questions']} questions", file=sys.stderr, flush=True)
        write_results(RESULTS, results)


def choose(options: argparse.Namespace) -> None:
    """Measure all fields of corrections on one model of the zoo, and say which leave least in the mean."""
    (subject,) = (each for each in subjects() if each.name == CHOSEN_ON)
    every = {f"{label}: {fields}": one for label, some in families().items() for fields, one in some.items()}
    of_size: dict[int, Record] = {}
    for size in SIZES:
        cases = (case_of(subject, size, CHOOSING + index) for index in range(options.prompts))
        of_size[size] = summary_of([dict(measure(case, every)) for case in cases])
    mean = {
        label: float(
            np.mean([each[f"{label} @ {ratio}"]["first"][0] for each, ratio in product(of_size.values(), RATIOS)])
        )
        for label in ("fixup", *every)
    }
    best = {label: min(some, key=lambda fields: mean[f"{label}: {fields}"]) for label, some in families().items()}
    for label, value in sorted(mean.items(), key=lambda item: item[1]):
        print(f"{100 * value:6.1f} {label}")
    chosen = {label: [fields, round(mean[f"{label}: {fields}"], 4)] for label, fields in best.items()}
    results = earlier_results()
    results["choice"] = {
        "model": CHOSEN_ON, "prompts": options.prompts, "fixup": round(mean["fixup"], 4), "chosen": chosen
    }  # fmt: skip
    write_results(RESULTS, results)


def table(_: argparse.Namespace) -> None:
    """Print by variant and ratio what `_cell` says, in %, and what objects keep beside their KV, in % of it."""
    results = json.loads(RESULTS.read_text())
    for kind in ("zoo", "hold_outs"):
        cases = [case for model in results.get(kind, {}).values() for case in model.values()]
        if not cases:
            continue
        labels = dict.fromkeys(label.partition(" @ ")[0] for label in cases[0]["variants"])
        print(f"\n{kind}: {len(cases)} cases, {sum(case['questions'] for case in cases)} questions\n")
        print("| variant | bytes kept, of KV | " + " | ".join(f"{ratio:.1%}" for ratio in RATIOS) + " |")
        print("|---|---|" + "---|" * len(RATIOS))
        for label in labels:
            kept = "table" if label == "fixup" else label.removesuffix(", no row").removesuffix(", again")
            keeps = [100 * case["bytes_a_token"].get(kept, 0) / case["bytes_a_token"]["KV"] for case in cases]
            cells = [_cell([case["variants"] for case in cases], f"{label} @ {ratio}") for ratio in RATIOS]
            alone = _cell([case["variants"] for case in cases], label)
            print(f"| {label} | {np.mean(keeps):.1f} % | " + " | ".join(cells if any(cells) else [alone]) + " |")


def _cell(cases: Sequence[Record], label: str) -> str:
    """KL left: mean of the cases; worst; mean of answers; how many leave half of fixup's or less, and surely do."""
    if label not in cases[0]:
        return ""
    found = [case[label] for case in cases]
    shares = [100 * each["first"][0] for each in found]
    text = f"{np.mean(shares):.1f}; {max(shares):.0f}; {np.mean([100 * each['answer'][0] for each in found]):.1f}"
    half = [each["less_half_of_fixup"] for each in found if "less_half_of_fixup" in each]
    return text + (f"; {sum(one[0] <= 0 for one in half)}, {sum(one[2] < 0 for one in half)}" if half else "")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("choose")
    command.add_argument("--prompts", type=int, default=14, help="of each size")
    command.set_defaults(run=choose)
    for kind, some in (("zoo", subjects), ("hold_outs", hold_outs)):
        command = commands.add_parser(kind.replace("_", "-"))
        command.add_argument("--questions", type=int, default=30, help="of each model, size and draw, at least")
        command.add_argument("--seeds", type=int, default=3)
        command.add_argument("--models", nargs="+", help="only these")
        command.set_defaults(run=lambda options, kind=kind, some=some: measure_all(options, kind, some()))
    commands.add_parser("table").set_defaults(run=table)
    options: Any = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()

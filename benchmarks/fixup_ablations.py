"""Ablations of the table of fixups: probes, their length and source, what varies, how it is summed, whose table it is.

    python -m benchmarks.fixup_ablations --out benchmarks/results

The embedded model, 8 chunks per prompt. Every variant chooses the same number of rows. Columns as in `fixups.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.asking import ask, kl
from benchmarks.fixups import SIZES, Record, opened, prompt_of, questions_of, summarise
from pictool import Chunk, Model, Store, link, make_policy
from pictool.compiler.sensitivity import PROBE_TOKENS
from pictool.linker.policies.base import Policy, Prompt, Selection, count_of, highest
from pictool.runtime.align import map_scores, tokenize
from pictool.runtime.attention import Run
from pictool.runtime.caches import CapturingCache
from pictool.runtime.machine import machine
from pictool.runtime.sensitivity import Probes, cut_at_lines, fixup_tables, probes_from, probes_of, write_texts
from pictool.world.generate import KINDS, Shape, write_prompt

RATIOS = (0.02, 0.05, 0.10, 0.20)
THRESHOLDS = (0.25, 0.5, 0.75, 1.0)
PLAIN_ENGLISH = Path("training/README.md")  # of no domain that the model knows


@dataclass(frozen=True)
class Given(Policy):
    """Rows that were chosen elsewhere."""

    name: ClassVar[str] = "given"
    reference: ClassVar[str] = "benchmarks"
    rows: tuple[bool, ...] = ()

    def select(self, prompt: Prompt) -> Selection:
        return Selection(np.asarray(self.rows))


@dataclass(frozen=True)
class Behind:
    """A chunk's KV behind probes, [layers, probes, heads, n, dim], alone [layers, heads, n, dim], and p [probes, n]."""

    key: Tensor
    value: Tensor
    key_alone: Tensor
    p: Tensor
    probes: Probes


@cache
def texts(source: str, count: int, length: int) -> Probes:
    """Probes of a source. `self`: the model's own text, cut at lines; `uncut`: cut anywhere."""
    model, draw = opened("embedded"), random.Random(f"ablation {source} {length}")
    if source == "self":
        return probes_of(model, count, length)
    if source == "uncut":
        return probes_from(model, write_texts(model, count, length, torch.Generator().manual_seed(length)))
    if source == "random":
        rows = [[draw.randrange(3, model.config.vocab_size) for _ in range(length - 1)] for _ in range(count)]
    elif source == "in-domain":
        worlds = [write_prompt(random.Random(f"ablation {i}"), 12, Shape()).pages for i in range(count)]
        whole = torch.tensor([[model.bos_id or 0, *model.encode("".join(pages))][: 3 * length] for pages in worlds])
        return probes_from(model, cut_at_lines(model, whole, length))
    else:
        words = model.encode(PLAIN_ENGLISH.read_text())
        rows = [list(words[start : start + length - 1]) for start in draw.sample(range(len(words) - length), count)]
    return probes_from(model, torch.tensor([[model.bos_id or 0, *row] for row in rows]))


def prefill(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Un-rotated K and V [layers, batch, heads, n, dim], and log-probabilities [batch, n, vocab]."""
    stack, length = model.stack, tokens.shape[1]
    tables = stack.rotary_tables(torch.arange(length))
    keep, hidden = CapturingCache(stack, tables), stack.embed(tokens)
    for layer in range(stack.num_layers):
        hidden = stack.layer(layer, hidden, keep, tables, (Run(0, 0, length),))
    keys, values = (torch.stack([pair[i] for pair in keep.layers]) for i in (0, 1))
    return keys, values, stack.logits(hidden.flatten(0, 1)).log_softmax(-1).view(*hidden.shape[:2], -1)


@cache
def behind(source: str, count: int, length: int, chunk: tuple[int, ...]) -> Behind:
    model, probes = opened("embedded"), texts(source, count, length)
    key, value, logp = prefill(model, torch.cat([probes.tokens, torch.tensor([chunk] * count)], 1))
    p = logp[:, length - 1 : -1].exp()[:, torch.arange(len(chunk)), list(chunk)]
    alone = prefill(model, torch.tensor([chunk]))[0][:, 0]
    return Behind(key[:, :, :, length:], value[:, :, :, length:], alone, p, probes)


def spread(probes: Probes, part: int) -> Tensor:
    """Variance of K (0) or V (1) over the probes' tokens, [layers, heads]."""
    held = torch.stack([pair[part] for pair in probes.layers])[:, :, :, 1:].transpose(1, 2).flatten(2, 3)
    return held.var(2, correction=0).sum(-1)


def energy(probes: Probes, part: int) -> Tensor:
    """Mean square of K (0) or V (1), [layers, heads]."""
    held = torch.stack([pair[part] for pair in probes.layers])[:, :, :, 1:].transpose(1, 2).flatten(2, 3)
    return held.square().sum(-1).mean(2)


def variance(found: Behind, part: int = 0) -> Tensor:
    """[layers ≥ 1, heads, n]."""
    return (found.value if part else found.key).var(1, correction=0).sum(-1)[1:]


def share(found: Behind, part: int = 0) -> Tensor:
    return variance(found, part) / spread(found.probes, part)[1:, :, None]


def deviation(found: Behind) -> Tensor:
    """Mean squared distance of K from that of the chunk alone, [layers ≥ 1, heads, n]."""
    apart = (found.key - found.key_alone[:, None]).square().sum(-1).mean(1)
    return (apart / spread(found.probes, 0)[:, :, None])[1:]


def tables(chunk: tuple[int, ...], text: str) -> dict[str, NDArray[np.float64]]:
    """The table of one chunk by every variant."""
    own = behind("self", 8, PROBE_TOKENS, chunk)
    new, key, value = 1 - own.p.mean(0), share(own), share(own, 1)
    found = {"as shipped: K, highest, 1 - p": key.amax((0, 1)) * new}
    for count in (2, 4, 16):
        found[f"{count} probes"] = scored("self", count, PROBE_TOKENS, chunk)
    for length in (20, 40, 120, 200):
        found[f"probes of {length} tokens"] = scored("self", 8, length, chunk)
    for source in ("uncut", "random", "in-domain", "other domain"):
        found[f"probes: {source}"] = scored(source, 8, PROBE_TOKENS, chunk)
    found["probes: random, of 200 tokens"] = scored("random", 8, 200, chunk)
    found["without 1 - p"] = key.amax((0, 1))
    found["1 - p alone"] = new
    found["V"] = value.amax((0, 1)) * new
    found["K and V"] = (key + value).amax((0, 1)) * new
    found["deviation from the KV alone, K"] = deviation(own).amax((0, 1)) * new
    found["deviation, without 1 - p"] = deviation(own).amax((0, 1))
    found["mean over layers and heads"] = key.mean((0, 1)) * new
    found["root mean square over layers and heads"] = key.square().mean((0, 1)).sqrt() * new
    for layer in range(len(key)):
        found[f"layer {layer + 1} only"] = key[layer].amax(0) * new
    found["divided by energy, not spread"] = (variance(own) / energy(own.probes, 0)[1:, :, None]).amax((0, 1)) * new
    found["not divided"] = variance(own).amax((0, 1)) * new
    found["issue 8's: K and V by energy, mean, random"] = first_recipe(chunk)
    return {name: table.double().numpy() for name, table in found.items()} | {"by the small model": by_small(text)}


def scored(source: str, count: int, length: int, chunk: tuple[int, ...]) -> Tensor:
    found = behind(source, count, length, chunk)
    return share(found).amax((0, 1)) * (1 - found.p.mean(0))


def first_recipe(chunk: tuple[int, ...]) -> Tensor:
    """Variance over 8 random probes of 200 tokens of K plus that of V, each by the layer's energy; mean of layers."""
    found = behind("random", 8, 200, chunk)
    parts = [variance(found, i).sum(1) / energy(found.probes, i)[1:].sum(1)[:, None] for i in (0, 1)]
    return (parts[0] + parts[1]).mean(0)


def by_small(text: str) -> NDArray[np.float64]:
    """The small model's table, mapped by the characters that tokens share."""
    small, model = opened("embedded-small"), opened("embedded")
    source, target = tokenize(small.tokenizer, [text]), tokenize(model.tokenizer, [text])
    ((_, table),) = fixup_tables(small, probes_of(small, 8, PROBE_TOKENS), [source.tokens.tolist()])
    return map_scores(table.astype(np.float32), source, target).astype(np.float64)


def measure(size: int, index: int, per_kind: int) -> dict[str, Record]:
    """One prompt: every variant at every ratio."""
    model, prompt = opened("embedded"), prompt_of(index, size, 8)
    pages = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    questions, records = questions_of(prompt, per_kind), {}
    each = [tables(page.tokens, page.text) for page in pages]
    behind.cache_clear()
    kinds = np.asarray([KINDS.index(question.kind) for question in questions])
    runs: list[tuple[str, Policy]] = [(name, make_policy(name, {})) for name in ("full", "naive")]
    for name in each[0]:
        scores = np.concatenate([[-1.0], *(one[name] for one in each)])  # the head is exact
        chosen = {ratio: highest(scores, count_of(ratio, len(scores))) for ratio in RATIOS}
        runs += [(f"{name} @ {ratio}", Given(tuple(rows.tolist()))) for ratio, rows in chosen.items()]
    with tempfile.TemporaryDirectory() as directory:
        full = None
        for label, policy in runs:
            got = ask(model, Store(directory), pages, questions, policy)
            full = got if full is None else full
            records[label] = {"right": got.right, "kl": kl(full, got), "rows": got.rows, "kinds": kinds}
    return records


def independent_rows(size: int, prompts: int) -> Record:
    """Share of rows that budget=auto computes where 8 documents have nothing to do with each other, by threshold."""
    model, shape = opened("embedded"), Shape(max_filler_sentences=SIZES[size])
    found: dict[str, list[float]] = {str(threshold): [] for threshold in THRESHOLDS}
    for index in range(prompts):
        pages = [write_prompt(random.Random(f"independent {size} {index} {i}"), 1, shape).pages[0] for i in range(8)]
        chunks = [Chunk(page, model.encode(page), "page") for page in pages]
        with tempfile.TemporaryDirectory() as directory:
            for threshold in THRESHOLDS:
                policy = make_policy("fixup", {"budget": "auto", "threshold": threshold})
                linked = link(model, Store(directory), chunks, "Question:", policy, head="<s>")
                found[str(threshold)].append(linked.recomputed / linked.image.layout.num_context)
    return {threshold: round(float(np.mean(each)), 4) for threshold, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for fixup_ablations.json")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--per-kind", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", type=int, default=[20, 60])
    arguments = parser.parse_args()
    found: Record = {"machine": machine(), "prompts": arguments.prompts, "sizes": {}}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for size in arguments.sizes:
            count = range(arguments.prompts)
            asked = pool.map(measure, [size] * len(count), count, [arguments.per_kind] * len(count))
            raw = []
            for number, one in enumerate(asked, 1):
                raw.append(one)
                print(f"{size}: {number} of {len(count)} prompts", file=sys.stderr, flush=True)
            rows = {
                label: summarise([r[label] for r in raw], [r["full"] for r in raw], [r["naive"] for r in raw])
                for label in raw[0]
            }
            found["sizes"][str(size)] = {
                "questions": sum(len(r["full"]["right"]) for r in raw),
                "variants": rows,
                "auto_on_independent_documents": independent_rows(size, arguments.prompts),
            }
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "fixup_ablations.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The study of fixup tables (docs/studies/fixups.md): what they win back and cost, and other ways to make them.

    python -m benchmarks.fixups quality --model embedded   # every policy, by rows        → fixups-embedded.json
    python -m benchmarks.fixups ablations                  # other ways to make tables    → fixup_ablations.json
    python -m benchmarks.fixups probe-models               # tables of a smaller model    → fixup_probe_models.json
    python -m benchmarks.fixups reading                    # tables by a second reading   → fixup_reading.json
    python -m benchmarks.fixups compile                    # what tables cost to compile  → fixup_compile.json
    python -m benchmarks.fixups plot                       # fixups-embedded.json         → docs/images/fixups.svg

Prompts are held-out worlds: chunks of about 20, 60 and 200 tokens, 4 to 16 of them. Right: the whole greedy answer. Won
back: of the answers that naive reuse loses against full recompute. KL: of the first token's distribution from that of
full, in nats. Rows: mean share of context rows computed per layer. Intervals: 95 %, bootstrap over prompts.

TTFT of fixup at as many rows as legolink: `pic bench --algo legolink-51 --algo fixup:ratio=0.0871`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.output import write_results
from benchmarks.pictures import plot_style
from pictool import Chunk, Model, Policy, Store, compile, link, load_model, make_policy, wrap_model
from pictool.bench.prompts import random_chunks
from pictool.bench.repeats import interleave
from pictool.bench.shapes import random_module, shape_of
from pictool.compiler.align import map_scores, tokenize
from pictool.compiler.sensitivity import PROBE_TOKENS, PROBES, probe_tokens
from pictool.eval.statistics import ratio_interval
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.policies.base import Prompt, Selection, count_of, highest
from pictool.runtime.attention import Run
from pictool.runtime.chat.template import make_frame
from pictool.runtime.memory.caches import CapturingCache, PrefixedCache
from pictool.runtime.memory.image import Image
from pictool.runtime.rope import tables_at
from pictool.runtime.sensitivity import Probes, cut_at_lines, fixup_tables, probes_from, probes_of, write_texts
from training.score import HELD_OUT
from training.world.generate import KINDS, PageShape, Question, write_prompt
from training.world.generate import WorldPrompt as World

SIZES = {20: 0, 60: 6, 200: 30}  # tokens of a chunk, about → sentences of filler per page, at most
CHUNKS = (4, 8, 16)
RESULTS = Path("benchmarks/results")
Numbers = NDArray[np.float64]
Record = dict[str, Any]  # of one prompt under one variant: right, kl, kinds [questions], and rows
Tables = dict[str, Numbers]  # of one chunk, by variant


# Prompts, and answers to all questions of a prompt at once


@cache
def loaded(name: str) -> Model:
    torch.set_num_threads(1)
    return load_model(name, device="cpu")


def write_world(index: int, size: int, chunks: int) -> World:
    """A prompt that nothing was trained on; a draw that runs out of names is drawn again."""
    for attempt in range(100):
        with suppress(IndexError):
            draw = random.Random(f"{HELD_OUT}-fixups-{size}-{chunks}-{index}-{attempt}")
            return write_prompt(draw, chunks, PageShape(max_filler_sentences=SIZES[size]))
    raise AssertionError(f"the names of the world are too few for {chunks} chunks")


def pages_of(model: Model, world: World) -> list[Chunk]:
    return [Chunk(page, model.encode(page), "page") for page in world.pages]


def questions_of(world: World, per_kind: int) -> list[Question]:
    return [question for kind in KINDS for question in [q for q in world.questions if q.kind == kind][:per_kind]]


@dataclass(frozen=True)
class Answers:
    """The answers to all questions over one linked context.

    Fields:
        first: log-probabilities of the first token, float64 [questions, vocab].
        right: 1 if the greedy answer is right, [questions].
        rows: mean share of context rows that were computed per layer.
    """

    first: Tensor
    right: Numbers
    rows: float

    def kl(self, full: Answers) -> Numbers:
        """KL(full ‖ this) of every question's first token, in nats."""
        each: Numbers = (full.first.exp() * (full.first - self.first)).sum(-1).clamp_min(0).numpy()
        return each


def answer(
    model: Model, store: Store, chunks: Sequence[Chunk], questions: Sequence[Question], policy: Policy,
    sinks: int | None = None,
) -> Answers:  # fmt: skip
    """Link for the first question, then answer all questions over its context: its KV does not depend on the tail.

    Greedy decoding gives the right answer if, fed with it, the model prefers each of its tokens and then ends.
    """
    frames = [make_frame(model, question.text) for question in questions]
    linked = link(model, store, chunks, frames[0].tail, policy, head=frames[0].head, sinks=sinks)
    tails = [model.encode(frame.tail) for frame in frames]
    golds = [(*model.encode(" " + question.answer), *sorted(model.eos_ids)) for question in questions]
    hidden = hidden_after_image(linked.image, [tail + gold[:-1] for tail, gold in zip(tails, golds, strict=True)])
    logits = [
        model.stack.logits(row[len(tail) - 1 : len(tail) - 1 + len(gold)])
        for row, tail, gold in zip(hidden, tails, golds, strict=True)
    ]
    assert linked.image.logits is not None
    assert float((logits[0][0] - linked.image.logits).abs().max()) < 1e-3  # the same as one question at a time
    right = [each.argmax(-1).tolist() == list(gold) for each, gold in zip(logits, golds, strict=True)]
    first = torch.stack([each[0] for each in logits]).double().log_softmax(-1)
    return Answers(first, np.asarray(right, dtype=float), linked.recomputed / linked.image.layout.num_context)


def hidden_after_image(image: Image, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Hidden states [sequences, longest, hidden] of token sequences that come after the context of an image."""
    stack = image.stack
    start, longest = image.layout.num_context, max(map(len, sequences))
    tokens = torch.tensor([[*tokens, *[tokens[-1]] * (longest - len(tokens))] for tokens in sequences])
    rows = tables_at(stack.rotary_tables(torch.arange(start + longest)), slice(start, None))
    context = {
        layer: (image.key(layer)[:, :, :start], image.value(layer)[:, :, :start]) for layer in range(stack.num_layers)
    }
    runs = (Run(0, start, start + longest),)
    return stack.layers(stack.embed(tokens), PrefixedCache(stack, rows, context), rows, runs)


def records_of(answers: Mapping[str, Answers], questions: Sequence[Question]) -> dict[str, Record]:
    """By variant, what one prompt gave; `full` is among the variants."""
    kinds = np.asarray([KINDS.index(question.kind) for question in questions])
    return {
        label: {"right": each.right, "kl": each.kl(answers["full"]), "rows": each.rows, "kinds": kinds}
        for label, each in answers.items()
    }


# Summaries over prompts


def interval(values: Numbers, base: Numbers) -> list[float | None]:
    """95 % bootstrap interval of Σ values ÷ Σ base, over prompts."""
    if not np.abs(values).any():
        return [0.0, 0.0]
    return [None, None] if len(values) < 2 else [round(bound, 4) for bound in ratio_interval(values, base)]


def summarise(records: Sequence[Record], full: Sequence[Record], naive: Sequence[Record]) -> Record:
    """Of one variant's records, one a prompt."""
    count = np.asarray([len(record["right"]) for record in records], dtype=float)
    right, best, worst = (np.asarray([each["right"].sum() for each in several]) for several in (records, full, naive))
    kl = np.asarray([record["kl"].sum() for record in records])
    hits, kinds = (np.concatenate([record[field] for record in records]) for field in ("right", "kinds"))
    lost = best.sum() - worst.sum()
    return {
        "rows": round(float(np.mean([record["rows"] for record in records])), 4),
        "right": round(float(right.sum() / count.sum()), 4),
        "right_interval": interval(right, count),
        "won_back": round(float((right - worst).sum() / lost), 4) if lost else None,
        "won_back_interval": interval(right - worst, best - worst) if lost else [None, None],
        "kl": round(float(kl.sum() / count.sum()), 5),
        "kl_interval": interval(kl, count),
        "by_kind": {
            kind: round(float(hits[kinds == i].mean()), 4) for i, kind in enumerate(KINDS) if (kinds == i).any()
        },
    }


def summarise_all(prompts: Sequence[Mapping[str, Record]]) -> dict[str, Record]:
    """Of every variant."""
    full, naive = ([records[label] for records in prompts] for label in ("full", "naive"))
    return {label: summarise([records[label] for records in prompts], full, naive) for label in prompts[0]}


def count_questions(prompts: Sequence[Mapping[str, Record]]) -> int:
    return sum(len(records["full"]["right"]) for records in prompts)


def run_prompts(
    pool: Executor, title: str, measure: Callable[..., dict[str, Record]], jobs: Iterable[tuple[Any, ...]]
) -> list[dict[str, Record]]:
    """The records of every prompt; `jobs` are the arguments of `measure`."""
    futures, prompts = [pool.submit(measure, *job) for job in jobs], []
    for number, future in enumerate(futures, 1):
        prompts.append(future.result())
        print(f"{title}: {number} of {len(futures)} prompts", file=sys.stderr, flush=True)
    return prompts


# quality: every policy, by rows. Every model makes its tables itself.


def policies_for(model: str) -> list[LabelledPolicy]:
    """Every policy, `full` first. Each embedded model is the other's speculative model."""
    spec, ratios = ":spec_model=embedded" if model == "embedded-small" else "", "0.01,0.02,0.03,0.05,0.1,0.15,0.2,0.3"
    return parse_grid([
        "full", "naive", "legolink-0", "legolink:k=1,2,4,6,8,12,16,24,32,64",
        f"cacheblend:ratio={ratios}", f"speccache:ratio={ratios}{spec}", f"fixup:ratio={ratios},0.4,0.5",
        "fixup:ratio=0.02,0.05:budget=chunk", "fixup:budget=auto:threshold=0.25,0.5,0.75,1.0",
        "fixup:ratio=0.02,0.05:first=1,4",
    ])  # fmt: skip


def measure_policies(name: str, size: int, chunks: int, index: int, per_kind: int) -> dict[str, Record]:
    """One prompt under every policy, and fixup over objects that were compiled with sinks."""
    model, world = loaded(name), write_world(index, size, chunks)
    pages, questions = pages_of(model, world), questions_of(world, per_kind)
    variants: list[tuple[str, Policy, int | None]] = [(each.label, each.policy, None) for each in policies_for(name)]
    variants += [(f"{each.label} sinks=4", each.policy, 4) for each in parse_grid(["fixup-2", "fixup-5"])]
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        for sinks in (0, 4):
            compile(model, store, pages, probes=PROBES, sinks=sinks, probe_model=model)
        reply = partial(answer, model, store, pages, questions)
        answers = {label: reply(policy, sinks) for label, policy, sinks in variants}
    tokens = float(np.mean([len(page) for page in pages]))
    return {label: {**record, "tokens": tokens} for label, record in records_of(answers, questions).items()}


def quality(options: argparse.Namespace, pool: Executor) -> None:
    results: Record = {"prompts": options.prompts, "per_kind": options.per_kind, "sizes": {}}
    for size in options.sizes:
        jobs = [(chunks, i) for chunks in sorted(CHUNKS, reverse=True) for i in reversed(range(_count(options, size)))]
        arguments = [(options.model, size, chunks, i, options.per_kind) for chunks, i in jobs]
        prompts = run_prompts(pool, f"{options.model} {size}", measure_policies, arguments)
        by_chunks = {
            f"{chunks} chunks": [prompt for prompt, job in zip(prompts, jobs, strict=True) if job[0] == chunks]
            for chunks in CHUNKS
        }
        each = {"all": prompts, **by_chunks}
        results["sizes"][str(size)] = {name: _quality_summary(some, options.model) for name, some in each.items()}
        write_results(options.out / f"fixups-{options.model}.json", results)


def _quality_summary(prompts: list[dict[str, Record]], model: str) -> Record:
    policies = summarise_all(prompts)
    return {
        "prompts": len(prompts),
        "questions": count_questions(prompts),
        "tokens_per_chunk": round(float(np.mean([records["full"]["tokens"] for records in prompts])), 1),
        "policies": policies,
        "thirds": rows_at_equal_kl(policies, policies_for(model)),
    }


def rows_at_equal_kl(summaries: Mapping[str, Record], policies: Sequence[LabelledPolicy]) -> list[Record]:
    """For every KL that another policy reaches at least rows: the rows that fixup needs for it.

    Only points with fewer rows than any other one of no larger KL count. Fixup's rows are those of the smallest ratio
    measured that is no farther from full; None if none is.
    """
    points = {each.label: (summaries[each.label]["rows"], summaries[each.label]["kl"]) for each in policies}
    others = {each.label: points[each.label] for each in policies if each.policy.name not in ("full", "fixup")}
    fixups = [each for each in policies if each.policy.name == "fixup"]
    plain = [points[each.label] for each in fixups if each.policy == _fixup(each.policy.params["ratio"])]
    best = []
    for label, (rows, kl) in others.items():
        if 0 < rows < 1 and not any(other_rows < rows and other_kl <= kl for other_rows, other_kl in others.values()):
            needed = min((own_rows for own_rows, own_kl in plain if own_kl <= kl), default=None)
            share = None if needed is None else round(needed / rows, 3)
            best.append({"policy": label, "rows": rows, "kl": kl, "fixup_rows": needed, "share": share})
    return sorted(best, key=lambda point: (point["rows"], point["kl"]))


def _fixup(ratio: float) -> Policy:
    """Fixup of this ratio, all other fields at their defaults."""
    return make_policy("fixup", {"ratio": ratio})


# probe-models: tables that the embedded model makes itself against those of the small one.

PROBED_BY = (("embedded", 8), ("embedded-small", 8), ("embedded-small", 4))  # who measures, after how many probes


def measure_probe_models(size: int, chunks: int, index: int, per_kind: int) -> dict[str, Record]:
    """One prompt: full, naive, and fixup at every ratio by every table."""
    model, world = loaded("embedded"), write_world(index, size, chunks)
    pages, questions = pages_of(model, world), questions_of(world, per_kind)
    with tempfile.TemporaryDirectory() as directory:
        reply = partial(answer, model, Store(directory), pages, questions)
        answers = {name: reply(make_policy(name)) for name in ("full", "naive")}
        for name, probes in PROBED_BY:
            compile(model, Store(directory), pages, probes=probes, probe_model=loaded(name))
            for each in parse_grid(["fixup:ratio=0.01,0.02,0.03,0.05,0.1,0.15,0.2"]):
                answers[f"{each.label} by {name}, {probes} probes"] = reply(each.policy)
    return records_of(answers, questions)


def probe_models(options: argparse.Namespace, pool: Executor) -> None:
    results: Record = {"prompts": options.prompts, "per_kind": options.per_kind, "sizes": {}}
    for size in options.sizes:
        jobs = [(size, chunks, i, options.per_kind) for i in range(_count(options, size)) for chunks in CHUNKS]
        prompts = run_prompts(pool, str(size), measure_probe_models, jobs)
        results["sizes"][str(size)] = {
            "prompts": len(prompts), "questions": count_questions(prompts), "policies": summarise_all(prompts)
        }  # fmt: skip
        write_results(options.out / "fixup_probe_models.json", results)


# ablations and reading: other tables. Every variant selects the same number of rows.

TABLE_RATIOS = (0.02, 0.05, 0.10, 0.20)
THRESHOLDS = (0.25, 0.5, 0.75, 1.0)
OTHER_TEXT = Path("training/README.md")  # of a domain that the model does not know
OPENING = "Question: "  # of the embedded models' tail


@dataclass(frozen=True)
class FixedRows(Policy):
    """Rows of the context that were selected elsewhere."""

    name: ClassVar[str] = "fixed-rows"
    reference: ClassVar[str] = "benchmarks"
    rows: tuple[bool, ...] = ()

    def select(self, prompt: Prompt) -> Selection:
        return Selection(np.asarray(self.rows))


def measure_tables(
    tables_of: Callable[[str, Chunk], Tables], name: str, size: int, index: int, per_kind: int
) -> dict[str, Record]:
    """One prompt of 8 chunks: full, naive, and the rows of every table's highest scores at every ratio."""
    model, world = loaded(name), write_world(index, size, 8)
    pages, questions = pages_of(model, world), questions_of(world, per_kind)
    tables = [tables_of(name, page) for page in pages]
    after_probes.cache_clear()
    variants: dict[str, Policy] = {label: make_policy(label) for label in ("full", "naive")}
    for label in tables[0]:
        scores = np.concatenate([[-1.0], *(table[label] for table in tables)])  # the head, one token, is exact
        for ratio in TABLE_RATIOS:
            rows = highest(scores, count_of(ratio, len(scores)))
            variants[f"{label} @ {ratio}"] = FixedRows(tuple(rows.tolist()))
    with tempfile.TemporaryDirectory() as directory:
        reply = partial(answer, model, Store(directory), pages, questions)
        return records_of({label: reply(policy) for label, policy in variants.items()}, questions)


@dataclass(frozen=True)
class AfterProbes:
    """A chunk's KV after probes, [layers, probes, heads, n, dim], alone [layers, heads, n, dim], and p [probes, n]."""

    key: Tensor
    value: Tensor
    key_alone: Tensor
    p: Tensor
    probes: Probes

    def share(self, part: int = 0) -> Tensor:
        """The variance of K (0) or V (1) over the probes by their spread, [layers ≥ 1, heads, n]."""
        return self.variance(part) / _over_tokens(self.probes, part).var(2, correction=0).sum(-1)[1:, :, None]

    def variance(self, part: int = 0) -> Tensor:
        """[layers ≥ 1, heads, n]."""
        return (self.value if part else self.key).var(1, correction=0).sum(-1)[1:]

    def energy(self, part: int = 0) -> Tensor:
        """The mean square of K (0) or V (1) of the probes, [layers ≥ 1, heads]."""
        return _over_tokens(self.probes, part).square().sum(-1).mean(2)[1:]

    def deviation(self) -> Tensor:
        """Mean squared distance of K from that of the chunk alone, by the spread, [layers ≥ 1, heads, n]."""
        distance = (self.key - self.key_alone[:, None]).square().sum(-1).mean(1)
        return (distance / _over_tokens(self.probes, 0).var(2, correction=0).sum(-1)[:, :, None])[1:]

    def score(self) -> Tensor:
        """As tables are made: the highest share, by 1 - p; [n]."""
        return self.share().amax((0, 1)) * (1 - self.p.mean(0))


def _over_tokens(probes: Probes, part: int) -> Tensor:
    """K (0) or V (1) of all probes' tokens but the first ones, [layers, heads, tokens, dim]."""
    return torch.stack([pair[part] for pair in probes.layers])[:, :, :, 1:].transpose(1, 2).flatten(2, 3)


@cache
def after_probes(source: str, count: int, length: int, chunk: tuple[int, ...]) -> AfterProbes:
    model, probes = loaded("embedded"), make_probes(source, count, length)
    key, value, logp = _prefill(model, torch.cat([probes.tokens, torch.tensor([chunk] * count)], 1))
    p = logp[:, length - 1 : -1].exp()[:, torch.arange(len(chunk)), list(chunk)]
    alone = _prefill(model, torch.tensor([chunk]))[0][:, 0]
    return AfterProbes(key[:, :, :, length:], value[:, :, :, length:], alone, p, probes)


def _prefill(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Un-rotated K and V [layers, batch, heads, n, dim], and log-probabilities [batch, n, vocab]."""
    stack, length = model.stack, tokens.shape[1]
    tables = stack.rotary_tables(torch.arange(length))
    cache = CapturingCache(stack, tables)
    hidden = stack.layers(stack.embed(tokens), cache, tables, (Run(0, 0, length),))
    keys, values = (torch.stack([pair[part] for pair in cache.layers]) for part in (0, 1))
    return keys, values, stack.logits(hidden.flatten(0, 1)).log_softmax(-1).view(*hidden.shape[:2], -1)


@cache
def make_probes(source: str, count: int, length: int) -> Probes:
    """Probes of a source. `self`: the model's own text, cut at lines; `uncut`: cut anywhere."""
    model, draw = loaded("embedded"), random.Random(f"ablation {source} {length}")
    if source == "self":
        return probes_of(model, count, length)
    if source == "uncut":
        return probes_from(model, write_texts(model, count, length, torch.Generator().manual_seed(length)))
    if source == "random":
        rows = [[draw.randrange(3, model.config.vocab_size) for _ in range(length - 1)] for _ in range(count)]
    elif source == "in-domain":
        worlds = [write_prompt(random.Random(f"ablation {i}"), 12, PageShape()).pages for i in range(count)]
        texts = torch.tensor([[model.bos_id or 0, *model.encode("".join(pages))][: 3 * length] for pages in worlds])
        return probes_from(model, cut_at_lines(model, texts, length))
    else:
        words = model.encode(OTHER_TEXT.read_text())
        rows = [list(words[start : start + length - 1]) for start in draw.sample(range(len(words) - length), count)]
    return probes_from(model, torch.tensor([[model.bos_id or 0, *row] for row in rows]))


def ablation_tables(_: str, page: Chunk) -> Tables:
    """Tables of a page of the embedded model: probes, their length and source, what varies, how it is summed."""
    length, chunk = PROBE_TOKENS, page.tokens
    own = after_probes("self", 8, length, chunk)
    new, key, value = 1 - own.p.mean(0), own.share(), own.share(1)
    tables = {"as shipped: K, highest, 1 - p": own.score()}
    tables |= {f"{n} probes": after_probes("self", n, length, chunk).score() for n in (2, 4, 16)}
    tables |= {f"probes of {n} tokens": after_probes("self", 8, n, chunk).score() for n in (20, 40, 120, 200)}
    for source in ("uncut", "random", "in-domain", "other domain"):
        tables[f"probes: {source}"] = after_probes(source, 8, length, chunk).score()
    random_200 = after_probes("random", 8, 200, chunk)
    first_parts = [random_200.variance(i).sum(1) / random_200.energy(i).sum(1)[:, None] for i in (0, 1)]
    tables |= {
        "probes: random, of 200 tokens": random_200.score(),
        "without 1 - p": key.amax((0, 1)),
        "1 - p alone": new,
        "V": value.amax((0, 1)) * new,
        "K and V": (key + value).amax((0, 1)) * new,
        "deviation from the KV alone, K": own.deviation().amax((0, 1)) * new,
        "deviation, without 1 - p": own.deviation().amax((0, 1)),
        "mean over layers and heads": key.mean((0, 1)) * new,
        "root mean square over layers and heads": key.square().mean((0, 1)).sqrt() * new,
        **{f"layer {layer} only": of_layer.amax(0) * new for layer, of_layer in enumerate(key, 1)},
        "divided by energy, not spread": (own.variance() / own.energy()[:, :, None]).amax((0, 1)) * new,
        "not divided": own.variance().amax((0, 1)) * new,
        "issue 8's: K and V by energy, mean, random": (first_parts[0] + first_parts[1]).mean(0),
    }
    return {name: table.double().numpy() for name, table in tables.items()} | {"by the small model": _by_small(page)}


def _by_small(page: Chunk) -> Numbers:
    """The small model's table, mapped by the characters that tokens share."""
    small, model = loaded("embedded-small"), loaded("embedded")
    source, target = tokenize(small.tokenizer, [page.text]), tokenize(model.tokenizer, [page.text])
    ((_, table),) = fixup_tables(small, probes_of(small, 8, PROBE_TOKENS), [source.tokens.tolist()])
    return map_scores(table.astype(np.float32), source, target).astype(np.float64)


def independent_rows(size: int, prompts: int) -> Record:
    """Share of rows that budget=auto computes where 8 documents have nothing to do with each other, by threshold."""
    model, shape = loaded("embedded"), PageShape(max_filler_sentences=SIZES[size])
    shares: dict[str, list[float]] = {str(threshold): [] for threshold in THRESHOLDS}
    for index in range(prompts):
        pages = [write_prompt(random.Random(f"independent {size} {index} {i}"), 1, shape).pages[0] for i in range(8)]
        chunks = [Chunk(page, model.encode(page), "page") for page in pages]
        with tempfile.TemporaryDirectory() as directory:
            for threshold in THRESHOLDS:
                policy = make_policy("fixup", {"budget": "auto", "threshold": threshold})
                linked = link(model, Store(directory), chunks, "Question:", policy, head="<s>")
                shares[str(threshold)].append(linked.recomputed / linked.image.layout.num_context)
    return {threshold: round(float(np.mean(each)), 4) for threshold, each in shares.items()}


def ablations(options: argparse.Namespace, pool: Executor) -> None:
    results: Record = {"prompts": options.prompts, "sizes": {}}
    for size in options.sizes:
        jobs = [(ablation_tables, "embedded", size, i, options.per_kind) for i in range(options.prompts)]
        prompts = run_prompts(pool, str(size), measure_tables, jobs)
        results["sizes"][str(size)] = {
            "questions": count_questions(prompts), "variants": summarise_all(prompts),
            "auto_on_independent_documents": independent_rows(size, options.prompts),
        }  # fmt: skip
        write_results(options.out / "fixup_ablations.json", results)


def reading_tables(name: str, page: Chunk) -> Tables:
    """Tables of a page by a second reading: by the model itself, and of the embedded model by the small one and both.

    After every probe the chunk is read once more, where a question would come; the most that any token of the second
    reading attends to a token of the first is its importance (KVzip, Kim et al. 2025, reconstruction). A key that
    varies counts for as much as it is read. It costs more than another prefill.
    """
    model = loaded(name)
    tables = {f"itself, {label}": table for label, table in _read_twice(model, page.tokens).items()}
    if name == "embedded":
        small = loaded("embedded-small")
        source, target = tokenize(small.tokenizer, [page.text]), tokenize(model.tokenizer, [page.text])
        for label, table in _read_twice(small, source.tokens.tolist()).items():
            tables[f"embedded-small, {label}"] = map_scores(table.astype(np.float32), source, target).astype(float)
        label = f"{PROBES} probes"
        tables[f"sum of both, {label}"] = tables[f"itself, {label}"] + tables[f"embedded-small, {label}"]
    return tables


@torch.inference_mode()
def _read_twice(model: Model, chunk: Sequence[int]) -> Tables:
    """Tables by the share of the variance, and by how much is read. The models have as many KV heads as heads."""
    probes, stack = probes_of(model, PROBES, PROBE_TOKENS), model.stack
    start, end = probes.length, probes.length + len(chunk)
    both = torch.tensor([[*chunk, *model.encode(OPENING), *chunk]]).expand(PROBES, -1)
    tokens = torch.cat([probes.tokens, both], 1)
    tables, read = stack.rotary_tables(torch.arange(tokens.shape[1])), list[Tensor]()

    def keep_importance(scores: Tensor) -> None:
        read.append(scores.softmax(-1)[:, :, end:, start:end].amax((0, 2)))  # [heads, n]

    cache = CapturingCache(stack, tables)
    hidden = stack.layers(stack.embed(tokens), cache, tables, (Run(0, 0, tokens.shape[1]),), keep_importance)
    variance = torch.stack([key for key, _ in cache.layers])[:, :, :, start:end].var(1, correction=0).sum(-1)
    share, importance = (variance / torch.stack(probes.spread)[:, :, None])[1:], torch.stack(read[1:])
    p = stack.logits(hidden[:, start - 1 : end - 1].flatten(0, 1)).softmax(-1).view(PROBES, len(chunk), -1)
    new = 1 - p[:, torch.arange(len(chunk)), list(chunk)].mean(0)
    by_label = {
        "": share, ", read again: sqrt(var) · read": share.sqrt() * importance,
        ", read again: var · read": share * importance,
        ", read again: sqrt(var) · (read + 0.3)": share.sqrt() * (importance + 0.3),
    }  # fmt: skip
    return {f"{PROBES} probes{label}": (x.amax((0, 1)) * new).double().numpy() for label, x in by_label.items()}


def reading(options: argparse.Namespace, pool: Executor) -> None:
    results: Record = {"prompts": options.prompts, "found": {}}
    for size, name in [(size, name) for size in options.sizes for name in ("embedded", "embedded-small")]:
        title = f"{name} {size}"
        jobs = [(reading_tables, name, size, i, options.per_kind) for i in range(options.prompts)]
        prompts = run_prompts(pool, title, measure_tables, jobs)
        results["found"][title] = {"questions": count_questions(prompts), "variants": summarise_all(prompts)}
        write_results(options.out / "fixup_reading.json", results)


# compile: what tables cost, as multiples of the plain compile. Probes are made before the clock starts. The least of
# interleaved repeats counts: what is compared is the work, and other processes only add to it.

DOCUMENTS = Path("fixtures/docs")
SHAPE_SHARE = 4  # of a shape a quarter of the layers and of the vocabulary, so that ratios are those of the whole


def compile_times(
    model: Model, chunks: list[Chunk], counts: Sequence[int], repeats: int, measurer: Model
) -> dict[str, Any]:
    """Seconds of compiling by number of probes, and as multiples of the plain compile."""
    for count in counts:
        if count:
            probes_of(measurer, count, probe_tokens(measurer))

    def seconds_of(count: int) -> float:
        with tempfile.TemporaryDirectory() as directory:
            started = time.perf_counter()
            compile(model, Store(directory), chunks, probes=count, probe_model=measurer)
            return time.perf_counter() - started

    raw = interleave({str(count): partial(seconds_of, count) for count in counts}, repeats)
    least = {count: min(seconds) for count, seconds in raw.items()}
    times = {count: round(seconds / least["0"], 2) for count, seconds in least.items()}
    return {"seconds": least, "times_plain": times, "raw": raw}


def part_of_shape(name: str, seed: int) -> Model:
    """A random model of a part of a shape's layers and vocabulary, with the embedded model's tokenizer."""
    whole = shape_of(name).make_config()
    layers, vocabulary = whole.num_hidden_layers // SHAPE_SHARE, whole.vocab_size // SHAPE_SHARE
    config = shape_of(name).make_config(
        num_hidden_layers=layers, vocab_size=vocabulary, bos_token_id=0, eos_token_id=1
    )  # fmt: skip
    return wrap_model(random_module(config, "cpu", "float32", seed), loaded("embedded").tokenizer, f"part of {name}")


def compile_cost(options: argparse.Namespace, _: Executor) -> None:
    """The sample documents on the embedded model, one chunk on a shape; by the model itself and by a smaller one."""
    model, small = loaded("embedded"), loaded("embedded-small")
    texts = [path.read_text() for path in sorted(DOCUMENTS.glob("*.txt"))]
    chunks = [Chunk(text, model.encode(text), "page") for text in texts]
    times = partial(compile_times, model, chunks, (0, 2, 4, 8, 16), options.repeats)
    results: Record = {"embedded by itself": times(model), "embedded by embedded-small": times(small)}
    speculative = shape_of(options.shape).speculative
    target, measurer = part_of_shape(options.shape, 0), part_of_shape(speculative, 1)
    one_chunk = random_chunks(target, 1, options.tokens)
    results["shape"] = {
        "shape": options.shape, "by": speculative, "share": 1 / SHAPE_SHARE, "tokens": options.tokens,
        **compile_times(target, one_chunk, (0, 4, 8), options.repeats, measurer),
    }  # fmt: skip
    write_results(options.out / "fixup_compile.json", results)
    print(json.dumps({name: each["times_plain"] for name, each in results.items()}, indent=1))


# plot: won back, by rows, in the colours of the policies


def plot(options: argparse.Namespace, _: Executor) -> None:
    """Won back of what naive loses, %, over the share of context rows, %; one panel per size. SVG and PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = json.loads((options.out / "fixups-embedded.json").read_text())["sizes"]
    with matplotlib.rc_context({"svg.hashsalt": "pictool", "font.size": 9.0, "svg.fonttype": "path"}):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axes, size in zip(panels, sizes.values(), strict=True):
            for name in ("fixup", "legolink", "speccache", "cacheblend"):
                _draw_policy(axes, name, size["all"]["policies"])
            axes.set(xscale="log", xlim=(0.4, 100), xlabel="context rows computed per layer, %")
            axes.set_title(f"{size['all']['tokens_per_chunk']:.0f} tokens per chunk", fontsize=9)
            axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
            axes.minorticks_off()
            axes.grid(color="#dddddd", linewidth=0.5)
        panels[0].set(ylabel="won back of what naive loses, %")
        figure.legend(handles=panels[0].lines, loc="outside upper center", ncols=4, frameon=False)
        figure.savefig(options.picture.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        figure.savefig(options.picture.with_suffix(".png"), dpi=150, metadata={"Software": None})


def _draw_policy(axes: Any, name: str, summaries: Mapping[str, Record]) -> None:
    """The variants of a policy that differ in its main number only."""
    style, main_number = plot_style(name), re.compile(rf"{name}-[1-9]\d*")
    variants = [summary for label, summary in summaries.items() if main_number.fullmatch(label)]
    points = sorted((100 * summary["rows"], 100 * summary["won_back"]) for summary in variants)
    axes.plot(*zip(*points, strict=True), marker=style.marker, color=style.line_colors[0], linewidth=1, label=name)


def _count(options: argparse.Namespace, size: int) -> int:
    """Prompts of each number of chunks: half as many of the longest chunks."""
    return max(1, int(options.prompts) // (2 if size == max(SIZES) else 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    commands = parser.add_subparsers(required=True)
    studies = (
        ("quality", quality, 24, [*SIZES]), ("ablations", ablations, 20, [20, 60]),
        ("probe-models", probe_models, 20, [*SIZES]), ("reading", reading, 20, [20]),
    )  # fmt: skip
    for name, run, prompts, sizes in studies:
        command = commands.add_parser(name)
        command.add_argument("--prompts", type=int, default=prompts, help="of each number of chunks")
        command.add_argument("--per-kind", type=int, default=8, help="questions of each kind per prompt, at most")
        command.add_argument("--processes", type=int, default=2)
        command.add_argument("--sizes", nargs="+", type=int, default=sizes)
        command.set_defaults(run=run)
        if name == "quality":
            command.add_argument("--model", default="embedded", help="embedded or embedded-small")
    command = commands.add_parser("compile")
    command.add_argument("--repeats", type=int, default=7)
    command.add_argument("--shape", default="qwen2.5-7b")
    command.add_argument("--tokens", type=int, default=128)
    command.set_defaults(run=compile_cost, processes=1)
    command = commands.add_parser("plot")
    command.add_argument("--picture", type=Path, default=Path("docs/images/fixups.svg"))
    command.set_defaults(run=plot, processes=1)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        options.run(options, pool)


if __name__ == "__main__":
    main()

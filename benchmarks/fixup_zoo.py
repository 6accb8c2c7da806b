"""Which recipe of fixup tables holds on every model of the zoo (docs/studies/fixups.md).

    python -m benchmarks.fixup_zoo measure            # every model of the zoo that is trained → fixup_zoo.json
    python -m benchmarks.fixup_zoo table              # the tables of the study, from both results
    python -m benchmarks.fixup_zoo recipes            # recipes of stored signals → fixup_recipes.json
    python -m benchmarks.fixup_zoo recipes --hold-outs     # the chosen ones on the hold-outs → fixup_hold_outs.json
    python -m benchmarks.fixup_zoo recipes-table      # what both say
    python -m benchmarks.fixup_zoo compose            # rows of two policies → fixup_zoo_compose.json
    python -m benchmarks.fixup_zoo plot               # its picture → docs/images/fixup_zoo.svg

Prompts are held-out worlds of each model, of 6 chunks of about 20 or 60 tokens. Every recipe makes a table for each
chunk; the highest scores of the prompt are computed, as many for every recipe. KL: of the first token's distribution
from that of full recompute, as a share of naive reuse's. Leave one out: for each model the recipe with the best worst
case on the others.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.fixups import (
    Answers,
    Numbers,
    Record,
    answer,
    count_questions,
    interval,
    questions_of,
    records_of,
    summarise_all,
)
from benchmarks.output import write_results
from benchmarks.pictures import plot_style
from pictool import Chunk, Model, Store, compile, link, load_model
from pictool.core import Layout
from pictool.engines.base import first_token_kl
from pictool.linker.grid import parse_policy
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import (
    Deviation,
    Needs,
    Policy,
    Prompt,
    Scores,
    Selection,
    count_of,
    first_rows,
    highest,
)
from pictool.runtime.attention import Rows, Run
from pictool.runtime.chat.template import make_frame
from pictool.runtime.memory.caches import CapturingCache, PrefixedCache
from pictool.runtime.memory.image import Image
from pictool.runtime.rope import tables_at
from pictool.runtime.sensitivity import Probes, probes_from, probes_of
from training.score import HELD_OUT
from training.world.generate import BOOKS, PageShape, Question, World, WorldPrompt, write_prompt
from training.zoo import HOLD_OUTS, MODELS, ZOO

RATIOS = (0.02, 0.05, 0.10, 0.20)
SIZES = {20: 0, 60: 6}  # tokens of a chunk, about → sentences of filler per page, at most
CHUNKS, PER_KIND = 6, 6
PROBES, PROBE_TOKENS = 8, 60
RESULTS = Path("benchmarks/results/fixup_zoo.json")
PICTURE = Path("docs/images/fixup_zoo.svg")
FIRST = "own · (1 - p)"  # the recipe before this study
DEFAULT = "own · max(1 - p, 0.1)"  # of `runtime/sensitivity.py`


@dataclass(frozen=True)
class Subject:
    """A model, the world that it was trained on, and the small model that reads prompts for SpecCache."""

    name: str
    world: World
    speculative: str

    @cached_property
    def model(self) -> Model:
        directory = MODELS / self.name
        return load_model(str(directory) if directory.exists() else self.name, device="cpu")

    def prompt(self, size: int, index: int) -> WorldPrompt:
        """A prompt that nothing was trained on; a draw that runs out of names is drawn again."""
        for attempt in range(100):
            with suppress(IndexError):
                draw = random.Random(f"{HELD_OUT}-zoo-{size}-{index}-{attempt}")
                return write_prompt(draw, CHUNKS, PageShape(max_filler_sentences=SIZES[size]), self.world)
        raise AssertionError("the names of the world are too few")


def subjects() -> list[Subject]:
    """The trained models of the zoo, and the embedded ones; SpecCache's small model is another of the world."""
    trained = [name for name in ZOO if (MODELS / name / "scores.json").exists()]
    found = [Subject("embedded", BOOKS, "embedded-small"), Subject("embedded-small", BOOKS, "embedded")]
    for name in trained:
        others = [other for other in trained if other != name and ZOO[other].world is ZOO[name].world]
        found.append(Subject(name, ZOO[name].world, str(MODELS / (others or [name])[0])))
    return found


def hold_outs() -> list[Subject]:
    """Models that no recipe is chosen on."""
    return [Subject(name, HOLD_OUTS[name].world, "") for name in HOLD_OUTS if (MODELS / name / "scores.json").exists()]


# Signals of a chunk: how much its keys vary after probes of three kinds, and how well it is expected


@dataclass(frozen=True)
class Signal:
    """Of one kind of probes: the highest and the mean share of the variance, and 1 - p; float64 [n] each."""

    highest: Numbers
    mean: Numbers
    new: Numbers


def signal(model: Model, probes: Probes, chunk: Sequence[int]) -> Signal:
    stack, start = model.stack, probes.length
    tokens = torch.cat([probes.tokens, torch.tensor([list(chunk)] * len(probes.tokens))], 1)
    tables = stack.rotary_tables(torch.arange(tokens.shape[1]))
    cache = CapturingCache(stack, tables)
    hidden = stack.layers(stack.embed(tokens), cache, tables, (Run(0, 0, tokens.shape[1]),))
    shares = torch.stack([
        key[:, :, start:].float().var(0, correction=0).sum(-1) / spread[:, None]
        for (key, _), spread in zip(cache.layers[1:], probes.spread[1:], strict=True)
    ])  # fmt: skip
    p = stack.logits(hidden[:, start - 1 : -1].flatten(0, 1)).softmax(-1).view(len(tokens), len(chunk), -1)
    new = 1 - p[:, torch.arange(len(chunk)), list(chunk)].mean(0)
    return Signal(*(part.double().numpy() for part in (shares.amax((0, 1)), shares.mean((0, 1)), new)))


def random_probes(model: Model) -> Probes:
    draw = random.Random("zoo random")
    rows = [[draw.randrange(3, model.config.vocab_size) for _ in range(PROBE_TOKENS - 1)] for _ in range(PROBES)]
    return probes_from(model, torch.tensor([[first_token(model), *row] for row in rows]))


def neighbour_probes(subject: Subject, size: int) -> Probes:
    """Ends of runs of other chunks of the same store."""
    rows = []
    for index in range(PROBES):
        text = "".join(subject.prompt(size, 10_000 + index).pages)
        text = text if subject.model.encode(text) else " "
        tokens = list(subject.model.encode(text * 3))
        rows.append([first_token(subject.model), *tokens[-(PROBE_TOKENS - 1) :]])
    return probes_from(subject.model, torch.tensor(rows))


def first_token(model: Model) -> int:
    return model.bos_id if model.bos_id is not None else min(model.eos_ids)


# Recipes: signals by kind of probes → scores of a whole prompt [N of the chunks]

Signals = Mapping[str, Signal]  # of all chunks, one after the other


def places(scores: NDArray[np.floating[Any]]) -> Numbers:
    """The place of every score, from 0 for the lowest; of equal ones the first has the highest."""
    place = np.empty(len(scores))
    place[np.argsort(-scores, kind="stable")] = np.arange(len(scores))[::-1]
    return place


RECIPES: dict[str, Callable[[Signals], Numbers]] = {
    FIRST: lambda s: s["own"].highest * s["own"].new,
    "own": lambda s: s["own"].highest,
    "own, mean": lambda s: s["own"].mean,
    "random": lambda s: s["random"].highest,
    "random, mean": lambda s: s["random"].mean,
    "neighbours": lambda s: s["near"].highest,
    "neighbours · (1 - p)": lambda s: s["near"].highest * s["near"].new,
    "own + random": lambda s: s["own"].highest + s["random"].highest,
    "max(own, random)": lambda s: np.maximum(s["own"].highest, s["random"].highest),
    "places of own and random": lambda s: places(s["own"].highest) + places(s["random"].highest),
    "own and random in turn": lambda s: np.maximum(places(s["own"].highest), places(s["random"].highest)),
    "own · (1 - p) and random in turn": lambda s: np.maximum(
        places(s["own"].highest * s["own"].new), places(s["random"].highest)
    ),
    "own · (1 - p) and neighbours in turn": lambda s: np.maximum(
        places(s["own"].highest * s["own"].new), places(s["near"].highest)
    ),
    DEFAULT: lambda s: s["own"].highest * np.maximum(s["own"].new, 0.1),
    "own · max(1 - p, 0.3)": lambda s: s["own"].highest * np.maximum(s["own"].new, 0.3),
    "(own + random) · max(1 - p, 0.3)": lambda s: (
        (s["own"].highest + s["random"].highest) * np.maximum(s["own"].new, 0.3)
    ),
    "own + random + neighbours": lambda s: s["own"].highest + s["random"].highest + s["near"].highest,
    "neighbours · max(1 - p, 0.3)": lambda s: s["near"].highest * np.maximum(s["near"].new, 0.3),
    "(own + neighbours) · max(1 - p, 0.3)": lambda s: (
        (s["own"].highest + s["near"].highest) * np.maximum(np.minimum(s["own"].new, s["near"].new), 0.3)
    ),
    "all · max(1 - p, 0.3)": lambda s: (
        (s["own"].highest + s["random"].highest + s["near"].highest) * np.maximum(s["own"].new, 0.3)
    ),
}


# One prompt under any set of rows, for all questions at once


class Context:
    """A prompt's naive KV, and what a model answers once some rows are computed."""

    def __init__(self, model: Model, pages: Sequence[Chunk], questions: Sequence[Question]) -> None:
        self._model, self._stack = model, model.stack
        frames = [make_frame(model, question.text) for question in questions]
        self._tails = [model.encode(frame.tail) for frame in frames]
        self._golds = [(*model.encode(" " + each.answer), *sorted(model.eos_ids)) for each in questions]
        self.layout = Layout.of(model.encode(frames[0].head), [page.tokens for page in pages], self._tails[0])
        parts = [span for span in (self.layout.head, *self.layout.chunks) if span[0] < span[1]]
        self.naive = [self._alone(self.layout.tokens[start:end].tolist()) for start, end in parts]

    def _alone(self, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Un-rotated K and V of a part on its own, [kv_heads, tokens, head_dim] per layer."""
        tables = self._stack.rotary_tables(torch.arange(len(tokens)))
        cache = CapturingCache(self._stack, tables)
        self._stack.layers(self._stack.embed(torch.tensor([tokens])), cache, tables, (Run(0, 0, len(tokens)),))
        return [(key[0], value[0]) for key, value in cache.layers]

    def answers(self, rows: NDArray[np.bool_]) -> Answers:
        """The answers to all questions, after `rows` [N] were computed."""
        logits = self.logits(rows)
        right = [each.argmax(-1).tolist() == list(gold) for each, gold in zip(logits, self._golds, strict=True)]
        first = torch.stack([each[0] for each in logits]).double().log_softmax(-1)
        return Answers(first, np.asarray(right, dtype=float), float(rows.mean()))

    def logits(self, rows: NDArray[np.bool_]) -> list[Tensor]:
        """The logits [tokens, vocab] of each right answer's tokens, after `rows` [N] were computed."""
        stack, end = self._stack, self.layout.num_context
        image, at = Image(stack, self.layout), Rows.of(torch.from_numpy(np.flatnonzero(rows)))
        hidden = stack.embed(torch.from_numpy(self.layout.tokens[:end][rows].astype(np.int64))[None])
        for layer in range(stack.num_layers):
            key, value = (torch.cat([part[layer][i] for part in self.naive], 1) for i in (0, 1))
            image.fill(layer, 0, key, value)
            image.relocate(layer, 0, end)
            if rows.any():
                hidden = image.compute(layer, hidden, at)
        return self._ask(image)

    def _ask(self, image: Image) -> list[Tensor]:
        stack, start = self._stack, self.layout.num_context
        sequences = [(*tail, *gold[:-1]) for tail, gold in zip(self._tails, self._golds, strict=True)]
        longest = max(map(len, sequences))
        tokens = torch.tensor([[*each, *[each[-1]] * (longest - len(each))] for each in sequences])
        tables = tables_at(stack.rotary_tables(torch.arange(start + longest)), slice(start, None))
        context = {
            layer: (image.key(layer)[:, :, :start], image.value(layer)[:, :, :start])
            for layer in range(stack.num_layers)
        }
        cache = PrefixedCache(stack, tables, context)
        hidden = stack.layers(stack.embed(tokens), cache, tables, (Run(0, start, start + longest),))
        return [
            stack.logits(row[len(tail) - 1 : len(tail) - 1 + len(gold)])
            for row, tail, gold in zip(hidden, self._tails, self._golds, strict=True)
        ]


def exact_rows(layout: Layout) -> NDArray[np.bool_]:
    """bool [N], whose KV is exact whatever is linked: the head; with an empty one the first chunk."""
    rows = np.zeros(layout.num_context, dtype=bool)
    rows[: layout.head[1] or layout.chunks[0][1]] = True
    return rows


def measure_prompt(subject: Subject, size: int, index: int, probes: Mapping[str, Probes]) -> dict[str, Record]:
    """One prompt under every recipe and policy at every ratio."""
    model, world = subject.model, subject.prompt(size, index)
    pages = [Chunk(page, model.encode(page), "page") for page in world.pages]
    questions = questions_of(world, PER_KIND)
    context = Context(model, pages, questions)
    layout, exact = context.layout, exact_rows(context.layout)
    all_rows = np.ones(layout.num_context, dtype=bool)
    answers = {"full": context.answers(all_rows), "naive": context.answers(~all_rows)}
    each = {kind: [signal(model, some, page.tokens) for page in pages] for kind, some in probes.items()}
    joined = {
        kind: Signal(*(np.concatenate([getattr(one, field) for one in some]) for field in ("highest", "mean", "new")))
        for kind, some in each.items()
    }
    for label, recipe in RECIPES.items():
        scores = np.full(layout.num_context, -np.inf)
        scores[layout.head[1] :] = recipe(joined)
        scores[exact] = -np.inf
        for ratio in RATIOS:
            rows = highest(scores, count_of(ratio, len(scores))) & ~exact
            answers[f"{label} @ {ratio}"] = context.answers(rows)
    mean_length = float(np.mean([len(page) for page in pages]))
    for ratio in RATIOS:
        answers[f"legolink @ {ratio}"] = context.answers(first_rows(layout, max(1, round(ratio * mean_length))))
    with tempfile.TemporaryDirectory() as directory:
        reply = partial(answer, model, Store(directory), pages, questions)
        linked = reply(make_policy("naive"))
        assert float((linked.first.exp() - answers["naive"].first.exp()).abs().max()) < 1e-3  # as the linker does it
        for name in ("cacheblend", "speccache"):
            second = f":spec_model={subject.speculative}" if name == "speccache" else ""
            for ratio in RATIOS:
                answers[f"{name} @ {ratio}"] = reply(parse_policy(f"{name}:ratio={ratio}{second}"))
    return records_of(answers, questions)


def measure(options: argparse.Namespace) -> None:
    """Every model, both sizes; what is in the results already is kept."""
    torch.set_num_threads(1)
    command = f"python -m benchmarks.fixup_zoo measure --questions {options.questions}"
    results: Record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"command": command, "models": {}}
    for subject in subjects():
        if subject.name in results["models"] or (options.models and subject.name not in options.models):
            continue
        of_model: Record = {}
        for size in SIZES:
            probes = {
                "own": probes_of(subject.model, PROBES, PROBE_TOKENS), "random": random_probes(subject.model),
                "near": neighbour_probes(subject, size),
            }  # fmt: skip
            prompts: list[dict[str, Record]] = []
            while not prompts or count_questions(prompts) < options.questions:
                with torch.no_grad():
                    prompts.append(measure_prompt(subject, size, len(prompts), probes))
            print(f"{subject.name} {size}: {count_questions(prompts)} questions", file=sys.stderr, flush=True)
            of_model[str(size)] = {"questions": count_questions(prompts), "variants": summarise_all(prompts)}
        results["models"][subject.name] = of_model
        write_results(RESULTS, results)


DRAWN = {DEFAULT: "fixup", "legolink": "legolink", "cacheblend": "cacheblend", "speccache": "speccache"}


# Tables: shares of naive's KL, by recipe and ratio


def shares(results: Record, label: str, ratio: float) -> dict[tuple[str, str], float]:
    """KL of a variant as a share of naive's, by model and size."""
    return {
        (model, size): part["variants"][f"{label} @ {ratio}"]["kl"] / part["variants"]["naive"]["kl"]
        for model, sizes in results["models"].items()
        for size, part in sizes.items()
    }


def worst_and_mean(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return max(found), float(np.mean(found))


def criterion(results: Record, label: str, models: Sequence[str]) -> tuple[float, float]:
    """By which a recipe is chosen: the worst share of naive's KL at 10 % of rows, then the mean over all ratios."""
    at_ten = [value for (model, _), value in shares(results, label, 0.1).items() if model in models]
    every = [
        value for ratio in RATIOS for (model, _), value in shares(results, label, ratio).items() if model in models
    ]
    return max(at_ten), float(np.mean(every))


def table(_: argparse.Namespace) -> None:
    """Print the study's tables."""
    results = json.loads(RESULTS.read_text())
    names = list(results["models"])
    print("| recipe | " + " | ".join(f"{ratio:.0%} worst (mean)" for ratio in RATIOS) + " |")
    print("|---|" + "---|" * len(RATIOS))
    for label in (*RECIPES, "legolink", "cacheblend", "speccache"):
        cells = (worst_and_mean(shares(results, label, ratio).values()) for ratio in RATIOS)
        print(f"| {label} | " + " | ".join(f"{100 * worst:.0f} ({100 * mean:.0f})" for worst, mean in cells) + " |")
    print(
        "\n| left out | chosen on the others | 20 tokens, 10 % | 60 tokens, 10 % | default, 10 % | full / naive right |"
    )
    print("|---|---|---|---|---|---|")
    for name in names:
        others = [other for other in names if other != name]
        best = min(RECIPES, key=lambda label: criterion(results, label, others))
        own, default = shares(results, best, 0.1), shares(results, DEFAULT, 0.1)
        right = " ".join(
            f"{part['variants']['full']['right']:.2f} / {part['variants']['naive']['right']:.2f}"
            for part in results["models"][name].values()
        )
        print(
            f"| {name} | {best} | {100 * own[name, '20']:.1f} | {100 * own[name, '60']:.1f} | "
            f"{100 * default[name, '20']:.1f}, {100 * default[name, '60']:.1f} | {right} |"
        )
    composed_table()


def plot(_: argparse.Namespace) -> None:
    """Share of naive's KL, %, by share of rows: a line for every model, and one for the mean. SVG and PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = json.loads(RESULTS.read_text())
    with matplotlib.rc_context({"svg.hashsalt": "pictool", "font.size": 9.0, "svg.fonttype": "path"}):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 4, sharey=True)
        for axes, (label, name) in zip(panels, DRAWN.items(), strict=True):
            color = plot_style(name).line_colors[0]
            ratios = [100 * ratio for ratio in RATIOS]
            by_ratio = [shares(results, label, ratio) for ratio in RATIOS]
            for case in by_ratio[0]:
                axes.plot(ratios, [100 * values[case] for values in by_ratio], color=color, linewidth=0.6, alpha=0.5)
            means = [100 * float(np.mean(list(values.values()))) for values in by_ratio]
            axes.plot(ratios, means, color=color, linewidth=2.2, marker="o", markersize=3)
            axes.set(title=name, xlabel="ratio, %", xscale="log", ylim=(0, 105))
            axes.set_xticks(ratios, [f"{ratio:.0f}" for ratio in ratios])
            axes.minorticks_off()
            axes.grid(color="#dddddd", linewidth=0.5)
        panels[0].set(ylabel="KL to full, % of naive's")
        figure.savefig(PICTURE.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        figure.savefig(PICTURE.with_suffix(".png"), dpi=150, metadata={"Software": None})


# recipes: combinations of three signals of a token, float32 [3, n], at few rows: the variance after the model's own
# texts and after random tokens, and 1 - p

COMPARED = (0.02, 0.10)
SEEDS, FRESH = 2, 100_000  # draws of prompts and, of each, the number of its first; `measure` drew from 0 on
BY_RECIPE, HELD = Path("benchmarks/results/fixup_recipes.json"), Path("benchmarks/results/fixup_hold_outs.json")


def new(signals: Scores, least: float) -> Scores:
    least_new: Scores = np.maximum(signals[2], np.float32(least))
    return least_new


def in_turn(first: NDArray[np.floating[Any]], second: NDArray[np.floating[Any]]) -> Numbers:
    return np.maximum(places(first), places(second))


def default(signals: Scores) -> Scores:
    """The score of the tables that objects have."""
    scores: Scores = signals[0] * new(signals, 0.1)
    return scores


CANDIDATES: dict[str, Callable[[Scores], NDArray[np.floating[Any]]]] = {
    "own": default,
    "places": lambda s: places(s[0]) + places(s[1]),
    "own alone": lambda s: s[0],
    "random alone": lambda s: s[1],
    "own · max(1 - p, 0.3)": lambda s: s[0] * new(s, 0.3),
    "own and random in turn": lambda s: in_turn(s[0], s[1]),
    "the default and random in turn": lambda s: in_turn(default(s), s[1]),
    "the default and random · max(1 - p, 0.1) in turn": lambda s: in_turn(default(s), s[1] * new(s, 0.1)),
    "places of the default and random": lambda s: places(default(s)) + places(s[1]),
    "places of own and random, each · max(1 - p, 0.3)": lambda s: (
        places(s[0] * new(s, 0.3)) + places(s[1] * new(s, 0.3))
    ),
    "(own + random) · max(1 - p, 0.3)": lambda s: (s[0] + s[1]) * new(s, 0.3),
    "own · random · max(1 - p, 0.1)²": lambda s: s[0] * s[1] * new(s, 0.1) ** 2,
    "√(own · random) · max(1 - p, 0.3)": lambda s: np.sqrt(s[0] * s[1]) * new(s, 0.3),
}  # fmt: skip

FEW, FEWER = ", random probes: ", (2, 4)
ALL_CANDIDATES = [*CANDIDATES, *(f"places{FEW}{count}" for count in FEWER)]


def random_probes_of(model: Model, count: int) -> Probes:
    """Prefixes of random tokens, another draw than `random_probes`."""
    seed = hashlib.sha256(f"random {model.fingerprint}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little", signed=True))
    special = {first_token(model), *model.eos_ids}
    known = torch.tensor([token for token in range(model.config.vocab_size) if token not in special])
    rows = known[torch.randint(len(known), (count, PROBE_TOKENS), generator=generator)]
    rows[:, 0] = first_token(model)
    return probes_from(model, rows)


def signals_of(model: Model, chunks: Sequence[Sequence[int]], num_random: int) -> Scores:
    """The signals of chunks, one after the other, by so many random probes; rounded as tables in objects are."""
    kinds = probes_of(model, PROBES, PROBE_TOKENS), random_probes_of(model, num_random)
    found = []
    for chunk in chunks:
        own, other = (signal(model, probes, chunk) for probes in kinds)
        found.append(np.stack([own.highest, other.highest, own.new]))
    return np.concatenate(found, 1).astype(np.float16).astype(np.float32)


def compare_recipes(subject: Subject, size: int, index: int, candidates: Iterable[str]) -> dict[str, list[float]]:
    """KL of the first token to full under naive and every recipe at every ratio, one number a question."""
    model, world = subject.model, subject.prompt(size, index)
    pages = [Chunk(page, model.encode(page), "page") for page in world.pages]
    questions = questions_of(world, PER_KIND // 2)
    signals = {count: signals_of(model, [page.tokens for page in pages], count) for count in (PROBES, *FEWER)}
    context = Context(model, pages, questions)
    exact, start = exact_rows(context.layout), context.layout.head[1]
    answers, full = dict[bytes, list[float]](), context.answers(np.ones(len(exact), dtype=bool))

    def kl(rows: NDArray[np.bool_]) -> list[float]:
        if rows.tobytes() not in answers:
            answers[rows.tobytes()] = [round(each, 5) for each in context.answers(rows).kl(full).tolist()]
        return answers[rows.tobytes()]

    found = {"naive": kl(np.zeros(len(exact), dtype=bool))}
    for label, ratio in itertools.product(candidates, COMPARED):
        name, _, few = label.partition(FEW)
        scores = np.full(len(exact), -np.inf)
        scores[~exact] = CANDIDATES[name](signals[int(few or PROBES)][:, ~exact[start:]])
        found[f"{label} @ {ratio}"] = kl(highest(scores, count_of(ratio, len(scores))) & ~exact)
    return found


def recipes(options: argparse.Namespace) -> None:
    """Every recipe on each model, size and draw; what is in the results already is kept. Sums are one a prompt."""
    torch.set_num_threads(1)
    path, some = (HELD, hold_outs()) if options.hold_outs else (BY_RECIPE, subjects())
    results: Record = {"models": json.loads(path.read_text())["models"] if path.exists() else {}}
    for seed, subject, size in itertools.product(range(SEEDS), some, SIZES):
        draws = results["models"].setdefault(subject.name, {}).setdefault(str(size), {})
        prompts, count = list[dict[str, list[float]]](), 0
        while count < options.questions and str(seed) not in draws:
            with torch.no_grad():
                at = FRESH + 10_000 * seed + len(prompts)
                prompts.append(compare_recipes(subject, size, at, options.candidates or ALL_CANDIDATES))
            count += len(prompts[-1]["naive"])
        if prompts:
            print(f"{subject.name} {size}, draw {seed}: {count} questions", file=sys.stderr, flush=True)
            sums = {label: [round(sum(each[label]), 4) for each in prompts] for label in prompts[0]}
            draws[str(seed)] = {"questions": [len(each["naive"]) for each in prompts], "kl": sums}
            write_results(path, results)


Sums = dict[str, Numbers]  # of a case (model and size), by label: one sum a prompt


def cases_of(results: Record) -> dict[tuple[str, str], Sums]:
    """The sums of KL of every case, all draws one after the other; `questions` has how many."""
    cases = {}
    for (name, sizes), size in itertools.product(results["models"].items(), SIZES):
        draws = [{"questions": draw["questions"], **draw["kl"]} for draw in sizes[str(size)].values()]
        cases[name, str(size)] = {
            label: np.concatenate([np.asarray(draw[label], dtype=float) for draw in draws]) for label in draws[0]
        }
    return cases


def left_of(sums: Sums, label: str, less: str = "") -> tuple[float, float, float]:
    """What a recipe leaves of naive's KL (less what another does), %, and its 95 % interval over prompts."""
    kl = sums[label] - (sums[less] if less else 0)
    low, high = interval(kl, sums["naive"])
    return 100 * float(kl.sum() / sums["naive"].sum()), 100 * (low or 0.0), 100 * (high or 0.0)


def recipes_table(_: argparse.Namespace) -> None:
    """Print what recipes leave of naive's KL: worst case and mean of the zoo, then every case of the hold-outs."""
    zoo = cases_of(json.loads(BY_RECIPE.read_text()))
    print(f"{len(zoo)} cases, {sum(int(sums['questions'].sum()) for sums in zoo.values())} questions\n")
    print("| recipe | " + " | ".join(f"{ratio:.0%}: worst case | mean" for ratio in COMPARED) + " |")
    print("|---|" + "---|---|" * len(COMPARED))
    for label in ALL_CANDIDATES:
        cells = list[str]()
        for ratio in COMPARED:
            left = {case: left_of(sums, f"{label} @ {ratio}") for case, sums in zoo.items()}
            worst = max(left, key=lambda case: left[case][0])
            cells += [
                "{:.0f} [{:.0f}, {:.0f}]".format(*left[worst]) + f" {worst[0]} {worst[1]}",
                f"{np.mean([share for share, _, _ in left.values()]):.1f}",
            ]
        print(f"| {label} | " + " | ".join(cells) + " |")
    if not HELD.exists():
        return
    held = cases_of(json.loads(HELD.read_text()))
    labels = [label for label in CANDIDATES if f"{label} @ {COMPARED[0]}" in next(iter(held.values()))]
    less = [f"{label}, less {labels[0]}" for label in labels[1:]]
    print("\n| hold-out | questions | rows | " + " | ".join([*labels, *less]) + " |")
    print("|---|---|---|" + "---|" * len([*labels, *less]))
    for ((name, size), sums), ratio in itertools.product(held.items(), COMPARED):
        at = [f"{label} @ {ratio}" for label in labels]
        cells = ["{:.1f} [{:.1f}, {:.1f}]".format(*left_of(sums, label)) for label in at]
        cells += ["{:+.1f} [{:+.1f}, {:+.1f}]".format(*left_of(sums, other, at[0])) for other in at[1:]]
        print(f"| {name}, {size} | {int(sums['questions'].sum())} | {ratio:.0%} | " + " | ".join(cells) + " |")


# compose: rows of two policies. They depend on the question, so each is linked on its own.

COMPOSED = Path("benchmarks/results/fixup_zoo_compose.json")
COMPOSITIONS = (
    "fixup-5", "fixup-10", "fixup-5+speccache-5", "fixup-5+legolink-2", "cacheblend-5", "fixup-5+cacheblend-5",
)  # fmt: skip


@dataclass(frozen=True)
class Both(Policy):
    """The rows of two policies; those of the first stay on where the second narrows its own."""

    name: ClassVar[str] = "both"
    reference: ClassVar[str] = "docs/studies/fixups.md"
    first: Policy = field(default_factory=lambda: parse_policy("fixup-5"))
    second: Policy = field(default_factory=lambda: parse_policy("legolink-2"))

    @property
    def needs(self) -> Needs:
        first, second = self.first.needs, self.second.needs
        return replace(second, tables=first.tables or second.tables, all_tables=first.all_tables or second.all_tables)

    @property
    def spec_model(self) -> str:
        return self.second.second_model

    def prepare(self, model: Model) -> None:
        self.second.prepare(model)

    def select(self, prompt: Prompt) -> Selection:
        return Selection(self.first.select(prompt).rows | self.second.select(prompt).rows)

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        return self.second.check_layers(num_layers)

    def narrow(self, prompt: Prompt, layer: int, deviation: Deviation) -> Selection:
        kept = self.first.select(prompt).rows & deviation.rows
        return Selection(self.second.narrow(prompt, layer, deviation).rows | kept)


def composition(label: str, second_model: str) -> Policy:
    """The policy of a label, or of two that are joined by `+`."""
    parts = [parse_policy(part).with_default_model(second_model) for part in label.split("+")]
    return Both(*parts) if len(parts) > 1 else parts[0]


def compose(options: argparse.Namespace) -> None:
    """Every composition on one prompt after another of each model, tables by the model itself.

    What is in the results already is kept: a new composition is measured alone.
    """
    torch.set_num_threads(1)
    results: Record = json.loads(COMPOSED.read_text()) if COMPOSED.exists() else {"models": {}}
    results["command"] = f"python -m benchmarks.fixup_zoo compose --prompts {options.prompts}"
    for subject in subjects():
        found = results["models"].setdefault(subject.name, {})
        missing = [label for label in ("naive", *COMPOSITIONS) if label not in found]
        if not missing:
            continue
        measured = [each for index in range(options.prompts) for each in _composed(subject, index, missing)]
        for label in missing:
            kl, rows = zip(*((divergence, share) for name, divergence, share in measured if name == label), strict=True)
            found[label] = {
                "questions": len(kl), "kl": round(float(np.mean(kl)), 5), "rows": round(float(np.mean(rows)), 4)
            }  # fmt: skip
        print(f"{subject.name}: {found['naive']['questions']} questions", file=sys.stderr, flush=True)
        write_results(COMPOSED, results)


def composed_table() -> None:
    """Print the compositions: the mean share of rows, and KL as a share of naive's for every model."""
    models: Record = json.loads(COMPOSED.read_text())["models"]
    print("\n| policy | rows, % | " + " | ".join(f"`{name}`" for name in models) + " |")
    print("|---|---|" + "---|" * len(models))
    for label in COMPOSITIONS:
        rows = float(np.mean([100 * model[label]["rows"] for model in models.values()]))
        cells = (f"{100 * model[label]['kl'] / model['naive']['kl']:.0f}" for model in models.values())
        print(f"| {label} | {rows:.1f} | " + " | ".join(cells) + " |")


def _composed(subject: Subject, index: int, labels: Sequence[str]) -> Iterable[tuple[str, float, float]]:
    """Policy, KL of the first token from full, and share of context rows; of every question of one prompt."""
    model, world = subject.model, subject.prompt(20, index)
    pages = [Chunk(page, model.encode(page), "page") for page in world.pages]
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        compile(model, store, pages, probes=PROBES, probe_model=model)
        for question in questions_of(world, 3):
            frame = make_frame(model, question.text)
            full = link(model, store, pages, frame.tail, make_policy("full"), head=frame.head).image.logits
            for label in labels:
                policy = composition(label, subject.speculative)
                linked = link(model, store, pages, frame.tail, policy, head=frame.head)
                assert full is not None and linked.image.logits is not None
                share = linked.recomputed / linked.image.layout.num_context
                yield label, first_token_kl(full, linked.image.logits), share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("measure")
    command.add_argument("--questions", type=int, default=300, help="of each model and size, at least")
    command.add_argument("--models", nargs="+", help="only these")
    command.set_defaults(run=measure)
    command = commands.add_parser("recipes")
    command.add_argument("--questions", type=int, default=100, help="of each model, size and draw, at least")
    command.add_argument("--candidates", nargs="+", choices=ALL_CANDIDATES, help="only these")
    command.add_argument("--hold-outs", action="store_true", help="on the models that no recipe is chosen on")
    command.set_defaults(run=recipes)
    commands.add_parser("recipes-table").set_defaults(run=recipes_table)
    command = commands.add_parser("compose")
    command.add_argument("--prompts", type=int, default=20, help="of each model, of about 7 questions")
    command.set_defaults(run=compose)
    commands.add_parser("plot").set_defaults(run=plot)
    commands.add_parser("table").set_defaults(run=table)
    options: Any = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()

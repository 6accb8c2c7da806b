"""What a chunk after itself, where all that it names was named before, adds to fixup tables.

    python -m benchmarks.fixup_itself run                  # → benchmarks/results/fixup_itself.json
    python -m benchmarks.fixup_itself run --hold-outs --out benchmarks/results/fixup_itself_hold_outs.json
    python -m benchmarks.fixup_itself table --out FILE     # what one says

A model's own texts (*own*: tables were measured after these alone) rarely name what a chunk names where names are many,
so a token that depends on an earlier mention of its subject, as the later of two versions, has no score. *both* adds
how far keys move after a copy of the chunk, as `pictool/runtime/sensitivity.py`. *true*: the same of the keys that full
recompute has in this prompt, which no table knows. All are multiplied by max(1 - p, 0.1), p after the own texts.

The highest scores of the prompt are computed, as many for every recipe. KL: from full recompute, over all tokens of the
right answer, teacher-forced, as a share of naive reuse's; 95 % intervals by bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.fixup_zoo import (
    PER_KIND,
    PROBE_TOKENS,
    PROBES,
    SIZES,
    Context,
    Sums,
    exact_rows,
    first_token,
    hold_outs,
    left_of,
    signal,
    subjects,
)
from benchmarks.fixups import Numbers, Record, questions_of
from benchmarks.output import write_results
from benchmarks.questions.picbench import Picbench
from pictool import Chunk, Model, load_model
from pictool.core import Layout
from pictool.linker.policies.base import count_of, highest
from pictool.runtime.attention import Run
from pictool.runtime.memory.caches import CapturingCache
from pictool.runtime.sensitivity import probes_of
from training.picbench_recipe import DIRECTORY as PICBENCH_MODELS
from training.picbench_recipe import HOLD_OUT, RECIPE
from training.world.generate import Question, WorldPrompt

RESULTS = Path("benchmarks/results/fixup_itself.json")
TASKS = ("keys", "continued", "two-hops", "versions", "order", "json", "tool", "code")
RATIOS, LEAST = (0.05, 0.1, 0.2), 0.1
FROM = 900_000  # the number of the first prompt: others were drawn below


@dataclass(frozen=True)
class Signals:
    """Of tokens, float64 [n] each: after the model's own texts, after themselves, in full recompute, and 1 - p."""

    own: Numbers
    itself: Numbers
    true: Numbers
    new: Numbers


RECIPES: Mapping[str, Callable[[Signals], Numbers]] = {
    "own": lambda s: s.own,
    "both": lambda s: s.own + s.itself,
    "true": lambda s: s.true,
}


class Measurer:
    """Measures the tokens of chunks."""

    def __init__(self, model: Model) -> None:
        self._model, self._probes = model, probes_of(model, PROBES, PROBE_TOKENS)

    def measure(self, layout: Layout, naive: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Signals:
        """Of all tokens of a prompt's chunks. naive: K and V of its parts, each on its own, by layer."""
        tokens, start = layout.tokens[: layout.num_context].tolist(), layout.head[1]
        stored = [torch.cat([kv[0] for kv in parts], 1) for parts in zip(*naive, strict=True)]
        true = self._highest(zip(self._keys((), tokens), stored, strict=True))[start:]
        each = [self._of_chunk(tokens[slice(*span)]) for span in layout.chunks]
        own, itself, new = (np.concatenate(part) for part in zip(*each, strict=True))
        return Signals(own, itself, true, new)

    def _of_chunk(self, chunk: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
        own = signal(self._model, self._probes, chunk)
        keys = zip(*(self._keys(probe, chunk) for probe in self._probes.tokens.tolist()), strict=True)
        again = self._keys([first_token(self._model), *chunk], chunk)
        means = [torch.stack(of_own).mean(0) for of_own in keys]
        return own.highest, self._highest(zip(again, means, strict=True)), own.new

    def _highest(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Numbers:
        """The highest squared distance of keys, of all layers and heads, as a share of their spread, float64 [n]."""
        layers = zip(pairs, self._probes.spread, strict=True)
        shares = [(a.float() - b.float()).square().sum(-1) / spread[:, None] for (a, b), spread in layers]
        highest: Numbers = torch.stack(shares[1:]).amax((0, 1)).double().numpy()
        return highest

    def _keys(self, before: Sequence[int], chunk: Sequence[int]) -> list[Tensor]:
        """Un-rotated keys of a chunk after others, [kv_heads, n, head_dim] a layer."""
        stack, tokens = self._model.stack, torch.tensor([[*before, *chunk]])
        tables = stack.rotary_tables(torch.arange(tokens.shape[1]))
        cache = CapturingCache(stack, tables)
        stack.layers(stack.embed(tokens), cache, tables, (Run(0, 0, tokens.shape[1]),))
        return [key[0, :, len(before) :] for key, _ in cache.layers]


Prompt = tuple[list[Chunk], list[Question]]


def picbench_prompts(model: Model, task: str, count: int) -> Iterator[Prompt]:
    """Of four documents of 50 words."""
    for case in Picbench(seed=7, tasks=(task,), documents=(4,), words=(50,), cases_each=count).cases():
        pages = [Chunk(text, model.encode(text), "document") for text in case.documents]
        yield pages, [Question(case.query, case.answers[0], task, ())]


def cases(count: int, are_held_out: bool) -> Iterator[tuple[str, str, Model, Iterator[Prompt]]]:
    """Names of a model and of what it is asked, the model, and prompts."""
    name = (HOLD_OUT if are_held_out else RECIPE).name
    model = load_model(str(PICBENCH_MODELS / name), device="cpu")
    for task in TASKS:
        yield name, task, model, picbench_prompts(model, task, count)
    for subject, size in itertools.product(hold_outs() if are_held_out else subjects(), SIZES):
        worlds = (subject.prompt(size, FROM + index) for index in range(count // 2))
        prompts = ((pages_of(subject.model, world), questions_of(world, PER_KIND // 2)) for world in worlds)
        yield subject.name, str(size), subject.model, prompts


def pages_of(model: Model, world: WorldPrompt) -> list[Chunk]:
    return [Chunk(page, model.encode(page), "page") for page in world.pages]


def left(model: Model, measurer: Measurer, prompt: Prompt) -> dict[str, float]:
    """The sum of KL over the answers to all questions of a prompt, by recipe and ratio."""
    context = Context(model, *prompt)
    exact, start = exact_rows(context.layout), context.layout.head[1]
    full = [each.double().log_softmax(-1) for each in context.logits(np.ones(len(exact), dtype=bool))]

    def kl(rows: NDArray[np.bool_]) -> float:
        pairs = zip(full, context.logits(rows), strict=True)
        each = [(one.exp() * (one - other.double().log_softmax(-1))).sum(-1).clamp_min(0).sum() for one, other in pairs]
        return round(float(sum(each)), 5)

    signals = measurer.measure(context.layout, context.naive)
    found = {"naive": kl(np.zeros(len(exact), dtype=bool))}
    for (name, recipe), ratio in itertools.product(RECIPES.items(), RATIOS):
        scores = np.full(len(exact), -np.inf)
        weighed = recipe(signals) * np.maximum(signals.new, LEAST)
        scores[~exact] = weighed[~exact[start:]]
        found[f"{name} @ {ratio}"] = kl(highest(scores, count_of(ratio, len(scores))) & ~exact)
    return found


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, Record]] = {}
    for name, asked, model, prompts in cases(options.prompts, options.hold_outs):
        measurer = Measurer(model)
        rows = [left(model, measurer, prompt) for prompt in prompts]
        sums = {label: [row[label] for row in rows] for label in rows[0]}
        found.setdefault(name, {})[asked] = {"kl": sums}
        print(name, asked, cells(sums), file=sys.stderr, flush=True)
    write_results(options.out, {"models": found})


def cells(sums: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """What each recipe leaves of naive's KL, %, with its interval."""
    of_prompts: Sums = {label: np.asarray(each) for label, each in sums.items()}
    texts = {label: left_of(of_prompts, label) for label in of_prompts if label != "naive"}
    return {label: f"{share:.0f} [{low:.0f}, {high:.0f}]" for label, (share, low, high) in texts.items()}


def table(options: argparse.Namespace) -> None:
    """Each case; then of picbench's tasks and of the worlds, by recipe and ratio: worst, mean, and all at once."""
    models: dict[str, dict[str, Record]] = json.loads(options.out.read_text())["models"]
    groups: dict[str, list[Mapping[str, list[float]]]] = {"picbench": [], "worlds": []}
    for name, asked in ((name, asked) for name, of_model in models.items() for asked in of_model):
        sums = models[name][asked]["kl"]
        groups["picbench" if asked in TASKS else "worlds"].append(sums)
        print(f"{name} {asked}: naive {np.mean(sums['naive']):.3f} a prompt", cells(sums))
    for group, found in groups.items():
        pooled = cells({label: [kl for sums in found for kl in sums[label]] for label in found[0]})
        for label, share in pooled.items():
            each = [100 * sum(sums[label]) / sum(sums["naive"]) for sums in found]
            print(f"{group}, {label}: worst {max(each):.0f}, mean {np.mean(each):.1f}, all {share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--prompts", type=int, default=40, help="of each task; half as many of each world and size")
    parser.add_argument("--hold-outs", action="store_true", help="the models that no recipe was chosen on, alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    (run if options.action == "run" else table)(options)


if __name__ == "__main__":
    main()

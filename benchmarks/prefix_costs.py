"""What keeping exact prefixes costs where nothing repeats, and what the tenth turn of a conversation costs beside its
new tokens alone.

    OMP_NUM_THREADS=1 python -m benchmarks.prefix_costs --out benchmarks/results/prefix_costs.json

`fresh`: prompts of random tokens under `full`, without a pool, in a pool with room, in one that is full (each prompt
evicts), and in one whose prefixes go to disk, which is after the first token. `turns`: a conversation of 20,000 tokens
goes on; the same new tokens are computed over the KV before them by this engine's layers alone (`alone`), and by
`transformers` (sdpa). Runs are interleaved, the order changes from round to round. CPU seconds are those of the
process, with one thread; times on a shared machine are noisier than these. `ratio`: the median over rounds.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.output import write_results
from pictool.bench.shapes import random_module, shape_of
from pictool.linker.fusor import Fusor, always_computed
from pictool.linker.link import Linked, link
from pictool.linker.narrowing import Narrowing
from pictool.linker.plan import plan_without_objects
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Prompt
from pictool.linker.residency import ResidentObjects
from pictool.linker.spec import Spec
from pictool.runtime.architectures import cache_name
from pictool.runtime.memory.image import GROWTH, Image
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model, load_model, wrap_model
from pictool.store.store import Store

FULL = make_policy("full")
Runs = dict[str, list[tuple[float, float]]]  # wall and CPU seconds of each round, by what ran


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds; what it returns is dropped after them."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    kept = run()
    times = time.perf_counter() - wall, time.process_time() - cpu
    del kept
    return times


def drawn(draw: random.Random, model: Model, count: int) -> list[int]:
    return [draw.randrange(10, min(model.config.vocab_size, 1024)) for _ in range(count)]


def ask(model: Model, store: Store, tokens: Sequence[int], pool: ResidentObjects | None) -> Linked:
    plan = plan_without_objects(FULL, np.asarray(tokens, dtype=np.int32))
    return link(model, store, Spec.planned(plan), residents=pool)


def row_of(runs: Runs, base: str) -> dict[str, Any]:
    """Medians, and ratios to `base` round by round."""
    row = dict[str, Any]()
    for name, times in runs.items():
        ratios = [
            statistics.median(own[i] / other[i] for own, other in zip(times, runs[base], strict=True)) for i in (0, 1)
        ]
        wall, cpu = (statistics.median(each[i] for each in times) for i in (0, 1))
        row[name] = {"wall_s": wall, "cpu_s": cpu, "wall_ratio": ratios[0], "cpu_ratio": ratios[1],
                     "rounds": [[round(part, 6) for part in each] for each in times]}  # fmt: skip
    return row


# Prompts without repetition


def fresh(model: Model, tokens: int, rounds: int, root: str) -> dict[str, Any]:
    """One row: prompts of so many tokens."""
    draw, store, of_slot = random.Random(tokens), Store(root), slot_bytes(model)
    one = tokens + GROWTH
    kept = Store(f"{root}/prefixes")
    pools = {
        "none": None,
        "room": ResidentObjects(model, (rounds + 3) * one * of_slot, keeps_prefixes=True),
        "full": ResidentObjects(model, 3 * one * of_slot, keeps_prefixes=True),
        "disk": ResidentObjects(model, (rounds + 3) * one * of_slot, keeps_prefixes=True, kept=kept),
    }
    runs: Runs = {name: [] for name in pools}
    for index in range(-4, rounds):  # the first fill the pool that is full
        prompt = drawn(draw, model, tokens)
        for name in sorted(pools, key=lambda _: draw.random()):
            if index < -1 and name != "full":
                continue
            times = measured(partial(ask, model, store, prompt, pools[name]))
            if index >= 0:
                runs[name].append(times)
    moves = {name: pool.counts.moves for name, pool in pools.items() if pool is not None}
    evicted = {name: pool.counts.evicted_bytes // of_slot for name, pool in pools.items() if pool is not None}
    return {"tokens": tokens, "moved_runs": moves, "evicted_tokens": evicted, **row_of(runs, "none")}


# The next turn of a long conversation


class Turns:
    """A conversation, with copies of its KV to compute the next turn alone."""

    def __init__(self, model: Model, root: str, tokens: int, room: int, draw: random.Random) -> None:
        self._model, self._store = model, Store(root)
        self._reference = AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa").eval()
        self._reference.load_state_dict(model.module.state_dict())
        size = 2 * (room + GROWTH) * slot_bytes(model)
        self._pool = ResidentObjects(model, size, keeps_prefixes=True)
        self.tokens = list[int]()
        for _ in range(9):
            self.tokens += drawn(draw, model, tokens // 10)
            self._keep(ask(model, self._store, self.tokens, self._pool))

    def _keep(self, linked: Linked) -> None:
        layers, image = range(linked.image.stack.num_layers), linked.image
        self._kv = [(image.key(layer)[0].clone(), image.value(layer)[0].clone()) for layer in layers]

    def turn(self, new: list[int], draw: random.Random) -> dict[str, tuple[float, float]]:
        """The times of a turn of these tokens; the conversation goes on."""
        depth, linked = len(self.tokens), list[Linked]()
        self.tokens += new

        def served() -> None:
            linked.append(ask(self._model, self._store, self.tokens, self._pool))

        runs = {"served": served, "alone": self._alone(depth), "transformers": self._by_transformers(depth)}
        times = {name: measured(runs[name]) for name in sorted(runs, key=lambda _: draw.random())}
        assert linked[0].pool is not None and linked[0].pool.prefix >= depth - 16
        self._keep(linked[0])
        return times

    def _alone(self, depth: int) -> Callable[[], None]:
        plan = plan_without_objects(FULL, np.asarray(self.tokens, dtype=np.int32))
        prompt, image = Prompt(self._model, plan.layout, ("", "")), Image(self._model.stack, plan.layout)
        exact = np.arange(len(self.tokens)) < depth
        for layer, (key, value) in enumerate(self._kv):
            image.fill(layer, 0, key[:, :depth], value[:, :depth])

        def run() -> None:
            always = always_computed(prompt, plan.required)
            fusor = Fusor(image, Narrowing(prompt, FULL, FULL.select(prompt), always, exact))
            for layer in range(image.stack.num_layers):
                fusor.prefill_layer(layer)
            fusor.finish()

        return run

    def _by_transformers(self, depth: int) -> Callable[[], None]:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(self._kv):
            cache.update(key[None, :, :depth], value[None, :, :depth], layer)
        ids = torch.tensor([self.tokens[depth:]])

        def run() -> None:
            with torch.inference_mode():
                self._reference(input_ids=ids, logits_to_keep=1, **{cache_name(self._reference): cache})

        return run


def turns(model: Model, tokens: int, sizes: Sequence[int], rounds: int, root: str) -> list[dict[str, Any]]:
    """A row for each number of new tokens; the conversation goes on from row to row."""
    rows = []
    draw = random.Random(tokens)
    talk = Turns(model, root, tokens, tokens + rounds * sum(sizes), draw)
    talk.turn(drawn(draw, model, tokens - len(talk.tokens)), draw)
    for size in sizes:
        runs, depth = defaultdict[str, list[tuple[float, float]]](list), len(talk.tokens)
        for _ in range(rounds):
            for name, times in talk.turn(drawn(draw, model, size), draw).items():
                runs[name].append(times)
        rows.append({"depth": depth, "new_tokens": size, **row_of(dict(runs), "alone")})
        print(
            {key: value if isinstance(value, int) else value["cpu_ratio"] for key, value in rows[-1].items()},
            flush=True,
        )
    return rows


def small_model(layers: int | None) -> Model:
    """The random model of shape `small`, or its first layers."""
    changed = {} if layers is None else {"num_hidden_layers": layers}
    module = random_module(shape_of("small").make_config(**changed), "cpu", "float32", 0)
    return wrap_model(module, load_model("embedded", "cpu").tokenizer, "random small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of the conversation")
    parser.add_argument("--layers", type=int, help="of the random model `small` (8)")
    parser.add_argument("--fresh", default="512,2048", help="tokens of prompts without repetition")
    parser.add_argument("--new", default="64,256", help="new tokens of a turn")
    options = parser.parse_args()
    small, rows = small_model(options.layers), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as root:
        for name, model in (("embedded", load_model("embedded", "cpu")), ("small", small)):
            for tokens in map(int, options.fresh.split(",")):
                rows.append({"model": name, **fresh(model, tokens, options.rounds, f"{root}/{name}{tokens}")})
                ratios = {kind: rows[-1][kind]["cpu_ratio"] for kind in ("room", "full", "disk")}
                print(name, tokens, ratios, rows[-1]["moved_runs"], flush=True)
        sizes = [int(size) for size in options.new.split(",")]
        found = turns(small, options.tokens, sizes, options.rounds, f"{root}/turns")
    if options.out is not None:
        write_results(options.out, {"fresh": rows, "turns": found})


if __name__ == "__main__":
    main()

"""Tables by a second reading, and by another model: what either wins back, on held-out worlds.

    python -m benchmarks.fixup_reading --out benchmarks/results

Read again: behind every probe the chunk is read once more, where a question would stand; the most that any token of
the second reading attends to a token of the first is its importance (KVzip, Kim et al. 2025, reconstruction).
A key that varies counts for as much as it is read. It costs more than another prefill. 8 chunks per prompt; every
variant chooses the same number of rows. Columns as in `fixups.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.asking import ask, kl
from benchmarks.fixup_ablations import Given
from benchmarks.fixups import Record, opened, prompt_of, questions_of, summarise
from pictool import Chunk, Model, Store, make_policy
from pictool.compiler.sensitivity import PROBE_TOKENS, PROBES
from pictool.linker.policies.base import Policy, count_of, highest
from pictool.runtime.align import map_scores, tokenize
from pictool.runtime.attention import Run
from pictool.runtime.caches import CapturingCache
from pictool.runtime.machine import machine
from pictool.runtime.sensitivity import probes_of
from pictool.world.generate import KINDS

RATIOS = (0.02, 0.05, 0.10, 0.20)
OPENING = "Question: "  # of the embedded models' tail
Variants = dict[str, NDArray[np.float64]]


@torch.inference_mode()
def read_twice(model: Model, count: int, chunk: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Behind `count` probes: share of the variance and what is read, each [layers ≥ 1, heads, n], and 1 - p [n].

    What is read is the highest over the probes. The models here have as many KV heads as heads.
    """
    probes, stack = probes_of(model, count, PROBE_TOKENS), model.stack
    start, end = probes.length, probes.length + len(chunk)
    behind = torch.tensor([[*chunk, *model.encode(OPENING), *chunk]]).expand(count, -1)
    tokens = torch.cat([probes.tokens, behind], 1)
    tables = stack.rotary_tables(torch.arange(tokens.shape[1]))
    keep, hidden, read = CapturingCache(stack, tables), stack.embed(tokens), []
    for layer in range(stack.num_layers):
        seen: list[Tensor] = []
        hidden = stack.layer(layer, hidden, keep, tables, (Run(0, 0, tokens.shape[1]),), seen.append)
        read.append(seen[0].softmax(-1)[:, :, end:, start:end].amax((0, 2)))
    variance = torch.stack([key for key, _ in keep.layers])[:, :, :, start:end].var(1, correction=0).sum(-1)
    share = (variance / torch.stack(probes.spread)[:, :, None])[1:]
    p = stack.logits(hidden[:, start - 1 : end - 1].flatten(0, 1)).softmax(-1).view(count, len(chunk), -1)
    return share, torch.stack(read[1:]), 1 - p[:, torch.arange(len(chunk)), list(chunk)].mean(0)


def variants(model: Model, chunk: Sequence[int], counts: Sequence[int]) -> Variants:
    """Tables of a chunk by `model`, by the number of probes: as compiled, and read again."""
    found = {}
    for count in counts:
        share, read, new = read_twice(model, count, chunk)
        found[f"{count} probes"] = share.amax((0, 1)) * new
        found[f"{count} probes, read again: sqrt(var) · read"] = (share.sqrt() * read).amax((0, 1)) * new
        found[f"{count} probes, read again: var · read"] = (share * read).amax((0, 1)) * new
        found[f"{count} probes, read again: sqrt(var) · (read + 0.3)"] = (share.sqrt() * (read + 0.3)).amax(
            (0, 1)
        ) * new
    return {name: table.double().numpy() for name, table in found.items()}


def tables(name: str, page: Chunk) -> Variants:
    """Every table of a page: by the model itself, and of the embedded model by the small one and by both."""
    model = opened(name)
    found = {f"itself, {label}": table for label, table in variants(model, page.tokens, [PROBES]).items()}
    if name == "embedded":
        small = opened("embedded-small")
        source, target = tokenize(small.tokenizer, [page.text]), tokenize(model.tokenizer, [page.text])
        for label, table in variants(small, source.tokens.tolist(), [PROBES]).items():
            found[f"embedded-small, {label}"] = map_scores(table.astype(np.float32), source, target).astype(float)
        label = f"{PROBES} probes"
        found[f"sum of both, {label}"] = found[f"itself, {label}"] + found[f"embedded-small, {label}"]
    return found


def measure(name: str, size: int, index: int, per_kind: int) -> dict[str, Record]:
    """One prompt: every variant at every ratio."""
    model, prompt = opened(name), prompt_of(index, size, 8)
    pages = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    questions, each = questions_of(prompt, per_kind), [tables(name, page) for page in pages]
    kinds = np.asarray([KINDS.index(question.kind) for question in questions])
    runs: list[tuple[str, Policy]] = [(one, make_policy(one, {})) for one in ("full", "naive")]
    for label in each[0]:
        scores = np.concatenate([[-1.0], *(one[label] for one in each)])  # the head is exact
        chosen = {ratio: highest(scores, count_of(ratio, len(scores))) for ratio in RATIOS}
        runs += [(f"{label} @ {ratio}", Given(tuple(rows.tolist()))) for ratio, rows in chosen.items()]
    with tempfile.TemporaryDirectory() as directory:
        answers = {label: ask(model, Store(directory), pages, questions, policy) for label, policy in runs}
    return {
        label: {"right": got.right, "kl": kl(answers["full"], got), "rows": got.rows, "kinds": kinds}
        for label, got in answers.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for fixup_reading.json")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--sizes", nargs="+", type=int, default=[20])
    parser.add_argument("--per-kind", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    found: Record = {"machine": machine(), "prompts": arguments.prompts, "found": {}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for size, name in [(size, name) for size in arguments.sizes for name in ("embedded", "embedded-small")]:
            asked = [pool.submit(measure, name, size, i, arguments.per_kind) for i in range(arguments.prompts)]
            raw = []
            for number, one in enumerate(asked, 1):
                raw.append(one.result())
                print(f"{name} {size}: {number} of {len(asked)} prompts", file=sys.stderr, flush=True)
            ends = [[one[label] for one in raw] for label in ("full", "naive")]
            variants = {label: summarise([one[label] for one in raw], *ends) for label in raw[0]}
            questions = sum(len(one["full"]["right"]) for one in raw)
            found["found"][f"{name} {size}"] = {"questions": questions, "variants": variants}
            (arguments.out / "fixup_reading.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

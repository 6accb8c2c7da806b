"""The embedded models' committed scores: whole answers on held-out prompts, through the package itself.

    python -m training.evaluate --out training/scores.json

Each page is compiled on its own, the prompt is linked under `full` and `naive`, and the answer is decoded greedily.
A question counts as right if the whole answer is right. No seed of these prompts was trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from pictool import Chunk, Model, Sampling, Store, generate, link, load_model
from pictool.linker.grid import parse_grid
from pictool.runtime.chat.template import make_frame
from training.score import HELD_OUT
from training.world.generate import BOOKS, KINDS, PageShape, World, WorldPrompt, write_prompt

POLICIES = ("full", "naive")


def held_out_prompts(pages: int, count: int, shape: PageShape, world: World) -> Iterable[WorldPrompt]:
    for index in range(count):
        yield write_prompt(random.Random(f"{HELD_OUT}-evaluation-{pages}-{index}"), pages, shape, world)


def evaluate(
    model: Model,
    pages: int,
    count: int,
    per_prompt: int,
    shape: PageShape = PageShape(),
    world: World = BOOKS,
    policies: Sequence[str] = POLICIES,
) -> dict[str, Any]:
    """Answers right by policy and kind: {policy: {kind: [right, asked]}}."""
    table = {policy: {kind: [0, 0] for kind in KINDS} for policy in policies}
    for prompt in held_out_prompts(pages, count, shape, world):
        with tempfile.TemporaryDirectory() as directory:
            _ask(model, Store(directory), prompt, per_prompt, table)
    return table


def _ask(
    model: Model, store: Store, prompt: WorldPrompt, per_prompt: int, table: dict[str, dict[str, list[int]]]
) -> None:
    chunks = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    for kind in KINDS:
        for question in [q for q in prompt.questions if q.kind == kind][:per_prompt]:
            frame = make_frame(model, question.text)
            for policy in parse_grid(list(table)):
                linked = link(model, store, chunks, frame.tail, policy.policy, head=frame.head)
                text = generate(model, linked.image, 8, Sampling(stop=("\n",))).text
                table[policy.label][kind][0] += text.strip() == question.answer
                table[policy.label][kind][1] += 1


def summary(table: dict[str, dict[str, list[int]]]) -> dict[str, dict[str, float]]:
    """Shares right, by policy and kind and over all questions."""
    shares: dict[str, dict[str, float]] = {}
    for policy, kinds in table.items():
        shares[policy] = {kind: round(right / max(1, asked), 4) for kind, (right, asked) in kinds.items()}
        right, asked = (sum(values) for values in zip(*kinds.values(), strict=True))
        shares[policy]["all"] = round(right / asked, 4)
    return shares


def job(name: str, pages: int, prompts: int, per_prompt: int) -> dict[str, dict[str, list[int]]]:
    """One model at one number of pages, in a process of its own."""
    torch.set_num_threads(1)
    return evaluate(load_model(name, device="cpu"), pages, prompts, per_prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["embedded", "embedded-small"])
    parser.add_argument("--pages", type=int, nargs="+", default=[6, 10, 20])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--per-prompt", type=int, default=3, help="questions of each kind per prompt, at most")
    arguments = parser.parse_args()
    options = f"--out {arguments.out} --prompts {arguments.prompts} --per-prompt {arguments.per_prompt}"
    if arguments.models != parser.get_default("models"):
        options = f"--models {' '.join(arguments.models)} {options}"
    results: dict[str, Any] = {"command": f"python -m training.evaluate {options}"}
    jobs = [(name, pages) for pages in arguments.pages for name in arguments.models]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(job, *each, arguments.prompts, arguments.per_prompt) for each in jobs]
        for (name, pages), future in zip(jobs, futures, strict=True):
            table = future.result()
            results[f"{name}, {pages} pages"] = {"right": summary(table), "right_and_asked": table}
            print(name, pages, json.dumps(summary(table)), flush=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

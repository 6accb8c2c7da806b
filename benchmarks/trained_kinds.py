"""Answers of trained models of other kinds of attention: full, legolink-16 and blind reuse, on held-out questions.

    python -m benchmarks.trained_kinds --out benchmarks/results/trained_kinds.json

`embedded` answers questions of the world that it was trained on, the others (`training/zoo.py`) the same questions of
another one: `gemma3-wide` has keys and values and no experts, each of the rest is of one kind.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import write_results
from pictool import load_model
from training.evaluate import evaluate, summary
from training.world.generate import BOOKS, PageShape
from training.zoo import KINDS, MODELS, ZOO

POLICIES = ("full", "legolink-16", "naive")
SHAPE = PageShape(max_filler_sentences=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--per-prompt", type=int, default=3, help="questions of each kind per prompt, at most")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    worlds = {"embedded": BOOKS} | {name: m.world for name, m in {"gemma3-wide": ZOO["gemma3-wide"], **KINDS}.items()}
    results: dict[str, Any] = {}
    for name, world in worlds.items():
        model = load_model(name if name == "embedded" else str(MODELS / name), "cpu", "float32")
        table = evaluate(model, arguments.pages, arguments.prompts, arguments.per_prompt, SHAPE, world, POLICIES)
        results[name] = {
            "model_type": model.config.model_type, "right": summary(table), "right_and_asked": table,
        }  # fmt: skip
        print(name, {policy: shares["all"] for policy, shares in results[name]["right"].items()}, flush=True)
    write_results(arguments.out, {"models": results})


if __name__ == "__main__":
    main()

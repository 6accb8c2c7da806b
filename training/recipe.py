"""The recipes of the two embedded models: `python -m training.recipe` trains both and writes them into the package."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from training.data import Encoder
from training.network import Size
from training.package import write_model
from training.score import score
from training.tokenizer import byte_level, metaspace
from training.train import Recipe, Run, Stage, train

BASE = Size(layers=4, hidden=128, heads=4, ffn=384, vocab=1416)
SMALL = Size(layers=3, hidden=64, heads=2, ffn=160, vocab=1536)
BASE_STAGES = (
    Stage(0, pages=(4, 6), filler=2, restated=0.4),
    Stage(1000, pages=(4, 10), filler=4, restated=0.2),
    Stage(1600, pages=(2, 14), filler=6, restated=0.1),
    Stage(2000, pages=(2, 20), filler=6, restated=0.1),
)
SMALL_STAGES = (
    Stage(0, pages=(4, 6), filler=2, restated=0.4),
    Stage(1000, pages=(4, 10), filler=4, restated=0.2),
    Stage(2200, pages=(2, 14), filler=6, restated=0.1),
    Stage(3500, pages=(2, 20), filler=6, restated=0.1),
)
RECIPES = {
    "base": Recipe("base", BASE, seed=1, steps=2300, cooldown=800, stages=BASE_STAGES),
    "small": Recipe("small", SMALL, seed=2, steps=3400, cooldown=1000, stages=SMALL_STAGES),
}
TOKENIZERS = {"base": byte_level, "small": metaspace}
LOG_EVERY, SCORE_EVERY = 100, 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(RECIPES)}; all by default")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=Path("training/run"), help="checkpoints; a run there is continued")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in RECIPES]:
        parser.error(f"no such model: {', '.join(unknown)}")
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or RECIPES:
        make(RECIPES[name], arguments.work)


def make(recipe: Recipe, work: Path) -> None:
    """Train one model (continuing its checkpoint, if there is one) and write it into the package."""
    tokenizer = TOKENIZERS[recipe.name](recipe.size.vocab)
    encoder = Encoder(tokenizer)
    run = Run(recipe, encoder)
    log = Path(f"training/logs/{recipe.name}.log")
    train(run, log, work / f"{recipe.name}.pt", LOG_EVERY, lambda: score(run.model, encoder, 6, 32), SCORE_EVERY)
    write_model(run.model, tokenizer, recipe.name)


if __name__ == "__main__":
    main()

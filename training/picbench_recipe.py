"""Models for picbench, of all its tasks in one mixture: `python -m training.picbench_recipe NAME`.

A run continues its checkpoint. `training/picbench_models` has float16 weights that are computed in float32, and scores
on cases whose seed is never trained on. What is chosen on the first model is reported on the second.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.questions.picbench import Picbench
from benchmarks.questions.tasks import TASKS, Draw
from pictool import Store, load_model
from pictool.eval.evaluate import evaluate
from pictool.eval.policies import parse_policies
from training.data import Batch
from training.network import Size
from training.package import save_half
from training.picbench import PicbenchEncoder, Prompt, write
from training.score import HELD_OUT, answers
from training.train import Recipe, Run, Stage, train

DIRECTORY = Path(__file__).parent / "picbench_models"
SIZE = Size(layers=5, hidden=128, heads=4, ffn=384, vocab=641)
STAGES = (
    Stage(0, pages=(4, 6), filler=12, restated=0.0),
    Stage(2000, pages=(3, 5), filler=30, restated=0.0),
    Stage(2500, pages=(3, 5), filler=60, restated=0.0),
)
RECIPE = Recipe(
    "picbench", SIZE, seed=61, steps=2900, cooldown=650, stages=STAGES, batch_tokens=2600, questions=12,
    hint_until=5000, hint_weight=0.3, document_weight=0.03, muon_rate=0.01, adam_rate=0.002,
    subject_layer=1, bridge_layer=2, source_layer=3, hint_asked=True,
)  # fmt: skip
HOLD_OUT = replace(
    RECIPE, name="picbench-qwen3", size=replace(SIZE, architecture="qwen3", kv_heads=2), seed=62,
    steps=1900, cooldown=500, stages=(STAGES[0], replace(STAGES[1], start=1000), replace(STAGES[2], start=1400)),
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in (RECIPE, HOLD_OUT)}
LOG_EVERY = 50
CASES = Picbench(seed=1, documents=(4,), words=(50,), cases_each=60)  # of scores.json
# How often a task is drawn, as the first of its prompt and as a further one.
FIRST = {
    "keys": 1.5, "values": 4.0, "continued": 2.0, "two-hops": 3.0, "variables": 1.0, "counting": 0.4,
    "common-words": 0.2, "versions": 3.0, "choice": 0.5, "json": 3.0, "tool": 1.0, "code": 4.0,
}  # fmt: skip
ALONE = ("code", "common-words", "variables")


class PicbenchRun(Run):
    """Training on the mixture of tasks. A stage's pages are documents, its filler is words of each, at most."""

    encoder: PicbenchEncoder

    def batch(self) -> Batch:
        recipe, stage = self.recipe, self.recipe.stage(self.step)
        rng = random.Random(f"train-{recipe.name}-{recipe.seed}-{self.step}")
        count, words = rng.randint(*stage.pages), rng.randint(1, stage.filler)
        rows = max(1, round(recipe.batch_tokens / (count * (30 + 1.2 * words) + recipe.questions * 35)))
        prompts = [self._draw(rng, row, count, words) for row in range(rows)]
        return self.encoder.lay_out(prompts, [rng.random() < recipe.p_bos for _ in prompts])

    def _draw(self, rng: random.Random, row: int, count: int, words: int) -> Prompt:
        tasks = rng.choices(list(FIRST), list(FIRST.values()))
        if tasks[0] not in ALONE:
            others = [task for task in FIRST if task not in (*ALONE, *tasks)]
            tasks += rng.sample(others, rng.randint(0, 4))
        prompt = write(Draw(f"{self.recipe.name}-train-{self.recipe.seed}-{self.step}-{row}"), tasks, count, words)
        most = min(self.recipe.questions, len(prompt.questions))
        return replace(prompt, questions=tuple(rng.sample(prompt.questions, most)))


def held_out(run: PicbenchRun, prompts: int = 16) -> dict[str, float]:
    """Whole answers right under full attention, by task, of prompts of one task: four documents of 50 words."""
    shares = {}
    for task in FIRST:
        drawn = [write(Draw(f"{HELD_OUT}-{task}-{index}"), [task], 4, 50) for index in range(prompts)]
        drafted = [replace(p, questions=tuple(q for q in p.questions if q.is_drafted)) for p in drawn]
        right = [is_right for _, is_right in answers(run.model, run.encoder.lay_out(drafted, [True] * prompts))]
        shares[task] = round(sum(right) / prompts, 2)
    return shares


def scores(directory: Path) -> dict[str, float]:
    """The mean of each task's metric under full attention, of `CASES`, as the package answers them."""
    with tempfile.TemporaryDirectory() as store:
        model = load_model(str(directory), device="cpu")
        results = evaluate(model, Store(store), CASES, parse_policies([])).results
    by_task = {task: [result.scores[result.metric] for result in results if result.kind == task] for task in TASKS}
    return {task: round(sum(found) / len(found), 3) for task, found in by_task.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("training/run"), help="checkpoints; a run there is continued")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    name, directory = arguments.name, DIRECTORY / arguments.name
    run = PicbenchRun(RECIPES[name], PicbenchEncoder())
    log = Path(f"training/logs/{name}.log")
    train(run, log, arguments.work / f"{name}.pt", LOG_EVERY, lambda: held_out(run), 5 * LOG_EVERY)
    save_half(run.model, run.encoder.tokenizer, directory, bos="<s>", positions=SIZE.positions)
    (directory / "scores.json").write_text(json.dumps({"held-out, full": scores(directory)}, indent=1) + "\n")


if __name__ == "__main__":
    main()

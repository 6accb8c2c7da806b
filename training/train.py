"""Training: loss on answers, some on documents; two hints that fade; Muon and AdamW; a constant rate, then down."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import Batch, Encoder
from training.muon import Muon
from training.network import Hint, Size, build, forward
from training.world.generate import PageShape


@dataclass(frozen=True)
class Stage:
    """From step `start` on: how long prompts are, and how often a fact is restated.

    A restated fact is asked as a statement to complete ("Gadwick holds the") instead of as a question.
    """

    start: int
    pages: tuple[int, int]
    filler: int  # sentences per page, at most
    restated: float


@dataclass(frozen=True)
class Recipe:
    """Everything that a training run depends on."""

    name: str
    size: Size
    seed: int
    steps: int  # at constant rate
    cooldown: int  # further steps, down to rate 0
    stages: tuple[Stage, ...]
    batch_tokens: int = 4000
    questions: int = 20  # per prompt, at most
    muon_rate: float = 0.02
    adam_rate: float = 0.003
    hint_weight: float = 0.5
    hint_until: int = 1500  # step
    document_weight: float = 0.1
    warmup: int = 50
    p_bos: float = 0.7  # share of prompts that begin with BOS
    subject_layer: int = 1  # two heads: from a value in the documents to where its subject is named
    source_layer: int = 2  # two heads: from where an answer is predicted to where it is in the documents
    bridge_layer: int = -1  # two heads: from where an answer is predicted to what leads to it, of two hops; -1: none
    hint_asked: bool = False  # the heads of subject_layer also: from where an answer begins to its question's subject

    def stage(self, step: int) -> Stage:
        return [stage for stage in self.stages if stage.start <= step][-1]

    def rate(self, step: int) -> float:
        """The share of the learning rates at a step."""
        down = (self.steps + self.cooldown - step) / self.cooldown if step > self.steps else 1.0
        return min(1.0, (step + 1) / self.warmup, down)

    def hint(self, step: int) -> float:
        """The hints' weight at a step."""
        return self.hint_weight * max(0.0, 1 - step / self.hint_until)

    def hints(self, batch: Batch) -> tuple[Hint, ...]:
        subjects = torch.cat([batch.subjects, batch.asked]) if self.hint_asked else batch.subjects
        bridges = () if self.bridge_layer < 0 else (Hint(self.bridge_layer, batch.bridges),)
        return Hint(self.subject_layer, subjects), *bridges, Hint(self.source_layer, batch.sources)


class Run:
    """One training run; a step is a function of the recipe and the step's number only, so a run can be continued."""

    def __init__(self, recipe: Recipe, encoder: Encoder) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.encoder, self.step = recipe, encoder, 0
        self.model: Any = build(recipe.size)
        others = ("embed", ".gate.", ".router.")  # routers choose experts: steps of one size for all would be too large
        is_matrix = {
            name: p.ndim == 2 and not any(part in name for part in others) for name, p in self.model.named_parameters()
        }
        parameters = dict(self.model.named_parameters())
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon([p for name, p in parameters.items() if is_matrix[name]], lr=recipe.muon_rate, weight_decay=0.01),
            torch.optim.AdamW(
                [p for name, p in parameters.items() if not is_matrix[name]],
                lr=recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0,
            ),
        ]  # fmt: skip
        self._rates = [recipe.muon_rate, recipe.adam_rate]

    def batch(self) -> Batch:
        recipe, rng = self.recipe, random.Random(f"train-{self.recipe.seed}-{self.step}")
        stage = recipe.stage(self.step)
        pages, shape = rng.randint(*stage.pages), PageShape(max_filler_sentences=rng.randint(0, stage.filler))
        tokens = pages * (25 + 5 * shape.max_filler_sentences) + recipe.questions * 13
        self.encoder.restated = stage.restated
        rows = max(1, round(recipe.batch_tokens / tokens))
        return self.encoder.batch(rng, rows, pages, shape, recipe.questions, recipe.p_bos)

    def advance(self) -> tuple[float, float]:
        """One step; returns the losses on answers and on documents."""
        batch, recipe = self.batch(), self.recipe
        weight = recipe.hint(self.step)
        answers, documents, hints = losses(self.model, batch, recipe.hints(batch) if weight > 0 else (), seed=self.step)
        loss: Tensor = answers + recipe.document_weight * documents + weight * sum(hints)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * recipe.rate(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return answers.item(), documents.item()

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def losses(model: Any, batch: Batch, hints: tuple[Hint, ...], seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Mean cross-entropy on answers, on a third of the documents' tokens, and of the hints."""
    target = batch.tokens[:, 1:]
    is_answer = batch.kinds[:, 1:] >= 0
    inside = (batch.blocks[:, 1:] == 0) & (batch.blocks[:, :-1] == 0)
    sampled = torch.rand(inside.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    where = is_answer | (inside & sampled)
    logits, hint_losses = forward(model, batch, where, hints)
    each = F.cross_entropy(logits, target[where], reduction="none")
    return each[is_answer[where]].mean(), each[~is_answer[where]].mean(), hint_losses


def train(
    run: Run, log: Path, checkpoint: Path, log_every: int, held_out: Callable[[], object], held_out_every: int
) -> None:
    """Run the recipe to its end, from its checkpoint if there is one; every log line has a checkpoint.

    Args:
        held_out: scores, which every `held_out_every`-th step logs, too.
    """
    recipe, started = run.recipe, time.process_time()
    log.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        run.load(checkpoint)
        _append(log, f"continued at step {run.step}: {recipe}")
    else:
        log.write_text(f"{recipe}\nparameters {sum(p.numel() for p in run.model.parameters())}\n")
    means = [0.0, 0.0]
    while run.step < recipe.steps + recipe.cooldown:
        means = [mean + value / log_every for mean, value in zip(means, run.advance(), strict=True)]
        if run.step % log_every == 0:
            seconds = time.process_time() - started
            line = f"step {run.step} loss answers {means[0]:.3f} documents {means[1]:.3f} cpu {seconds:.0f} s"
            _append(log, line if run.step % held_out_every else f"{line} | held-out: {held_out()}")
            means = [0.0, 0.0]
            run.save(checkpoint)


def _append(log: Path, line: str) -> None:
    with log.open("a") as file:
        print(line, file=file)

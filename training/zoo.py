"""The zoo: small models that differ in what could matter to a policy. `python -m training.zoo` trains those missing.

Each binds facts over chunks, as the embedded models do, and is trained in the same way (`training/README.md`), in
minutes on one thread. A run continues its checkpoint. A finished model is in `training/zoo_models/NAME`: weights in
float16, computed in float32. They are instruments of tests and benches, and not in the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from training.data import Encoder
from training.network import Size
from training.package import save_half
from training.score import score
from training.tokenizer import byte_level, metaspace
from training.train import Recipe, Run, Stage, train
from training.world.generate import PageShape, World
from training.zoo_worlds import DEPOT, ESPACE, HARBOUR, MUSEO, PUEBLO, REGISTER, STADT

MODELS = Path(__file__).parent / "zoo_models"
LOG_EVERY = 50
WITHOUT_BOS = 0.3  # share of prompts that begin with EOS, of models without BOS


def stages(steps: int) -> tuple[Stage, ...]:
    """Longer and longer prompts, over the steps of constant rate."""
    return (
        Stage(0, pages=(3, 5), filler=0, restated=0.4),
        Stage(steps * 13 // 22, pages=(3, 6), filler=2, restated=0.2),
        Stage(steps * 9 // 11, pages=(2, 8), filler=6, restated=0.1),
    )


@dataclass(frozen=True)
class Member:
    """One model of the zoo."""

    size: Size
    world: World
    tokenizer: Callable[[int, World], Tokenizer]
    seed: int
    steps: int = 880
    cooldown: int = 220
    subject_layer: int = 1
    source_layer: int = 2
    muon_rate: float = 0.02
    hint_asked: bool = False
    stop: int = 0  # the step at which the cooldown begins, of a run that is left half learned

    def recipe(self, name: str) -> Recipe:
        return Recipe(
            f"zoo-{name}", self.size, self.seed, self.stop or self.steps, self.cooldown, stages(self.steps),
            batch_tokens=1800, hint_until=self.steps * 10 // 11, p_bos=0.7 if self.size.bos else WITHOUT_BOS,
            subject_layer=self.subject_layer, source_layer=self.source_layer, muon_rate=self.muon_rate,
            hint_asked=self.hint_asked,
        )  # fmt: skip

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer(self.size.vocab, self.world), self.world, "<s>" if self.size.bos else "</s>")


ZOO = {
    "llama-gqa": Member(Size(4, 64, 4, 160, 1000, 32, kv_heads=2), STADT, metaspace, seed=11, steps=1100, cooldown=300),
    "qwen3": Member(
        Size(3, 80, 4, 192, 760, 32, kv_heads=2, architecture="qwen3", bos=False), REGISTER, byte_level, seed=12,
        steps=1100, cooldown=300,
    ),
    "gemma3": Member(
        Size(5, 64, 4, 128, 900, 32, kv_heads=1, architecture="gemma3", local=(0, 2), window=48),
        PUEBLO, metaspace, seed=13, subject_layer=1, source_layer=3,
    ),
    "phi3": Member(
        Size(4, 72, 3, 176, 1000, 32, architecture="phi3", rotary=0.5), HARBOUR, byte_level, seed=14, steps=1400,
        cooldown=300,
    ),
    "llama-deep": Member(
        Size(8, 48, 3, 112, 1000, 32), HARBOUR, metaspace, seed=15, steps=1300, cooldown=300,
        subject_layer=2, source_layer=5,
    ),
    "gemma3-wide": Member(
        Size(4, 96, 4, 192, 900, 40, kv_heads=2, architecture="gemma3", local=(0, 3), window=64),
        ESPACE, metaspace, seed=19,
    ),
    "gemma3-deep": Member(
        Size(6, 64, 4, 144, 1000, 32, kv_heads=2, architecture="gemma3", local=(0, 2, 4), window=40),
        HARBOUR, byte_level, seed=21, subject_layer=1, source_layer=3, steps=1000,
    ),
    "qwen3-wide": Member(
        Size(3, 112, 4, 256, 1000, 32, architecture="qwen3"), STADT, metaspace, seed=22, steps=1000,
    ),
    "gemma3-terse": Member(
        Size(3, 72, 4, 160, 780, 32, kv_heads=2, architecture="gemma3", local=(1,), window=56, bos=False), REGISTER,
        metaspace, seed=23, subject_layer=1, source_layer=2,
    ),
}  # fmt: skip

# Kinds of layers that the others do not have: tests compare answers.
KINDS = {
    "experts": Member(
        Size(3, 96, 4, 160, 900, 32, kv_heads=2, architecture="qwen3_moe", experts=4), ESPACE, metaspace, seed=32,
        steps=400, cooldown=100,
    ),
    # Keys are a product of two matrices: at the others' rate attention to sources was not learned.
    "latents": Member(
        Size(3, 96, 4, 192, 900, 32, architecture="deepseek_v3", latent=96), ESPACE, metaspace, seed=31, steps=850,
        cooldown=150, muon_rate=0.007,
    ),
    "sinks": Member(
        Size(3, 96, 4, 160, 900, 32, kv_heads=2, architecture="gpt_oss", experts=4, local=(0,), window=48),
        ESPACE, metaspace, seed=33, steps=550, cooldown=100,
    ),
}  # fmt: skip

# Of the first, three layers of four have a state, which carries a subject from page to page; of the second, every other
# one, and attention carries it.
HYBRIDS = {
    "gated-delta": Member(
        Size(4, 96, 4, 192, 900, 32, kv_heads=2, architecture="qwen3_5_text", linear=(0, 1, 2)), ESPACE, metaspace,
        seed=41, steps=650, cooldown=100, source_layer=3, hint_asked=True,
    ),
    "mamba2": Member(
        Size(4, 96, 4, 192, 900, 32, kv_heads=2, architecture="bamba", linear=(0, 2)), ESPACE, metaspace, seed=42,
        steps=750, cooldown=200, source_layer=3, hint_asked=True,
    ),
}  # fmt: skip
# Nothing is chosen on these.
HOLD_OUTS = {
    "museo": Member(
        Size(5, 80, 4, 192, 900, 40, kv_heads=2, architecture="gemma3", local=(0, 3), window=64), MUSEO, byte_level,
        seed=52, steps=1300, cooldown=200,
    ),
    "depot": Member(
        Size(3, 96, 4, 192, 760, 32, kv_heads=2, architecture="qwen3"), DEPOT, metaspace, seed=51, steps=1300,
        cooldown=50, stop=1150,
    ),
}  # fmt: skip
HOLD_OUTS["depot-early"] = replace(HOLD_OUTS["depot"], stop=960, cooldown=40)
MEMBERS = {**ZOO, **KINDS, **HYBRIDS, **HOLD_OUTS}


def run_recipe(name: str, member: Member, work: Path) -> Run:
    """Run a recipe to its end, from its checkpoint if there is one, and write the log."""
    run = Run(member.recipe(name), member.encoder)
    log = Path("training/logs") / f"zoo-{name}.log"
    train(run, log, work / f"{name}.pt", LOG_EVERY, lambda: held_out(run.model, member, 16), 5 * LOG_EVERY)
    return run


def held_out(model: Any, member: Member, prompts: int) -> dict[str, dict[str, float]]:
    """Whole answers right under full attention, by tokens a page (about) and kind."""
    p_bos = 1.0 if member.size.bos else 0.0
    return {
        label: score(model, member.encoder, 6, prompts, PageShape(max_filler_sentences=filler), p_bos)
        for label, filler in (("20", 0), ("60", 6))
    }


def write(run: Run, member: Member, directory: Path) -> None:
    """Save a model as a directory of `transformers`: float16 weights that load as float32, and its scores."""
    scores = held_out(run.model, member, 64)
    save_half(
        run.model, member.encoder.tokenizer, directory, "<s>" if member.size.bos else None, member.size.positions
    )  # fmt: skip
    (directory / "scores.json").write_text(json.dumps({"held-out, full": scores}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(MEMBERS)}; all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("training/run"), help="checkpoints; a run there is continued")
    parser.add_argument("--models", type=Path, default=MODELS, help="where finished models go")
    parser.add_argument("--steps", type=int, help="of constant rate, instead of the recipe's: a shorter run")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if unknown := [name for name in arguments.names if name not in MEMBERS]:
        parser.error(f"no such model: {', '.join(unknown)}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or MEMBERS:
        member = MEMBERS[name] if arguments.steps is None else replace(MEMBERS[name], steps=arguments.steps)
        if not (arguments.models / name / "scores.json").exists():
            write(run_recipe(name, member, arguments.work), member, arguments.models / name)


if __name__ == "__main__":
    main()

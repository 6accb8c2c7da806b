"""A model that can decline: `base` of the package, trained further to answer ``none`` where the pages do not say.

    python -m training.judge

So a tree of judges can be studied (`benchmarks.span_queries tree`): one that reads two candidates of eight has nothing
to say about the others, and the next one reads its answer. A run continues its checkpoint. The model goes to
`training/judge_model`, in float16 and computed in float32; the embedded model stays as it is.

Three steps of eight are of pages as ever, where some questions are about what no page tells; two of haystacks: pages
with one fact each in much filler; two of candidates alone, the lines that earlier judges answered; one of pages and
candidates.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from training.data import Batch, Encoder
from training.package import MODELS, save_half
from training.recipe import BASE
from training.score import score
from training.train import Recipe, Run, Stage, train
from training.world.generate import (
    ALL_KINDS,
    KINDS,
    Attribute,
    Fact,
    Kind,
    PageShape,
    Question,
    WorldPrompt,
    filler,
    write_prompt,
)

DECLINED = "none"
DIRECTORY = Path(__file__).parent / "judge_model"
CYCLE = ("pages", "candidates", "haystack", "pages", "candidates beside pages", "haystack", "candidates", "pages")
RECIPE = Recipe(
    "judge", BASE, seed=31, steps=1500, cooldown=175, stages=(Stage(0, pages=(2, 16), filler=6, restated=0.1),),
    batch_tokens=3000, muon_rate=0.006, adam_rate=0.001, hint_weight=0.0, document_weight=0.05,
)  # fmt: skip
LOG_EVERY = 25
_OPENING = "Here begins a new book."
_MOST_TOKENS = 1200  # of a haystack; a sentence of filler has about 10


class JudgeEncoder(Encoder):
    """Prompts of a task of `CYCLE`, which is to be set before each batch."""

    kinds = (*KINDS, "absent", "judged")

    def __init__(self) -> None:
        super().__init__(Tokenizer.from_file(str(MODELS / "base" / "tokenizer.json")))
        self.task = "pages"

    def write(self, rng: random.Random, num_pages: int, shape: PageShape) -> WorldPrompt:
        """`num_pages` are those of the prompt: pages, candidates, or both."""
        if self.task == "pages":
            prompt = write_prompt(rng, num_pages, shape)
            return WorldPrompt(prompt.pages, (*prompt.questions, *_absent(rng, prompt.facts, 4)), prompt.facts)
        if self.task == "haystack":
            return haystack(rng, num_pages, shape.max_filler_sentences)
        if self.task == "candidates":
            return candidates(rng, num_pages)
        return beside_pages(rng, num_pages, shape)


def haystack(rng: random.Random, num_pages: int, sentences: int) -> WorldPrompt:
    """Pages that tell one fact each of subjects of one kind, with `sentences` of filler around it."""
    kind, attribute = _any_attribute(rng)
    values = rng.sample(_words(attribute), num_pages)
    facts, pages = [], []
    for page, (subject, value) in enumerate(zip(rng.sample(kind.subjects, num_pages), values, strict=True)):
        hay = [filler(rng) for _ in range(sentences)]
        hay.insert(rng.randint(0, sentences), attribute.statements[0].format(s=subject, v=value))
        facts.append(Fact(kind.name, subject, attribute, value, page, page))
        pages.append(" ".join([_OPENING, *hay]) + "\n")
    told = [Question(_ask(fact.attribute, fact.subject), fact.value, "local", (fact,)) for fact in facts]
    return WorldPrompt(tuple(pages), (*told, *_absent(rng, facts, max(2, num_pages))), tuple(facts))


def candidates(rng: random.Random, num_pages: int) -> WorldPrompt:
    """Lines as earlier judges answered: one value at most, maybe more than once; the others declined."""
    kind, attribute = _any_attribute(rng)
    value = rng.choice(_words(attribute))
    knowing = rng.choice([0, 1, 1, 1, 1, rng.randint(1, num_pages)])
    lines = [value] * knowing + [DECLINED] * (num_pages - knowing)
    rng.shuffle(lines)
    answer = value if knowing else DECLINED
    asked = [Question(_ask(attribute, subject), answer, "judged", ()) for subject in rng.sample(kind.subjects, 3)]
    return WorldPrompt(tuple(_line(rng, line) for line in lines), tuple(asked), ())


def beside_pages(rng: random.Random, num_pages: int, shape: PageShape) -> WorldPrompt:
    """Pages, and after them answers to one question, of which some are right; the pages say which."""
    prompt = write_prompt(rng, num_pages, shape)
    rank = {"two-hop": 2}
    question = min(prompt.questions, key=lambda question: rank.get(question.kind, rng.random()))
    (fact,) = question.facts[:1]
    wrong = [other.value for other in prompt.facts if other.attribute == fact.attribute and other.value != fact.value]
    drawn = [rng.choice([question.answer, question.answer, DECLINED, *wrong[:2]]) for _ in range(rng.randint(1, 5))]
    lines = tuple(_line(rng, line) for line in drawn)
    return WorldPrompt((*prompt.pages, *lines), (question,), prompt.facts)


def _line(rng: random.Random, answer: str) -> str:
    """An answer as the next judge reads it: as it was generated, or as its text is tokenized."""
    return (" " if rng.random() < 0.8 else "") + answer + "\n"


def _absent(rng: random.Random, facts: Sequence[Fact], count: int) -> Iterator[Question]:
    """Questions that the pages do not answer: what is told of others, asked of who is not there or not told of so."""
    told = {(fact.subject, fact.attribute.name) for fact in facts}
    named = {fact.subject for fact in facts}
    for fact in rng.choices(facts, k=count):
        others = [name for name in ALL_KINDS[fact.kind].subjects if (name, fact.attribute.name) not in told]
        here = [name for name in others if name in named]
        subject = rng.choice(here if here and rng.random() < 0.3 else others)
        yield Question(_ask(fact.attribute, subject), DECLINED, "absent", ())


def _any_attribute(rng: random.Random) -> tuple[Kind, Attribute]:
    kind = rng.choice(list(ALL_KINDS.values()))
    return kind, rng.choice(kind.attributes)


def _words(attribute: Attribute) -> Sequence[str]:
    values = attribute.values
    return ALL_KINDS[values].subjects if isinstance(values, str) else values


def _ask(attribute: Attribute, subject: str) -> str:
    text = attribute.question.format(s=subject)
    return text[0].upper() + text[1:] + "?"


class JudgeRun(Run):
    """Training from the weights of `base`, in the cycle of tasks."""

    encoder: JudgeEncoder

    def __init__(self, recipe: Recipe, encoder: JudgeEncoder) -> None:
        super().__init__(recipe, encoder)
        base = AutoModelForCausalLM.from_pretrained(MODELS / "base")
        self.model.load_state_dict(base.state_dict())

    def batch(self) -> Batch:
        """A batch of the step's task."""
        rng = random.Random(f"train-{self.recipe.name}-{self.recipe.seed}-{self.step}")
        self.encoder.task, self.encoder.restated = CYCLE[self.step % len(CYCLE)], self.recipe.stage(self.step).restated
        return draw(self.encoder, rng, self.recipe)


def draw(encoder: JudgeEncoder, rng: random.Random, recipe: Recipe) -> Batch:
    """A batch of the encoder's task, of about the recipe's tokens."""
    stage = recipe.stages[0]
    if encoder.task == "haystack":
        pages = rng.choice([1, 2, 2, 2, 2, 3, 4, 8])
        sentences = round(rng.random() ** 2 * _MOST_TOKENS / 10 / pages)
        most, tokens = 12, pages * (15 + 10 * sentences) + 12 * 13
    elif encoder.task == "candidates":
        pages, sentences, most = rng.choice([1, 2, 2, 2, 2, 3, 4, 8]), 0, 3
        tokens = 4 * pages + most * 13
    else:
        pages, sentences, most = rng.randint(*stage.pages), rng.randint(0, stage.filler), recipe.questions
        if encoder.task == "candidates beside pages":
            pages = min(pages, 6)
        tokens = pages * (25 + 5 * sentences) + most * 13
    rows = max(1, round(recipe.batch_tokens / tokens))
    return encoder.batch(rng, rows, pages, PageShape(max_filler_sentences=sentences), most, recipe.p_bos)


def held_out(run: JudgeRun) -> dict[str, dict[str, float]]:
    """Whole answers right under full attention, by task and kind of question."""
    scores = {}
    for task, pages, sentences in (("pages", 6, 6), ("haystack", 2, 25), ("candidates", 2, 0)):
        run.encoder.task = task
        scores[task] = score(run.model, run.encoder, pages, 16, PageShape(max_filler_sentences=sentences))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("training/run"), help="checkpoints; a run there is continued")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    run = JudgeRun(RECIPE, JudgeEncoder())
    log = Path("training/logs/judge.log")
    train(run, log, arguments.work / "judge.pt", LOG_EVERY, lambda: held_out(run), 4 * LOG_EVERY)
    scores = held_out(run)
    save_half(run.model, run.encoder.tokenizer, DIRECTORY, bos="<s>", positions=BASE.positions)
    (DIRECTORY / "scores.json").write_text(json.dumps({"held-out, full": scores}, indent=1) + "\n")


if __name__ == "__main__":
    main()

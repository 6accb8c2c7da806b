"""Edited histories: what to reuse after an edit, and what remains of what was deleted.

    OMP_NUM_THREADS=1 python -m benchmarks.edited_histories --out benchmarks/results/edited_histories.json

A history is the pages of a held-out world, a message each; the prompt asks for a fact of it. After an edit, messages
before it are an exact prefix, and what is new is computed. The messages after it are computed (full), or their KV is
moved, the first k tokens computed again, from one of two sources: `alone`, compiled as documents, or `old`, as they
were computed in the history before the edit.

Answers are to facts that the new history tells. Secrets are facts that only the old one tells: their value is on the
page that is gone (`value`), or the name of the subject whose value is still there (`name`). Recovered: greedy decoding
gives it. Probed: of the mean log-probabilities of its value and of the others that the attribute may have, its is the
highest of eight.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.output import write_results
from pictool.compiler.compile import CODEC, compile_chunks
from pictool.core import Chunk, CompileOptions
from pictool.engines.base import first_token_kl
from pictool.linker.link import Linked, link
from pictool.linker.plan import make_plan, plan_without_objects
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.recognition.matches import Match
from pictool.runtime.chat.template import make_frame
from pictool.runtime.memory.caches import CapturingCache, LayerKV, PassThroughCache
from pictool.runtime.memory.image import Image
from pictool.runtime.model import Model, load_model
from pictool.runtime.rope import RotaryTables, tables_at
from pictool.runtime.rows import Run
from pictool.runtime.tensors import to_bytes
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store
from training.score import HELD_OUT
from training.world.generate import ALL_KINDS, BOOKS, Fact, PageShape, Question, World, WorldPrompt, write_prompt
from training.zoo import MODELS, ZOO

EDITS = ("drop", "trim", "replace", "insert", "reorder", "compact")
SOURCES = ("alone", "old")
DECOYS = 7
PER_PROMPT = 4  # questions, and secrets, of one edit at most
SIZES, PAGES = {20: 0, 60: 6}, 6  # tokens of a page, about → sentences of filler, at most


@dataclass(frozen=True)
class Subject:
    """A model, and the world that it was trained on."""

    name: str
    world: World

    @cached_property
    def model(self) -> Model:
        directory = MODELS / self.name
        return load_model(str(directory) if directory.exists() else self.name, device="cpu")

    def prompt(self, size: int, index: int) -> WorldPrompt:
        """A prompt that nothing was trained on; a draw that runs out of names is drawn again."""
        for attempt in range(100):
            with suppress(IndexError):
                draw = random.Random(f"{HELD_OUT}-zoo-{size}-{index}-{attempt}")
                return write_prompt(draw, PAGES, PageShape(max_filler_sentences=SIZES[size]), self.world)
        raise AssertionError("the names of the world are too few")


def subjects() -> list[Subject]:
    """The embedded models, and the trained ones of the zoo."""
    trained = [Subject(name, ZOO[name].world) for name in ZOO if (MODELS / name / "scores.json").exists()]
    return [Subject("embedded", BOOKS), Subject("embedded-small", BOOKS), *trained]


@dataclass(frozen=True)
class Edit:
    """The messages of a new history, how many of the first are as before, and which pages of the old one are gone."""

    pages: tuple[str, ...]
    kept: int
    gone: frozenset[int]


def edit(kind: str, prompt: WorldPrompt, other: WorldPrompt, at: int) -> Edit:
    """Edit a history at page `at`."""
    pages, new = prompt.pages, other.pages[-1]
    before, page, after = pages[:at], pages[at], pages[at + 1 :]
    gone = frozenset((at,))
    match kind:
        case "drop":
            return Edit((*before, *after), at, gone)
        case "trim":
            return Edit((*before, page.partition(".")[0] + ".\n", *after), at, gone)
        case "replace":
            return Edit((*before, new, *after), at, gone)
        case "insert":
            return Edit((*before, new, page, *after), at, frozenset())
        case "reorder":
            return Edit((*before, *after, page), at, frozenset())
        case "compact":
            return Edit((new, *after), 0, frozenset(range(at + 1)))
    raise AssertionError(kind)


@dataclass
class Tally:
    """What one source gave under one edit, summed."""

    kl: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    found: dict[str, list[bool]] = field(default_factory=lambda: {"value": [], "name": []})
    probed: dict[str, list[bool]] = field(default_factory=lambda: {"value": [], "name": []})

    def report(self) -> dict[str, Any]:
        def share(hits: Sequence[bool | float]) -> float | None:
            return round(float(np.mean(hits)), 4) if hits else None

        secrets = {
            name: {"secrets": len(found), "recovered": share(found), "probed": share(self.probed[name])}
            for name, found in self.found.items()
        }  # fmt: skip
        return {"questions": len(self.right), "kl": share(self.kl), "right": share(self.right), **secrets}


def old_objects(model: Model, store: Store, head: Sequence[int], chunks: Sequence[Chunk]) -> None:
    """Put the KV of a history's messages, as it is in its context, in place of their objects."""
    if not chunks:
        return
    ids = [*head, *(token for chunk in chunks for token in chunk.tokens)]
    stack, tokens = model.stack, torch.tensor([ids])
    cache = CapturingCache(stack, tables := stack.rotary_tables(torch.arange(len(ids))))
    stack.layers(stack.embed(tokens), cache, tables, (Run(0, 0, len(ids)),))
    start = len(head)
    for chunk in chunks:
        end = start + len(chunk)
        pairs = [tuple(to_bytes(part[0, :, start:end]) for part in pair) for pair in cache.layers]
        meta = ObjectMeta(model.key(chunk.tokens, CODEC), model.target, len(chunk), CODEC)
        store.put(CompiledChunk(meta, chunk.text, np.asarray(chunk.tokens, dtype=np.int32), pairs))
        start = end


class Trial:
    """A new history with its context linked in each way; asks any question over it."""

    def __init__(self, model: Model, k: int, old: Sequence[str], new: Edit, root: Path, question: str) -> None:
        frame = make_frame(model, question)
        self._model, self._head = model, model.encode(frame.head)
        chunks = {page: Chunk(page, tuple(model.encode(page)), "message") for page in (*old, *new.pages)}
        self._tail = model.encode(frame.tail)
        moved = [page for page in new.pages[new.kept :] if page in old]
        stores = {name: Store(root / name) for name in SOURCES}
        old_objects(model, stores["old"], self._head, [chunks[page] for page in old])
        old_objects(model, stores["alone"], self._head, [chunks[page] for page in new.pages[: new.kept]])
        compile_chunks(model, stores["alone"], [chunks[page] for page in moved], CompileOptions(), check=False)
        ids, matches = [*self._head], list[Match]()
        for index, page in enumerate(new.pages):
            tokens = np.asarray(chunks[page].tokens, dtype=np.int32)
            if index < new.kept or page in moved:
                matches.append(Match(model.key(chunks[page].tokens, CODEC), len(ids), tokens))
            ids += chunks[page].tokens
        tokens = np.asarray([*ids, *self._tail], dtype=np.int32)
        self.linked: dict[str, Linked] = {}
        exact = plan_without_objects(make_policy("full"), tokens)
        self.linked["full"] = link(model, stores["alone"], Spec.planned(exact))
        plan = make_plan(make_policy("legolink", {"k": k}), tokens, matches)
        for name in SOURCES:
            self.linked[name] = link(model, stores[name], Spec.planned(plan))
        self._context = len(ids)

    def scores(self, name: str, question: str, answers: Sequence[str]) -> tuple[bool, list[float]]:
        """Whether greedy decoding gives the first answer, and the mean log-probability of each one's tokens."""
        model, linked = self._model, self.linked[name]
        tail = model.encode(make_frame(model, question).tail)
        golds = [model.encode(" " + answer) for answer in answers]
        hidden = hidden_after(linked, self._context, [[*tail, *gold[:-1]] for gold in golds])
        probabilities = list[float]()
        is_found = False
        for index, gold in enumerate(golds):
            logits = model.stack.logits(hidden[index, len(tail) - 1 : len(tail) - 1 + len(gold)])
            if not index:
                is_found = logits.argmax(-1).tolist() == list(gold)
            picked = logits.double().log_softmax(-1)[torch.arange(len(gold)), torch.tensor(gold)]
            probabilities.append(float(picked.mean()))
        return is_found, probabilities


class AfterImage(PassThroughCache):
    """Rows attend to the first tokens of an image, and to each other."""

    def __init__(self, image: Image, context: int, tables: RotaryTables) -> None:
        super().__init__(image.stack, tables)
        self._image, self._context = image, context

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        key, value = super().update(key, value, layer)
        before = [part[:, :, : self._context] for part in (self._image.key(layer), self._image.value(layer))]
        first, second = (part.expand(len(key), -1, -1, -1) for part in before)
        return torch.cat([first, key], 2), torch.cat([second, value], 2)


def hidden_after(linked: Linked, context: int, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Hidden states [sequences, longest, hidden] of token sequences after the history, which ends at `context`."""
    image, longest = linked.image, max(map(len, sequences))
    tokens = torch.tensor([[*each, *[each[-1]] * (longest - len(each))] for each in sequences])
    rows = tables_at(image.stack.rotary_tables(torch.arange(context + longest)), slice(context, None))
    cache, runs = AfterImage(image, context, rows), (Run(0, context, context + longest),)
    return image.stack.layers(image.stack.embed(tokens), cache, rows, runs)


def secrets_of(prompt: WorldPrompt, new: Edit) -> Iterator[tuple[str, Fact, str]]:
    """Facts that only the old history tells: why, the fact, and the question for it."""
    for question in prompt.questions:
        if len(question.facts) != 1:
            continue
        fact = question.facts[0]
        if fact.page in new.gone and fact.value not in "".join(new.pages):
            yield "value", fact, question.text
        elif fact.named_on in new.gone and fact.page not in new.gone and fact.subject not in "".join(new.pages):
            yield "name", fact, question.text


def answerable(prompt: WorldPrompt, new: Edit) -> list[Question]:
    return [question for question in prompt.questions if not new.gone & {*question.pages}]


def values_of(subject: Subject, fact: Fact) -> Sequence[str]:
    values = fact.attribute.values
    kinds = {kind.name: kind for kind in subject.world.kinds} or ALL_KINDS
    return kinds[values].subjects if isinstance(values, str) else values


def measure(subject: Subject, prompts: int, size: int, k: int) -> dict[str, dict[str, Any]]:
    tallies = {kind: {name: Tally() for name in ("full", *SOURCES)} for kind in EDITS}
    for index in range(prompts):
        prompt, other, draw = subject.prompt(size, index), subject.prompt(size, 1000 + index), random.Random(index)
        for kind in EDITS:
            new = edit(kind, prompt, other, draw.randint(1, len(prompt.pages) - 3))
            questions, secrets = answerable(prompt, new)[:PER_PROMPT], [*secrets_of(prompt, new)][:PER_PROMPT]
            if questions:
                with tempfile.TemporaryDirectory() as root:
                    trial = Trial(subject.model, k, prompt.pages, new, Path(root), questions[0].text)
                    ask(subject, trial, draw, questions, secrets, tallies[kind])
    return {kind: {name: tally.report() for name, tally in of.items()} for kind, of in tallies.items()}


def ask(
    subject: Subject, trial: Trial, draw: random.Random, questions: Sequence[Question],
    secrets: Sequence[tuple[str, Fact, str]], tallies: Mapping[str, Tally],
) -> None:  # fmt: skip
    full = trial.linked["full"].image.logits
    assert full is not None
    decoys = {}
    for _, fact, text in secrets:
        others = [value for value in values_of(subject, fact) if value != fact.value]
        decoys[text] = [fact.value, *draw.sample(others, min(DECOYS, len(others)))]
    for name, tally in tallies.items():
        logits = trial.linked[name].image.logits
        assert logits is not None
        tally.kl.append(first_token_kl(full, logits))
        tally.right += [trial.scores(name, question.text, [question.answer])[0] for question in questions]
        for why, _, text in secrets:
            is_found, scores = trial.scores(name, text, decoys[text])
            tally.found[why].append(is_found)
            tally.probed[why].append(scores[0] == max(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--models", default="", help="names, by commas (all that are trained)")
    parser.add_argument("--prompts", type=int, default=20, help="histories of each model")
    parser.add_argument("--size", type=int, default=60, help="tokens of a message, about: 20 or 60")
    parser.add_argument("--k", default="0,16", help="tokens of a moved message that are computed again")
    options = parser.parse_args()
    chosen = [one for one in subjects() if not options.models or one.name in options.models.split(",")]
    rows = list[dict[str, Any]]()
    for subject in chosen:
        for k in map(int, options.k.split(",")):
            edits = measure(subject, options.prompts, options.size, k)
            rows.append({"model": subject.name, "k": k, "edits": edits})
            print(rows[-1], flush=True)
            if options.out is not None:
                write_results(options.out, {"prompts": options.prompts, "size": options.size, "rows": rows})


if __name__ == "__main__":
    main()

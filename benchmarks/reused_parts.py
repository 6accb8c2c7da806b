"""How often does a part of a document tell of the text that the prompt lacks (`pic serve --reuse-parts`)?

    python -m benchmarks.reused_parts    # → reused_parts.json (minutes)

All pages of a held-out world are one document. Its last pages are pasted, and questions asked of them: *absent*, whose
fact is told in the omitted pages alone; *unnamed*, whose fact is pasted, but its subject is named only by the page that
is omitted before; *present*, all of which is pasted. `right` counts the document's answers. Under full recompute of the
pasted pages, the first two are guesses; what a policy answers more often it has from the omitted text. `whole` is full
recompute of the whole document.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import write_results
from pictool import Model, Sampling, Spec, Store, load_model
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import compile_chunks
from pictool.core import TokenIds
from pictool.engines.torch import TorchEngine
from pictool.linker.grid import parse_policy
from pictool.linker.plan import make_plan, plan_without_objects
from pictool.runtime.chat.template import make_frame
from pictool.store.matches import Match
from pictool.store.recognition import ContentIndex
from pictool.world.generate import Question, WorldPrompt, write_prompt

RESULTS = Path("benchmarks/results/reused_parts.json")
POLICIES = ("naive", "legolink-16", "cacheblend-15", "full")
PAGES = 6


def kind_of(question: Question, prompt: WorldPrompt, first: int) -> str | None:
    """What the pages from `first` on have of a question; None: something else, or its answer by chance."""
    if all(page >= first for page in question.pages):
        return "present"
    if question.answer in "".join(prompt.pages[first:]):
        is_carried = question.kind == "carried" and max(question.pages) == first
        return "unnamed" if is_carried else None
    return "absent" if question.kind in ("local", "carried") else None


def questions(prompt: WorldPrompt, first: int) -> Iterator[tuple[str, Question]]:
    """At most two questions of each kind."""
    counts = Counter[str]()
    for question in prompt.questions:
        kind = kind_of(question, prompt, first)
        if kind is not None and counts[kind] < 2:
            counts[kind] += 1
            yield kind, question


class Trial:
    """One world: its document, compiled, and the pages that are pasted."""

    def __init__(self, model: Model, store: Store, prompt: WorldPrompt, first: int) -> None:
        self.model, self.engine = model, TorchEngine(model, store)
        self.whole, self.pasted = "".join(prompt.pages), "".join(prompt.pages[first:])
        compile_chunks(model, store, [make_chunk(model, self.whole, "document")])
        self.index = ContentIndex(store, model.target, 16, model.tokenizer.decode, model.bos_id, finds_parts=True)
        self.index.refresh()

    def tokens(self, text: str, question: Question) -> TokenIds:
        frame = make_frame(self.model, question.text)
        parts = [self.model.encode(part) for part in (frame.head, text, frame.tail)]
        return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])

    def answer(self, label: str, question: Question) -> tuple[str, list[Match]]:
        """The answer under a policy, and the parts that were linked."""
        policy = parse_policy("full" if label == "whole" else label)
        tokens = self.tokens(self.whole if label == "whole" else self.pasted, question)
        found = self.index.find(tokens, policy.needs.sinks) if policy.needs.objects else []
        plan = make_plan(policy, tokens, found) if found else plan_without_objects(policy, tokens)
        answer = self.engine.answer(Spec.planned(plan, 8, Sampling(stop=("\n",))))
        return answer.text.strip(), found


def measure(model: Model, num_worlds: int) -> dict[str, Any]:
    """The right answers by policy and kind, and how many were asked."""
    asked, right, linked = Counter[str](), defaultdict[str, Counter[str]](Counter), list[tuple[int, int]]()
    for number in range(num_worlds):
        draw = random.Random(f"held-out-parts-{number}")
        prompt, first = write_prompt(draw, PAGES), draw.randrange(2, 4)
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(model, Store(Path(folder) / "store"), prompt, first)
            for kind, question in questions(prompt, first):
                answers = {label: trial.answer(label, question) for label in (*POLICIES, "whole")}
                if not all(found for label, (_, found) in answers.items() if label not in ("full", "whole")):
                    continue  # the pasted pages are shorter than a part
                asked[kind] += 1
                right[kind].update(label for label, (text, _) in answers.items() if text == question.answer)
                linked += [(match.end - match.start, match.part_of) for match in answers["naive"][1]]
        print(f"\r{number + 1} of {num_worlds} worlds", end="", flush=True)
    return {
        "asked": dict(asked),
        "linked_tokens_mean": float(np.mean([part for part, _ in linked])),
        "document_tokens_mean": float(np.mean([whole for _, whole in linked])),
        "right": {kind: {label: count[label] for label in (*POLICIES, "whole")} for kind, count in right.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--worlds", type=int, default=60)
    options = parser.parse_args()
    model = load_model(options.model, "cpu", "float32")
    write_results(RESULTS, {"model": model.name, "worlds": options.worlds, **measure(model, options.worlds)})


if __name__ == "__main__":
    main()

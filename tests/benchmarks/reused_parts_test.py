"""What a part of a document tells of the text that the prompt lacks (docs/design.md §2, rule 7), on trained weights."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.reused_parts import PAGES, Trial, questions
from pictool import load_model
from pictool.store.store import Store
from pictool.world.generate import write_prompt


def test_a_fact_of_the_omitted_part_is_answered_from_the_kv_of_the_linked_one(tmp_path: Path) -> None:
    """The pasted pages tell a fact of somebody whom only the omitted page names: under full recompute it is a guess."""
    model, asked, right = load_model("embedded", "cpu", "float32"), 0, {"full": 0, "naive": 0}
    for number in range(6):
        draw = random.Random(f"held-out-parts-{number}")
        prompt, first = write_prompt(draw, PAGES), draw.randrange(2, 4)
        trial = Trial(model, Store(tmp_path / f"store-{number}"), prompt, first)
        for question in [question for kind, question in questions(prompt, first) if kind == "unnamed"]:
            answers = {label: trial.answer(label, question) for label in right}
            (match,) = answers["naive"][1]
            assert match.offset > 0 and match.offset + len(match.tokens) <= match.part_of
            asked += 1
            for label, (text, _) in answers.items():
                right[label] += text == question.answer
    assert asked >= 4 and right["naive"] >= 0.5 * asked > right["full"]

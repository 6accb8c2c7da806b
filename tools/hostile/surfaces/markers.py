"""Texts that name special tokens, which no text may make: tokenizers of every kind, templates of every kind
(`tests/quoting.py`); and documents through the command line."""

from __future__ import annotations

import json
import random
from typing import ClassVar

from commands.run import write
from quoting import TEMPLATES, quote, without_markers, write_text
from small_tokenizers import KINDS

from hostile.judge import Case, Outcome, Step
from hostile.surfaces.base import Surface


class Markers(Surface):
    """Nothing is refused: the control tokens of a prompt are those of its template."""

    name: ClassVar[str] = "markers"
    weight: ClassVar[int] = 1

    def make(self, draw: random.Random) -> Case:
        if draw.random() < 0.2:
            return self._linked(draw)
        kind, template, seed = draw.choice(list(KINDS)), draw.choice(list(TEMPLATES)), draw.getrandbits(32)

        def check(outcome: Outcome) -> str | None:
            return None if outcome.out == "None\n" else outcome.out

        arguments = (quote.__name__, "--kind", kind, "--template", template, "--seed", seed)
        return Case(f"{kind}, {template}, {seed}", (Step(arguments, (), check, True, 20.0),))

    def _linked(self, draw: random.Random) -> Case:
        """A document and a question, of which only the head has a control token (BOS)."""
        text, question = write_text(draw), write_text(draw)
        write("a.txt", text)
        write("b.txt", without_markers(text))
        more = ("--algo", draw.choice(("naive", "full", "legolink-2")), "-m", self.scene.model, "--store", "st")
        compiling = ("compile", "a.txt", "-m", self.scene.model, "--store", "st", "--json")
        linking = ("link", "a.txt", "b.txt", "-q", question, *more, "--max-new-tokens", 2, "--compare", "--json")

        def check_note(outcome: Outcome) -> str | None:
            is_marked = any(marker in text for marker in ("<s>", "</s>"))
            return None if ("a.txt: contains the marker" in outcome.err) == is_marked else f"notes: {outcome.err!r}"

        def check_head(outcome: Outcome) -> str | None:
            tokens = json.loads(outcome.out)["tokens"]
            return None if tokens["head"] == 1 else f"a head of {tokens['head']} tokens"

        steps = Step(compiling, (), check_note, True), Step(linking, (), check_head, True)
        return Case(f"{text!r}, {question!r}", steps)

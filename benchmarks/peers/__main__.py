"""Others that reuse KV, on the same prompts as pictool: `python -m benchmarks.peers`.

    python -m benchmarks.peers --python vllm=.venv-vllm/bin/python --python kvboost=KVBOOST/bin/python \\
        --out benchmarks/results/peers.json

Each peer runs in the Python that is named for it, else in this one; one that cannot run says why. Every request is a
head, documents and a question. `cold`: documents that the peer has not seen. `again`: another question about them.
`moved`: another question, and the documents in another order. Speed: a random model, the seconds of a call that makes
one token; a peer is compared with its own cold calls only. Answers: the embedded model, whose answers are compared
with those of `transformers` for the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.output import write_results
from benchmarks.peers import adapters
from benchmarks.peers.adapters import PEERS, SEPARATOR, Request, text_of
from pictool.bench.shapes import random_module, shape_of
from pictool.core import PromptText
from pictool.runtime.model import Model, load_model
from training.world.generate import filler, question_text, write_prompt

PHASES = ("cold", "again", "moved")
LIMIT_S = 1800.0  # of a peer's process


@dataclass(frozen=True)
class Part:
    """A model, and what is asked of every peer."""

    model: Model
    directory: Path
    repeats: list[dict[str, Request]]
    new_tokens: int

    def work(self, scratch: Path) -> dict[str, Any]:
        """The file that an adapter reads."""
        longest = max(
            len(self.model.encode(PromptText(text_of(each)))) for repeat in self.repeats for each in repeat.values()
        )
        return {
            "model": str(self.directory), "scratch": str(scratch), "repeats": self.repeats,
            "new_tokens": self.new_tokens, "max_tokens": longest + self.new_tokens + 16,
        }  # fmt: skip


def requests(
    model: Model, documents: Sequence[str], questions: Sequence[str], draw: random.Random
) -> dict[str, Request]:
    """The three requests about some documents. Their texts and their parts have the same tokens."""
    moved = list(documents)
    while moved == list(documents):
        draw.shuffle(moved)
    head, made = str(model.tokenizer.bos_token) + SEPARATOR, dict[str, Request]()
    for phase, order, question in zip(PHASES, (documents, documents, moved), questions, strict=True):
        parts = [text + SEPARATOR for text in order]
        made[phase] = {"head": head, "documents": parts, "tail": question_text(question)}
        texts: list[str] = [head, *parts, question_text(question)]
        tokens = [token for text in texts for token in model.encode(PromptText(text))]
        assert tokens == list(model.encode(PromptText(text_of(made[phase])))), "a tokenizer that joins the parts"
    return made


def speed_part(shape: str, documents: int, tokens: int, repeats: int, scratch: Path) -> Part:
    """A random model; documents of about so many tokens, which differ in every repeat."""
    model, directory, draw = load_model("embedded"), scratch / "speed", random.Random(1)
    random_module(shape_of(shape).make_config(), "cpu", "float32", 0).save_pretrained(directory)
    model.tokenizer.save_pretrained(directory)
    rows = []
    for _ in range(repeats + 1):
        texts = [""] * documents
        for number in range(documents):
            while len(model.encode(texts[number])) < tokens:
                texts[number] += filler(draw) + "\n"
        rows.append(requests(model, texts, [f"Which of {draw.randrange(100)}?" for _ in PHASES], draw))
    return Part(model, directory, rows, 1)


def answers_part(repeats: int, scratch: Path) -> Part:
    """The embedded model, pages of its world, and questions about them."""
    model, directory, draw = load_model("embedded"), scratch / "answers", random.Random(2)
    rows = list[dict[str, Request]]()
    transformers.AutoModelForCausalLM.from_pretrained(model.directory).save_pretrained(directory)
    model.tokenizer.save_pretrained(directory)
    while len(rows) <= repeats:
        prompt = write_prompt(draw, 4)
        if len(prompt.questions) >= len(PHASES):
            questions = [question.text for question in draw.sample(prompt.questions, len(PHASES))]
            rows.append(requests(model, prompt.pages, questions, draw))
    return Part(model, directory, rows, 12)


def references(part: Part) -> list[dict[str, str]]:
    """What `transformers` answers, from nothing."""
    module = transformers.AutoModelForCausalLM.from_pretrained(part.directory, dtype=torch.float32).eval()
    answers = []
    for repeat in part.repeats[1:]:
        row = {}
        for phase, request in repeat.items():
            ids = torch.tensor([part.model.encode(PromptText(text_of(request)))])
            with torch.inference_mode():
                made = module.generate(ids, max_new_tokens=part.new_tokens, do_sample=False)
            row[phase] = str(part.model.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
        answers.append(row)
    return answers


def run_peer(name: str, python: str, part: Part, scratch: Path) -> dict[str, Any]:
    """One peer's process, over all requests."""
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        (work := Path(directory, "work.json")).write_text(json.dumps(part.work(Path(directory, "store"))))
        try:
            done = subprocess.run(
                [python, adapters.__file__, name, str(work)], capture_output=True, text=True, timeout=LIMIT_S,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"peer": name, "why": str(error)[:300]}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    return (
        json.loads(lines[-1]) if lines else {"peer": name, "why": f"ended by {done.returncode}: {done.stderr[-300:]}"}
    )


def summary(told: Mapping[str, Any], expected: Sequence[Mapping[str, str]] | None) -> dict[str, Any]:
    """Medians of seconds, and of cold ÷ each phase by repeat; reused tokens; how many answers are as expected."""
    rows, found = told["rows"], dict[str, Any]()
    for phase in [*PHASES, "compile"]:
        if phase in rows[0]:
            seconds = [row[phase]["seconds"] for row in rows]
            ratios = [row["cold"]["seconds"] / row[phase]["seconds"] for row in rows]
            found[phase] = {"median_s": statistics.median(seconds), "cold_over_it": statistics.median(ratios)}
        if phase in PHASES:
            reused = [row[phase]["reused"] for row in rows]
            found[phase]["reused_tokens"] = None if None in reused else statistics.median(reused)
            if expected is not None:
                pairs = zip(rows, expected, strict=True)
                found[phase]["equal"] = sum(row[phase]["text"].strip() == want[phase].strip() for row, want in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="for peers that begin so")
    parser.add_argument("--peers", default=",".join(PEERS), help="with commas (default: %(default)s)")
    parser.add_argument("--shape", default="small", help="of the random model (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of a document")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--questions", type=int, default=20, help="thirds of the answers that are compared")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in options.python)
    results = {"shape": options.shape, "documents": options.documents, "tokens": options.tokens, "peers": {}}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        speed = speed_part(options.shape, options.documents, options.tokens, options.repeats, scratch)
        answers = answers_part(options.questions, scratch)
        expected = references(answers)
        for name in options.peers.split(","):
            python = pythons.get(name.split()[0], sys.executable)
            told = {"speed": run_peer(name, python, speed, scratch)}
            if "rows" in told["speed"]:
                told["answers"] = run_peer(name, python, answers, scratch)
            for part, each in told.items():
                if "rows" in each:
                    told[part] = each | summary(each, expected if part == "answers" else None)
                print(name, part, each.get("why") or {phase: told[part][phase] for phase in PHASES}, flush=True)
            results["peers"][name] = told
            if options.out is not None:
                write_results(options.out, results)


if __name__ == "__main__":
    main()

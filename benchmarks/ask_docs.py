"""`pic ask --compare` over a folder of real files, question by question: time to the first token, and answers kept.

    python -m benchmarks.ask_docs MODEL --out benchmarks/results/ask_docs_smollm2.json

The folder is docs/ of this repository, the questions are `ask_docs.jsonl`: each has words that a right answer contains,
and the file that has them. Passages are compiled before a question's time begins, as the next question over the same
files finds them. On one thread, in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import write_results
from pictool import Store, load_model
from pictool.conversation import NUM_PASSAGES, Conversation
from pictool.documents.finding import find_files
from pictool.documents.library import LibraryReader
from pictool.engines.torch import TorchEngine
from pictool.linker.grid import named_policy
from pictool.linker.spec import Spec

FOLDER = Path(__file__).parent.parent / "docs"
QUESTIONS = Path(__file__).with_name("ask_docs.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--algo", default="auto")
    parser.add_argument("--passages", type=int, default=NUM_PASSAGES)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.model, "cpu", "float32")
    spec = Spec(policy=named_policy(options.algo), max_new_tokens=options.max_new_tokens)
    questions = [json.loads(line) for line in options.questions.read_text().splitlines()][: options.limit]
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        with LibraryReader(model) as reader, TorchEngine(model, store) as engine:
            library = reader.read(find_files([options.folder]))
            answers = []
            for question in questions:
                ask = partial(Conversation, engine, library, spec, options.passages)
                answers.append(answered(ask, question, options.folder))
    found = {"passages": len(library.sizes), **summary(answers)}
    print(json.dumps(found, indent=1))
    if options.out:
        write_results(options.out, {"model": model.name, "algo": options.algo, **found, "answers": answers})


def answered(converse: Callable[[], Conversation], question: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A question's answers, linked and by full recompute; its passages were compiled for the question asked before."""
    converse().ask(question["query"])
    report = converse().ask(question["query"], compare=True).report()
    full = report["compare"]
    return {
        "query": question["query"],
        "is_found": any(Path(source["path"]) == folder / question["file"] for source in report["sources"]),
        "context_tokens": report["tokens"]["context"],
        "recomputed": report["tokens"]["recomputed"],
        "ttft_s": report["timing"]["ttft_s"],
        "full_ttft_s": full["ttft_s"],
        "answer": report["answer"],
        "full": full["answer"],
        "is_right": is_right(report["answer"], question),
        "full_is_right": is_right(full["answer"], question),
        "kl": full["answer_kl"],
    }


def is_right(answer: str, question: dict[str, Any]) -> bool:
    """Whether an answer has the words of a right one."""
    return any(words.lower() in answer.lower() for words in question["answers"])


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    of_full = [one for one in answers if one["full_is_right"]]
    return {
        "questions": len(answers),
        "found": sum(one["is_found"] for one in answers),
        "context_tokens": statistics.median(one["context_tokens"] for one in answers),
        "full_ttft_s": statistics.median(one["full_ttft_s"] for one in answers),
        "ttft_s": statistics.median(one["ttft_s"] for one in answers),
        "full_right": len(of_full),
        "right": sum(one["is_right"] for one in answers),
        "kept": sum(one["is_right"] for one in of_full),
        "same_text": sum(one["answer"] == one["full"] for one in answers),
    }


if __name__ == "__main__":
    main()

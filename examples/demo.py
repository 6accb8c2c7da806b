"""The demo of `make demo`: documents compiled once, linked, and compared with full recompute.

With a model, `make demo MODEL=smollm2`: questions about this repository's docs, as `pic ask --compare` answers them.
Else the embedded model and the documents of its invented world, under several policies; times are medians of five links
each, after a warm-up.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import pictool
from pictool.commands.settings.resources import quiet_libraries
from pictool.runtime.chat.template import make_frame

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures"
STORE = ROOT / ".pic"
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}), ("naive", {}), ("legolink", {"k": 16}), ("auto", {}),
)  # fmt: skip
REPEATS = 5
QUESTIONS = ("Which port does pic serve listen on by default?", "What is the name of the connector for vLLM?")


def ask_docs(model: str) -> None:
    """Run `pic ask` on the docs, as a user would."""
    for question in QUESTIONS:
        words = ["ask", "docs", "-m", model, "-q", question, "--max-new-tokens", "24", "--compare"]
        print(f"\n$ pic {shlex.join(words)}", flush=True)
        subprocess.run([str(Path(sys.executable).parent / "pic"), *words], cwd=ROOT, check=True)


def compile_corpus() -> None:
    """Run `pic compile` on every document, as a user would."""
    files = sorted(str(path.relative_to(ROOT)) for path in (FIXTURES / "docs").glob("*.txt"))
    print("$ pic compile fixtures/docs/*.txt", flush=True)
    pic = [str(Path(sys.executable).parent / "pic"), "compile", "--store", str(STORE), "-m", "embedded", *files]
    shown = subprocess.run(pic, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    print("\n".join([*shown[:3], f"... {len(shown) - 3} more"]), flush=True)


def ask(model: pictool.Model, store: pictool.Store, query: dict[str, Any], policy: pictool.Policy) -> pictool.Answer:
    documents = [FIXTURES / name for name in query["documents"]]
    return pictool.answer(model, store, pictool.Request(query["query"], documents, policy, max_new_tokens=16))


def show(console: Console, model: pictool.Model, store: pictool.Store, query: dict[str, Any]) -> None:
    """One question under every policy."""
    right = query["answers"][0]
    about = f"({len(query['documents'])} documents, {query['kind']}; right: {right})"
    console.print(f"\n[bold]{query['query']}[/bold]  {about}", highlight=False)
    table = Table("policy", "answer", "rows recomputed", "TTFT ms", "speedup")
    full_ttft = 0.0
    for name, fields in POLICIES:
        answers = [ask(model, store, query, pictool.make_policy(name, fields)) for _ in range(REPEATS + 1)][1:]
        linked = answers[0].linked
        ttft = statistics.median(answer.linked.timing.ttft_s for answer in answers)
        full_ttft = full_ttft or ttft
        shown = answers[0].text + ("" if answers[0].text in query["answers"] else "  (wrong)")
        rows = f"{linked.recomputed:.0f} of {linked.image.layout.num_context}"
        table.add_row(label(name, fields), shown, rows, f"{ttft * 1e3:.1f}", f"{full_ttft / ttft:.1f}x")
    console.print(table)


def random_model() -> pictool.Model:
    """A Llama of 12 layers × 512 with random weights: speed needs no training, and the embedded model is tiny."""
    config = LlamaConfig(
        vocab_size=1416, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return pictool.wrap_model(LlamaForCausalLM(config), pictool.load_model("embedded").tokenizer, "random-12x512")


def show_speed(console: Console, store: pictool.Store) -> None:
    """TTFT over the whole corpus in one prompt, on a model that is large enough for the rows to matter."""
    model = random_model()
    documents = sorted((FIXTURES / "docs").glob("*.txt"))
    frame = make_frame(model, "Which festival does Wuvholm hold?")
    console.print(
        f"\n[bold]Speed[/bold]: all {len(documents)} documents, a random model of 12 layers × 512", highlight=False
    )
    table = Table("policy", "rows recomputed", "TTFT ms", "speedup")
    full_ttft = 0.0
    for name, fields in POLICIES:
        policy = pictool.make_policy(name, fields)
        linked = [pictool.link(model, store, documents, frame.tail, policy, head=frame.head) for _ in range(4)][1:]
        ttft = statistics.median(each.timing.ttft_s for each in linked)
        full_ttft = full_ttft or ttft
        rows = f"{linked[0].recomputed:.0f} of {linked[0].image.layout.num_context}"
        table.add_row(label(name, fields), rows, f"{ttft * 1e3:.0f}", f"{full_ttft / ttft:.1f}x")
    console.print(table)


def label(name: str, fields: dict[str, Any]) -> str:
    return name + "".join(f" {field}={value}" for field, value in fields.items())


def main() -> None:
    if len(sys.argv) > 1:
        ask_docs(sys.argv[1])
        return
    compile_corpus()
    quiet_libraries()
    model, store = pictool.load_model("embedded"), pictool.Store(STORE)
    queries = [json.loads(line) for line in (FIXTURES / "queries.jsonl").read_text().splitlines()]
    console = Console(width=100)
    print("\nAnswers (this model is tiny: opening objects costs as much as computing; speed follows below)")
    for kind in ("local", "carried", "two-hop"):
        show(console, model, store, next(q for q in queries if q["kind"] == kind and len(q["documents"]) > 6))
    right = {}
    for name, fields in POLICIES:
        policy = pictool.make_policy(name, fields)
        right[label(name, fields)] = sum(ask(model, store, query, policy).text in query["answers"] for query in queries)
    counts = ", ".join(f"{name} {count}" for name, count in right.items())
    print(f"\nRight answers to all {len(queries)} questions: {counts}.")
    print("These documents refer to each other, and the questions are such that blind reuse (naive) fails.")
    print("A real model, about real texts: make demo MODEL=smollm2")
    show_speed(console, store)


if __name__ == "__main__":
    main()

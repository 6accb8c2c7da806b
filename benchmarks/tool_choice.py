"""Which tool a model chooses when the tools' schemas are compiled one by one, or all as one object.

    OMP_NUM_THREADS=1 python -m benchmarks.tool_choice smollm2 --out benchmarks/results/tool_choice.json
    python -m benchmarks.tool_choice --show benchmarks/results/tool_choice.json

A tool is rendered as an MCP server lists it (name, description, inputSchema), a line of JSON. A prompt has three calls
of other tools (the head), the tools in random order (one document each, or all as one: `POLICY together`), and a
request with the beginning of its answer, up to the last word of the right tool's name: `{"name": "book_hotel_`. That
word is random, so only the tool's schema has it; what precedes it could be guessed from the request alone.

The choice is the most likely of the words of the set, by their first tokens, which differ. KL(full ‖ policy) is summed
over full's greedy answer, which each policy is forced to give. POLICY@AFTER has tools that were compiled after a
context of that name. Rows are a share of the tools' tokens. Intervals are 95 % bootstraps over sets of tools.

`tool_choice.jsonl` has 40 tools with five requests each. The form was chosen on the first 16 (`--seed 7`); any other
seed draws from the rest. A run that finds its results file goes on with it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.output import write_results
from benchmarks.real.measure import linking
from pictool import Model, Store, load_model
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import compile_chunks
from pictool.core import Chunk, PromptText
from pictool.engines.base import first_token_kl
from pictool.eval.statistics import ratio_interval
from pictool.linker.grid import named_policy
from pictool.linker.link import Linked, link
from pictool.linker.spec import Spec
from pictool.runtime.chat.template import Frame
from pictool.runtime.decode import forced_logits, generate

TOOLS = Path(__file__).with_name("tool_choice.jsonl")
CHOICE_SEED, NUM_CHOICE = 7, 16
BASELINE, TOGETHER = "naive@none", " together"
ALONE = (
    "naive@none,naive,legolink-4,legolink-16@none,legolink-16,legolink-64,cacheblend-15,cacheblend-30,prophet-5,"
    "prophet-10,auto,prophet-20"
)
AS_ONE = "naive,legolink-16,auto"
WORDS = (
    "apple bridge candle desert eagle forest garden hammer island jacket kitchen lemon mirror needle ocean pencil "
    "river shadow table village window yellow anchor blanket castle dragon engine feather"
).split()
EXAMPLES = (
    ("Multiply 12 by 7.", "multiply_lantern", '{"a": 12, "b": 7}'),
    ("What time is it in Rome?", "clock_basil", '{"place": "Rome"}'),
    ("Unlock the front door.", "unlock_comet", '{"door": "front"}'),
)


@dataclass(frozen=True)
class Question:
    """One request: the set of tools and their words in order, how the right name begins, and its word."""

    group: int
    tools: tuple[str, ...]
    names: tuple[str, ...]
    request: str
    begin: str
    right: str


def rendered(tool: Mapping[str, Any], word: str) -> str:
    named = {"name": f"{tool['name']}_{word}", "description": tool["description"]}
    return json.dumps(named | {"inputSchema": tool["inputSchema"]}) + "\n"


def asked(request: str, begin: str) -> str:
    return f'Request: {request}\nCall: {{"name": "{begin}'


def head() -> str:
    calls = [f'{asked(request, name)}", "arguments": {arguments}}}\n\n' for request, name, arguments in EXAMPLES]
    return "".join([*calls, "Tools:\n"])


def questions(model: Model, seed: int, sets: int, size: int) -> Iterator[Question]:
    """Each tool of each set is asked for once. A tool has one word in all sets; words begin with different tokens."""
    listed = [json.loads(line) for line in TOOLS.read_text(encoding="utf-8").splitlines()]
    listed = listed[:NUM_CHOICE] if seed == CHOICE_SEED else listed[NUM_CHOICE:]
    draw = random.Random(seed)
    words = draw.sample(list({model.encode(word)[0]: word for word in WORDS}.values()), len(listed))
    pool = list(zip(words, listed, strict=True))
    for group in range(sets):
        tools = draw.sample(pool, size)
        texts = tuple(rendered(tool, word) for word, tool in tools)
        for word, tool in tools:
            request = draw.choice(tool["requests"])
            yield Question(group, texts, tuple(word for word, _ in tools), request, f"{tool['name']}_", word)


def measure(model: Model, store: Store, question: Question, labels: Sequence[str], tokens: int) -> dict[str, Any]:
    """A question under full recompute and under each policy, whose tools are apart or together."""
    started = time.perf_counter()
    ids = [model.encode(name)[0] for name in question.names]
    frame = Frame(PromptText(head(), begins=True), PromptText(f"\n{asked(question.request, question.begin)}"))
    apart = Spec(
        documents=[make_chunk(model, text, "tool") for text in question.tools], policy=named_policy("full"),
        written=frame, separator="", max_new_tokens=tokens,
    )  # fmt: skip
    together = replace(apart, documents=[make_chunk(model, "".join(question.tools), "tools")])
    full = link(model, store, apart)
    answer = generate(model, full.image, tokens)
    wanted = [logits.clone() for logits in forced_logits(full.image, answer.tokens)]
    policies = {}
    for label in labels:
        spec = linking(together if label.endswith(TOGETHER) else apart, label.removesuffix(TOGETHER))
        linked = linked_to(model, store, spec)
        forced = forced_logits(linked.image, answer.tokens)
        chosen, kl = "", 0.0
        for at, (exact, own) in enumerate(zip(wanted, forced, strict=True)):
            chosen = chosen if at else question.names[int(own[ids].argmax())]
            kl += first_token_kl(exact, own)
        num_tools = sum(len(each) for each in spec.documents if isinstance(each, Chunk))
        policies[label] = {"chosen": chosen, "kl": float(f"{kl:.4g}"), "rows": linked.recomputed / num_tools}
    return {
        "group": question.group, "request": question.request, "right": question.right, "names": question.names,
        "tokens": len(full.image.layout.tokens), "answer": answer.text,
        "full": question.names[int(wanted[0][ids].argmax())], "policies": policies,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def linked_to(model: Model, store: Store, spec: Spec) -> Linked:
    """A spec linked from objects, which are compiled where the store lacks them."""
    compile_chunks(model, store, [each for each in spec.documents if isinstance(each, Chunk)], spec.objects)
    return link(model, store, spec)


def summary(done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What full chooses right, and by policy: right, kept of full's right choices, KL as a share of naive's, rows."""
    full = [float(each["full"] == each["right"]) for each in done]
    ones = [1.0] * len(done)
    naive = [each["policies"][BASELINE]["kl"] for each in done]
    table: dict[str, Any] = {}
    for label in done[0]["policies"]:
        own = [each["policies"][label] for each in done]
        right = [float(found["chosen"] == each["right"]) for found, each in zip(own, done, strict=True)]
        kept = [a * b for a, b in zip(right, full, strict=True)]
        kl = [found["kl"] for found in own]
        table[label] = {
            "right": share(done, right, ones), "kept": share(done, kept, full), "kl": share(done, kl, naive),
            "same": share(done, [float(a["chosen"] == b["full"]) for a, b in zip(own, done, strict=True)], ones),
            "worst_nats": max(kl), "worst_set": worst_set(done, kept, full),
            "rows": float(np.mean([found["rows"] for found in own])),
        }  # fmt: skip
    answers = [float(each["answer"].startswith(f'{each["right"]}"')) for each in done]
    return {
        "questions": len(done), "sets": len({each["group"] for each in done}), "full": share(done, full, ones),
        "full_greedy": share(done, answers, ones), "naive_nats": float(np.mean(naive)), "policies": table,
    }  # fmt: skip


def grouped(done: Sequence[Mapping[str, Any]], values: Sequence[float]) -> list[float]:
    """The sum of values over each set of tools."""
    pairs = zip((each["group"] for each in done), values, strict=True)
    return [sum(value for _, value in group) for _, group in groupby(pairs, key=lambda pair: pair[0])]


def share(done: Sequence[Mapping[str, Any]], above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Σ above ÷ Σ below and its interval over sets."""
    sums = np.asarray(grouped(done, above)), np.asarray(grouped(done, below))
    return [float(sums[0].sum() / sums[1].sum()), *(ratio_interval(*sums) if len(sums[0]) > 1 else ())]


def worst_set(done: Sequence[Mapping[str, Any]], kept: Sequence[float], full: Sequence[float]) -> float:
    """The least share of full's right choices that is kept in a set."""
    sums = zip(grouped(done, kept), grouped(done, full), strict=True)
    return min(own / exact for own, exact in sums if exact)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The summary as a table in Markdown."""
    yield f"{found['questions']} questions, {found['sets']} sets; naive {found['naive_nats']:.2f} nats"
    yield "| policy | rows | right | of full's right choices, kept | KL | worst answer |"
    yield "|---" * 6 + "|"
    yield f"| full | 100 % | {percent(found['full'])} | | | |"
    for label, own in found["policies"].items():
        kl = " ".join(f"{value:.2f}" for value in own["kl"])
        yield (
            f"| {label} | {100 * own['rows']:.0f} % | {percent(own['right'])} | {percent(own['kept'])} | {kl} | "
            f"{own['worst_nats']:.1f} nats |"
        )


def percent(values: Sequence[float]) -> str:
    mean, *bounds = (f"{100 * value:.0f}" for value in values)
    return f"{mean} % [{', '.join(bounds)}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--sets", type=int, default=34)
    parser.add_argument("--size", type=int, default=3, help="tools of a set")
    parser.add_argument("--seed", type=int, default=8, help=f"{CHOICE_SEED}: the tools that the form was chosen by")
    parser.add_argument("--tokens", type=int, default=3, help="of an answer, at most")
    parser.add_argument("--alone", default=ALONE)
    parser.add_argument("--together", default=AS_ONE)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="print a results file, and measure nothing")
    options = parser.parse_args()
    if options.show:
        print("\n".join(lines(json.loads(options.show.read_text(encoding="utf-8"))["summary"])))
        return
    torch.set_num_threads(1)
    model = load_model(options.model, "cpu", "float32")
    labels = [
        *filter(None, options.alone.split(",")),
        *(p + TOGETHER for p in filter(None, options.together.split(","))),
    ]
    done: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        done = json.loads(options.out.read_text(encoding="utf-8"))["answers"]
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        for number, question in enumerate(questions(model, options.seed, options.sets, options.size)):
            if number < len(done):
                continue
            done.append(measure(model, store, question, labels, options.tokens))
            if options.out and (number + 1) % options.size == 0:
                write_results(options.out, {"model": model.name, "summary": summary(done), "answers": done})
            print(f"\r{len(done)} questions, {done[-1]['seconds']:.1f} s", end="", flush=True)
    print("\n" + "\n".join(lines(summary(done))))


if __name__ == "__main__":
    main()

"""The tail's attention to the first tokens of every chunk, by policy, on held-out worlds (EPIC §4.1, fig. 4).

    python -m benchmarks.attention_sinks --out benchmarks/results

The embedded model, 8 pages per prompt, one question of every kind. Shares are means over prompts and the tail's rows,
per layer and head, of the first 1 and 4 tokens of all chunks together; "even" is their share if attention is uniform.
KV deviation is that of chunk-initial tokens as a multiple of all chunk tokens', layers from 1 on.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.output import write_results
from pictool import Chunk, Linked, Model, Store, generate, load_model
from pictool.linker.grid import parse_grid
from pictool.linker.link import link
from pictool.linker.spec import Spec
from pictool.trace.attention import AttentionMap, attention_map, decode_tokens
from pictool.trace.deviation import kv_deviation
from training.score import HELD_OUT
from training.world.generate import KINDS, PageShape, write_prompt

POLICIES = parse_grid(["full", "naive", "legolink-4", "legolink-16", "cacheblend-15"])
FIRST = (1, 4)  # tokens of every chunk


def questions_of(model: Model, index: int) -> Iterator[tuple[Spec, str]]:
    """One question of every kind about a prompt, and its answer."""
    prompt = write_prompt(random.Random(f"{HELD_OUT}-sinks-{index}"), 8, PageShape())
    chunks = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    for kind in KINDS:
        questions = [question for question in prompt.questions if question.kind == kind]
        for question in questions[:1]:
            yield Spec(question.text, chunks), question.answer


def measure(model: Model, linked: Linked, full: Linked, answer: str) -> dict[str, Any]:
    """Shares [layers, heads] and KV deviation of one linked prompt."""
    image = linked.image
    assert image.logits is not None
    attention = attention_map(image, decode_tokens(image, [int(image.logits.argmax())]))
    deviation = kv_deviation(image, full.image).both[1:]
    generated = generate(model, image, 8).text.strip()
    return {
        "right": float(generated == answer),
        "kv_first": float(deviation[:, image.layout.starts[1:-1]].mean()),
        "kv_all": float(deviation[:, image.layout.head[1] : image.layout.num_context].mean()),
        **{f"first_{first}": initial_share(attention, first).mean(2) for first in FIRST},
        **{f"even_{first}": float(uniform_share(attention, first).mean()) for first in FIRST},
    }


def initial_share(attention: AttentionMap, first: int) -> NDArray[np.float32]:
    """What each row gives to the first tokens of all chunks, [layers, heads, rows]."""
    spans = list(pairwise(attention.starts))[1:]  # without the head
    initial = [column for start, end in spans for column in range(start, min(start + first, end))]
    return np.asarray(attention.weights[..., initial].sum(-1))


def uniform_share(attention: AttentionMap, first: int) -> NDArray[np.float64]:
    """The same of rows that attend evenly, [rows]."""
    count = sum(min(first, end - start) for start, end in list(pairwise(attention.starts))[1:])
    return count / (attention.positions + 1.0)


def mean_of(measured: list[dict[str, Any]]) -> dict[str, Any]:
    mean = {name: np.mean([values[name] for values in measured], 0) for name in measured[0]}
    mean["kv_first"] = mean["kv_first"] / mean["kv_all"] if mean["kv_all"] else 0.0
    return {name: np.round(value, 4).tolist() for name, value in mean.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="of attention_sinks.json")
    parser.add_argument("--prompts", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model("embedded", device="cpu")
    measured: dict[str, list[dict[str, Any]]] = {labelled.label: [] for labelled in POLICIES}
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        for spec, answer in (question for index in range(options.prompts) for question in questions_of(model, index)):
            full = link(model, store, replace(spec, policy=POLICIES[0].policy))
            for labelled in POLICIES:
                linked = link(model, store, replace(spec, policy=labelled.policy))
                measured[labelled.label].append(measure(model, linked, full, answer))
    means = {label: mean_of(each) for label, each in measured.items()}
    about = {"prompts": options.prompts, "questions": len(measured["full"])}
    write_results(options.out / "attention_sinks.json", {"about": about, "policies": means})
    for label, mean in means.items():
        shares = np.round(100 * np.mean(mean["first_4"], 1), 1)
        print(f"{label:14} right {mean['right']:.2f}  first 4, by layer: {shares}", end="")
        print(f" (even {100 * mean['even_4']:.1f})  KV of first tokens {mean['kv_first']:.2f}x")


if __name__ == "__main__":
    main()

"""What the first tokens of every chunk draw of the tail's attention, by policy, on held-out worlds (EPIC §4.1, fig. 4).

    python -m benchmarks.attention_sinks --out benchmarks/results

The embedded model, 8 pages per prompt, one question of every kind. Shares are means over prompts and the tail's rows,
per layer and head, of the first 1 and 4 tokens of all chunks together; "even" is what they would draw if every token
drew alike. KV deviation is that of chunk-initial tokens as a multiple of all chunk tokens', layers from 1 on.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pictool import Chunk, Linked, Model, Policy, Store, generate, link, load_model, make_policy
from pictool.runtime.machine import machine
from pictool.runtime.template import make_frame
from pictool.trace.attention import AttentionMap, attention_map, decode_tokens
from pictool.trace.deviation import kv_deviation
from pictool.world.generate import KINDS, Shape, write_prompt
from training.score import HELD_OUT

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}), "naive": ("naive", {}), "legolink-4": ("legolink", {"k": 4}),
    "legolink-16": ("legolink", {"k": 16}), "legolink-0": ("legolink-0", {}), "cacheblend-15": ("cacheblend", {}),
}  # fmt: skip
FIRST = (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--prompts", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model("embedded", device="cpu")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as directory:
        for index in range(arguments.prompts):
            for name, rows in _ask(model, Store(directory), index).items():
                found[name] += rows
    result = {name: _mean(rows) for name, rows in found.items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {"prompts": arguments.prompts, "questions": len(found["full"]), "machine": machine()}
    (arguments.out / "attention_sinks.json").write_text(
        json.dumps({"about": about, "policies": result}, indent=1) + "\n"
    )
    for name, one in result.items():
        print(f"{name:14} right {one['right']:.2f}  first 4, by layer:", np.round(100 * np.mean(one["first_4"], 1), 1),
              f"(even {100 * one['even_4']:.1f})  KV of first tokens {one['kv_first']:.2f}x")  # fmt: skip


def _ask(model: Model, store: Store, index: int) -> dict[str, list[dict[str, Any]]]:
    """One prompt's questions under every policy."""
    prompt = write_prompt(random.Random(f"{HELD_OUT}-sinks-{index}"), 8, Shape())
    chunks = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    asked = [next((one for one in prompt.questions if one.kind == kind), None) for kind in KINDS]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in POLICIES}
    for question in asked:
        if question is None:
            continue
        frame = make_frame(model, question.text)
        full = link(model, store, chunks, frame.tail, make_policy("full", {}), head=frame.head)
        for name, (algo, fields) in POLICIES.items():
            found[name].append(_measure(model, store, chunks, frame, make_policy(algo, fields), full, question.answer))
    return found


def _measure(
    model: Model, store: Store, chunks: list[Chunk], frame: Any, policy: Policy, full: Linked, answer: str
) -> dict[str, Any]:
    image = link(model, store, chunks, frame.tail, policy, head=frame.head).image
    assert image.logits is not None
    seen = attention_map(image, decode_tokens(image, [int(image.logits.argmax())]))
    apart = kv_deviation(image, full.image).both[1:]
    initial = apart[:, image.layout.starts[1:-1]].mean()
    every = apart[:, image.layout.head[1] : image.layout.num_context].mean()
    said = generate(model, image, 8).text.strip()
    return {
        "right": float(said == answer), "kv_first": float(initial), "kv_all": float(every),
        **{f"first_{first}": _drawn(seen, first) for first in FIRST},
        **{f"even_{first}": float(seen.uniform_initial_share(first)[:, 1:].sum(1).mean()) for first in FIRST},
    }  # fmt: skip


def _drawn(seen: AttentionMap, first: int) -> Any:
    """[layers, heads]."""
    return seen.initial_share(first)[..., 1:].sum(-1).mean(2)


def _mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    mean = {name: np.mean([row[name] for row in rows], 0) for name in rows[0]}
    mean["kv_first"] = mean["kv_first"] / mean["kv_all"] if mean["kv_all"] else 0.0
    return {name: np.round(value, 4).tolist() for name, value in mean.items()}


if __name__ == "__main__":
    main()

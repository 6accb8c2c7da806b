"""What linked hybrids answer, and what of blind reuse's loss comes from which kind of layer (docs/design.md §8).

    python -m benchmarks.hybrids --out benchmarks/results/hybrids.json

The trained hybrids of `training/zoo.py`, and `embedded`; held-out prompts of 6 chunks of about 20, 60 and 200 tokens.
legolink computes a share of the mean chunk, k ≥ w - 1 tokens. Right: the whole greedy answer. Won back: of the answers
that naive loses against full. KL: from full, in nats, of the first token and of all tokens of full's answer. Intervals:
95 %, bootstrap over prompts.

Variants store other content for the tokens after the cut, made in this script: `exact states` has what full has in
linear layers, `exact keys` what it has in attention; under `last state` a chunk forgets what precedes it (A = 0), and
under `no state` the next one starts from zero (A = B = 0).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.output import write_results
from pictool import Chunk, Model, Policy, Sampling, Store, generate, link, load_model, make_policy
from pictool.core import Layout
from pictool.engines.base import first_token_kl
from pictool.eval.statistics import ratio_interval
from pictool.runtime.chat.template import make_frame
from pictool.runtime.decode import forced_logits
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.states import StateMap
from pictool.runtime.prefill import ChunkKV, prefill_stateful
from pictool.runtime.rows import Rows
from pictool.runtime.stack import LayerStack
from training.score import HELD_OUT
from training.world.generate import BOOKS, KINDS, PageShape, Question, World, WorldPrompt, write_prompt
from training.zoo import HYBRIDS, MODELS

WORLDS = {"embedded": BOOKS} | {name: member.world for name, member in HYBRIDS.items()}
SIZES = {20: 0, 60: 6, 200: 30}  # tokens of a chunk, about → sentences of filler per page, at most
CHUNKS = 6
SHARES = (0.1, 0.2, 0.3, 0.5)
PREFILL = "pictool.runtime.prefill.prefill_stateful"

Numbers = NDArray[np.float64]
Record = dict[str, Any]  # of one prompt under one variant: right, kl, kinds [questions], and rows
Stored = tuple[ChunkKV, list[StateMap]]
Change = Callable[[Stored, Stored], Stored]  # (of the chunk alone, in its context) → what is stored


def with_states(own: Stored, exact: Stored) -> Stored:
    return own[0], exact[1]


def with_keys(own: Stored, exact: Stored) -> Stored:
    return exact[0], own[1]


def with_both(own: Stored, exact: Stored) -> Stored:
    return exact


def last_state(own: Stored, exact: Stored) -> Stored:
    return own[0], [replace(each, operator=each.operator * 0) for each in own[1] if each.operator is not None]


def no_state(own: Stored, exact: Stored) -> Stored:
    kv, maps = last_state(own, exact)
    return kv, [replace(each, state=each.state * 0) for each in maps if each.state is not None]


CHANGES: dict[str, Change] = {
    "exact states": with_states, "exact keys": with_keys, "both exact": with_both, "last state": last_state,
    "no state": no_state,
}  # fmt: skip


def prompt_of(world: World, size: int, index: int) -> WorldPrompt:
    """A prompt that nothing was trained on; a draw that runs out of names is drawn again."""
    for attempt in range(100):
        with suppress(IndexError):
            draw = random.Random(f"{HELD_OUT}-hybrids-{size}-{index}-{attempt}")
            return write_prompt(draw, CHUNKS, PageShape(max_filler_sentences=SIZES[size]), world)
    raise AssertionError("the names of the world are too few")


# What is stored


@torch.inference_mode()
def in_context(stack: LayerStack, layout: Layout) -> dict[tuple[int, ...], Stored]:
    """What `full` has of every part of a prompt, by its tokens; maps whose states do not depend on what precedes."""
    spans = [span for span in (layout.head, *layout.chunks) if span[0] < span[1]]
    image, rows = Image(stack, layout), [Rows.of(torch.arange(*span)) for span in spans]
    image.keep_keys()
    assert image.states is not None and image.fresh_keys is not None
    tokens = torch.from_numpy(layout.tokens.astype(np.int64))
    hidden, maps = [stack.embed(tokens[None, slice(*span)]) for span in spans], [list[StateMap]() for _ in spans]
    for layer, index in enumerate(stack.state_index):
        for part, (start, end) in enumerate(spans):
            hidden[part] = image.compute(layer, hidden[part], rows[part])
            if index is not None:
                maps[part].append(_constant(stack, image, layer, end, end - start))
    kv = list[ChunkKV]()
    for part, span in enumerate(spans):
        keys = [image.fresh_keys[layer * len(spans) + part][0] for layer in range(stack.geometry.layers)]
        kv.append([image.unrotated(layer, key, *span) for layer, key in enumerate(keys)])
    of = [tuple(layout.tokens[slice(*span)].tolist()) for span in spans]
    return dict(zip(of, zip(kv, maps, strict=True), strict=True))


def _constant(stack: LayerStack, image: Image, layer: int, position: int, length: int) -> StateMap:
    """The map that gives a layer's state before a position, whatever it is applied to."""
    shape, states = stack.geometry.states, image.states
    assert shape is not None and states is not None
    state = states.before(layer, position)
    assert state.recurrent is not None
    operator = torch.zeros(shape.heads, shape.operator, shape.operator)
    return StateMap(length, state.tail[0].clone(), operator, state.recurrent[0].clone())


@contextmanager
def storing(change: Change | None, exact: dict[tuple[int, ...], Stored]) -> Iterator[None]:
    """Compile chunks to what a change makes of their content."""

    def prefill(stack: LayerStack, tokens: Sequence[int], cut: int) -> Stored:
        own = prefill_stateful(stack, tokens, cut)
        return own if change is None or cut >= len(tokens) else change(own, exact[tuple(tokens)])

    with patch(PREFILL, prefill):
        yield


# Answers


@dataclass(frozen=True)
class Variant:
    """A policy, and what the objects hold."""

    policy: Policy
    change: Change | None = None


def variants_of(model: Model, mean: float) -> dict[str, Variant]:
    """Every variant of a prompt whose chunks have `mean` tokens; `full` first."""
    states = model.geometry.states
    least = 1 if states is None else states.columns
    legolink = {
        share: make_policy("legolink", {"k": max(least, round(share * mean))}) for share in SHARES
    }  # fmt: skip
    found = {name: Variant(make_policy(name)) for name in ("full", "naive")}
    found |= {f"legolink @ {share}": Variant(policy) for share, policy in legolink.items()}
    if states is not None:
        for name, change in CHANGES.items():
            found[f"naive, {name}"] = Variant(make_policy("naive"), change)
            found[f"legolink @ 0.2, {name}"] = Variant(legolink[0.2], change)
    return found


def measure_prompt(model: Model, prompt: WorldPrompt, per_kind: int) -> dict[str, Record]:
    """One prompt under every variant: by variant, of every question."""
    pages = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    questions = questions_of(prompt, per_kind)
    frames = [make_frame(model, question.text) for question in questions]
    head, tail = model.encode(frames[0].head), model.encode(frames[0].tail)
    exact: dict[tuple[int, ...], Stored] = {}
    if model.geometry.states is not None:
        exact = in_context(model.stack, Layout.of(head, [page.tokens for page in pages], tail))
    stop, full = Sampling(stop=("\n",)), list[tuple[tuple[int, ...], list[torch.Tensor]]]()
    mean, records = float(np.mean([len(page) for page in pages])), dict[str, Record]()
    for label, variant in variants_of(model, mean).items():
        right, kls, rows = list[float](), list[list[float]](), list[float]()
        with tempfile.TemporaryDirectory() as directory, storing(variant.change, exact):
            for number, (question, frame) in enumerate(zip(questions, frames, strict=True)):
                linked = link(model, Store(directory), pages, frame.tail, variant.policy, head=frame.head)
                answer = generate(model, linked.image, 8, stop)
                if label == "full":
                    full.append((answer.tokens, list(forced_logits(linked.image, answer.tokens))))
                tokens, wanted = full[number]
                pairs = zip(wanted, forced_logits(linked.image, tokens), strict=True)
                right.append(float(answer.text.strip() == question.answer))
                kls.append([first_token_kl(*pair) for pair in pairs])
                rows.append(linked.recomputed / linked.image.layout.num_context)
        records[label] = {
            "right": np.asarray(right), "kl": np.asarray([each[0] for each in kls]),
            "answer_kl": np.asarray([sum(each) for each in kls]), "rows": float(np.mean(rows)),
            "kinds": np.asarray([KINDS.index(question.kind) for question in questions]), "tokens": mean,
        }  # fmt: skip
    return records


def questions_of(world: WorldPrompt, per_kind: int) -> list[Question]:
    return [question for kind in KINDS for question in [q for q in world.questions if q.kind == kind][:per_kind]]


def interval(values: Numbers, base: Numbers) -> list[float | None]:
    """95 % bootstrap interval of Σ values ÷ Σ base, over prompts."""
    if not np.abs(values).any():
        return [0.0, 0.0]
    return [None, None] if len(values) < 2 else [round(bound, 4) for bound in ratio_interval(values, base)]


def summarise(records: Sequence[Record], full: Sequence[Record], naive: Sequence[Record]) -> Record:
    """Of one variant's records, one a prompt."""
    count = np.asarray([len(record["right"]) for record in records], dtype=float)
    right, best, worst = (np.asarray([each["right"].sum() for each in several]) for several in (records, full, naive))
    kl = np.asarray([record["kl"].sum() for record in records])
    hits, kinds = (np.concatenate([record[field] for record in records]) for field in ("right", "kinds"))
    lost = best.sum() - worst.sum()
    return {
        "rows": round(float(np.mean([record["rows"] for record in records])), 4),
        "right": round(float(right.sum() / count.sum()), 4),
        "right_interval": interval(right, count),
        "won_back": round(float((right - worst).sum() / lost), 4) if lost else None,
        "won_back_interval": interval(right - worst, best - worst) if lost else [None, None],
        "kl": round(float(kl.sum() / count.sum()), 5),
        "kl_interval": interval(kl, count),
        "by_kind": {
            kind: round(float(hits[kinds == i].mean()), 4) for i, kind in enumerate(KINDS) if (kinds == i).any()
        },
    }


def summarise_all(prompts: Sequence[Mapping[str, Record]]) -> dict[str, Record]:
    """Of every variant."""
    full, naive = ([records[label] for records in prompts] for label in ("full", "naive"))
    return {label: summarise([records[label] for records in prompts], full, naive) for label in prompts[0]}


def summary(prompts: Sequence[dict[str, Record]]) -> dict[str, Any]:
    """Of every variant; KL also as a share of naive's."""
    lines = summarise_all(prompts)
    whole = summarise_all([{name: {**each, "kl": each["answer_kl"]} for name, each in one.items()} for one in prompts])
    naive = {field: _sums(prompts, "naive", field) for field in ("kl", "answer_kl")}
    for label, line in lines.items():
        line["answer_kl"], line["answer_kl_interval"] = whole[label]["kl"], whole[label]["kl_interval"]
        for field, below in naive.items():
            above = _sums(prompts, label, field)
            line[f"{field}_of_naive"] = round(float(above.sum() / below.sum()), 4)
            line[f"{field}_of_naive_interval"] = interval(above, below)
    return lines


def _sums(prompts: Sequence[dict[str, Record]], label: str, field: str) -> np.ndarray[Any, Any]:
    return np.asarray([one[label][field].sum() for one in prompts])


def sizes_of(model: Model) -> dict[str, int]:
    """Bytes of what an object holds, in the model's dtype and float32: of a token, and of states (A, B and inputs)."""
    item = 4
    per_token = item * model.geometry.layers * sum(part.heads * part.width for part in model.geometry.parts)
    states = model.geometry.states
    return {"kv_of_a_token": per_token, "states": 0 if states is None else states.num_bytes(item)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--per-kind", type=int, default=3, help="questions of each kind per prompt, at most")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--models", nargs="+", choices=WORLDS, default=list(WORLDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in arguments.models:
        world = WORLDS[name]
        model = load_model(name if name == "embedded" else str(MODELS / name), "cpu", "float32")
        results[name] = {"model_type": model.config.model_type, "bytes": sizes_of(model)}
        for size in arguments.sizes:
            prompts = [
                measure_prompt(model, prompt_of(world, size, index), arguments.per_kind)
                for index in range(arguments.prompts)
            ]
            tokens = float(np.mean([prompt["full"]["tokens"] for prompt in prompts]))
            results[name][str(size)] = {
                "mean_chunk_tokens": round(tokens, 1), "questions": sum(len(one["full"]["right"]) for one in prompts),
                "policies": summary(prompts),
            }  # fmt: skip
            for label, line in results[name][str(size)]["policies"].items():
                print(
                    f"{name} {size} {label:32} rows {line['rows']:.2f} right {line['right']:.3f} won back "
                    f"{line['won_back']} KL {line['kl_of_naive']:.3f} {line['answer_kl_of_naive']:.3f}",
                    flush=True,
                )
            write_results(arguments.out, {"models": results})


if __name__ == "__main__":
    main()

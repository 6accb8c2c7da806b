"""Edited prompts of an agent on a real model: what `pic serve --learn` computes after an edit, and what that changes.

    OMP_NUM_THREADS=1 python -m benchmarks.edited_prompts --out benchmarks/results/edited_prompts.json

A history has the shape of the recorded loop of codex (`benchmarks/recorded`): instructions, a task, then turns of a
call and its result, with the lines that codex puts before a result. Results are about 200 tokens of this repository's
documentation and code, each with a note that was put into it, which is asked for at the end; every other history is
asked what a file is about. A server that learns answers it once, under full. Then it is edited:

    dropped      the results of the first half of the turns are stubs, as agents that clear old results write them
    compacted    the first half of the turns is a summary, the second half is kept (of five: two, and three)
    system       the date in the first line of the instructions is another one

Full recompute answers the edited prompt greedily; under each policy the server links what it learned, the same answer
is forced, and KL(full ‖ policy) is summed over its tokens. `computed` is the share of the prompt's tokens that are
computed, as a mean over layers, on the first request after the edit; `exact` is what a server computes that has
prefixes alone. Shares of naive's KL are ratios of sums over prompts, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks.edited_histories import hidden_after
from benchmarks.output import write_results
from benchmarks.real.prompts import NAMES, THINGS, planted
from benchmarks.recorded_agent import RECORDED
from pictool.core import PromptText, Sampling, TokenIds
from pictool.engines.base import first_token_kl
from pictool.eval.statistics import ratio_interval
from pictool.linker.grid import named_policy
from pictool.linker.link import Linked, link
from pictool.linker.plan import plan_without_objects
from pictool.linker.policies.auto import SHORT
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.model import Model, load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.prompts.layout import pieces_of
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, ChatPrompt, Linking, PlainText, Turn
from pictool.store.store import Store

ROOT = Path(__file__).parents[1]
SHAPES = ("dropped", "compacted", "system")
POLICIES = ("auto", "naive", "legolink-16", "cacheblend-15", "prophet-10", "prophet-20")
STUB = "[Old tool result content cleared]"
TURNS, RESULT = 5, 200  # turns of a history; tokens of a result, about, without its note
_BODY = re.compile(r"(?<=Output:\n).*", re.DOTALL)
_NOBODY = Tenant("default")


@dataclass(frozen=True)
class File:
    """What a call of the agent reads: an excerpt, with a note in it, and the question for the note."""

    path: str
    text: str
    query: str
    begin: str
    gold: str


@dataclass(frozen=True)
class Edited:
    """A prompt before and after an edit, the question at its end and what its answer begins with."""

    shape: str
    turns: tuple[Turn, ...]
    begin: str
    gold: str


# Histories


def said(role: str, text: str) -> Turn:
    return Turn(role, (PlainText(text),))


def recorded_results() -> list[str]:
    """The results of the recorded loop's calls that have one."""
    *_, last = zstandard.decompress(RECORDED.read_bytes()).splitlines()
    items = [item for item in json.loads(last)["input"] if item["type"] == "function_call_output"]
    return [item["output"] for item in items if len(item["output"]) > 1000]


def files(model: Model, count: int) -> Iterator[File]:
    """Excerpts of this repository's texts: whole paragraphs, a note in the middle."""
    draw = random.Random(count)
    prose, code = [sorted(ROOT.glob(pattern)) for pattern in ("docs/guides/*.md", "pictool/[clr]*/*.py")]
    code = [path for path in code if path.stat().st_size > 3000]
    paths = [*draw.sample(prose, count // 2), *draw.sample(code, count - count // 2)]
    names, things = draw.sample(NAMES, len(NAMES)), draw.sample(THINGS, len(THINGS))
    for number, path in enumerate(paths):
        name, thing = names[number % len(names)], things[number % len(things)]
        begin, rest, query = planted(number, name, thing, draw)
        kept, size = list[str](), 0
        for paragraph in re.split(r"\n{2,}", path.read_text(encoding="utf-8").strip())[1:]:
            kept.append(paragraph)
            size += len(model.encode(paragraph))
            if size >= RESULT:
                break
        text = str(model.tokenizer.decode(model.encode("\n\n".join(kept))[: RESULT + 60])).strip()
        middle = text.find("\n", len(text) // 2)
        text = f"{text[:middle]}\n{begin}{rest}{text[middle:]}\n"
        yield File(str(path.relative_to(ROOT)), text, query, begin.rstrip(), rest)


def instructions(date: str) -> str:
    paragraphs = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n\n")
    rest = "\n\n".join([text for text in paragraphs if len(text) > 200 and "```" not in text][:3])
    return f"You are a coding agent. The date is {date}.\n\n{rest}"


def history(index: int, read: Sequence[File], results: Sequence[str]) -> tuple[list[Turn], list[tuple[Turn, Turn]]]:
    """What precedes the turns, and the turns, each a call and its result."""
    begin = [said("system", instructions(f"{1 + index:04}-11-26")), said("user", "Read the files, then answer.")]
    turns = []
    for number, (file, result) in enumerate(zip(read, results, strict=False)):
        call = json.dumps({"name": "exec_command", "arguments": {"cmd": f"cat {file.path}"}})
        output = _BODY.sub(lambda _, text=file.text: text, result)  # type: ignore[misc]
        turns.append((said("assistant", f"Turn {number} of the loop. <call>{call}</call>"), said("tool", output)))
    return begin, turns


def edits(index: int, read: Sequence[File], results: Sequence[str]) -> tuple[tuple[Turn, ...], list[Edited]]:
    """A history, and the prompts that it is edited to."""
    begin, turns = history(index, read, results)
    asked = read[random.Random(index).randrange(TURNS // 2, TURNS)]
    query, first, gold = asked.query, asked.begin, asked.gold
    if index % 2:
        query, first, gold = f"What is {asked.path} about? Answer in one sentence.", "", ""
    early, late, ask = turns[: TURNS // 2], turns[TURNS // 2 :], said("user", query)
    listed = " and ".join(file.path for file in read[: TURNS // 2])
    summary = f"Another agent began this task. So far it has read {listed}; nothing in them answers the question."
    system = said("system", instructions(f"{1 + index:04}-11-27"))
    stubs = [(call, said("tool", STUB)) for call, _ in early]
    made = {
        "dropped": [*begin, *flat(stubs), *flat(late), ask],
        "compacted": [*begin, said("user", summary), *flat(late), ask],
        "system": [system, *begin[1:], *flat(turns), ask],
    }
    whole = (*begin, *flat(turns))
    return (*whole, said("user", "Go on.")), [Edited(shape, (*made[shape],), first, gold) for shape in SHAPES]


def flat(turns: Sequence[tuple[Turn, Turn]]) -> list[Turn]:
    return [turn for pair in turns for turn in pair]


# Measuring


async def learn(backend: TorchBackend, turns: tuple[Turn, ...]) -> TokenIds:
    """Answer a history under full, and wait until what is new in it is compiled; its tokens."""
    work = AnswerRequest(_NOBODY, ChatPrompt(turns), Sampling(0.0), 1, linking=Linking("full"))
    async with aclosing(backend.answer(work)) as answer:
        async for _ in answer:
            pass
    while backend._finding or backend._is_learning or backend.status().active:
        await asyncio.sleep(0.02)
    backend.index.refresh()
    model = backend.engine_of(_NOBODY).model
    return backend._plan(work, pieces_of(model, work.prompt), model, named_policy("full"))[0].layout.tokens


def measure(backend: TorchBackend, store: Store, old: TokenIds, edited: Edited, tokens: int) -> dict[str, Any]:
    """An edited prompt under full and under each policy."""
    model, prompt = backend.engine_of(_NOBODY).model, ChatPrompt(edited.turns)
    work = AnswerRequest(_NOBODY, prompt, Sampling(0.0), tokens)
    pieces = [*pieces_of(model, prompt), PromptText(edited.begin)]
    new = backend._plan(work, pieces, model, named_policy("full"))[0].layout.tokens
    full = link(model, store, Spec.planned(plan_without_objects(named_policy("full"), new)))
    answer = generate(model, full.image, tokens)
    wanted = forced_logits(full, answer.tokens)
    least = min(len(old), len(new))
    differs = np.flatnonzero(old[:least] != new[:least])
    prefix = int(differs[0] if len(differs) else least) // 16 * 16
    policies = dict[str, dict[str, Any]]()
    row = {
        "shape": edited.shape, "tokens": len(new), "prefix": prefix, "gold": edited.gold, "answer": answer.text,
        "policies": policies,
    }  # fmt: skip
    for name in POLICIES:
        plan, laid_out = backend._plan(work, pieces, model, named_policy(name))
        if name == "prophet-10" and plan.num_context >= SHORT:  # that is auto
            policies[name] = policies["auto"]
            continue
        moved = [span for span in plan.object_spans if span.start >= prefix]
        linked, problem = backend._link(model, plan, laid_out, is_fresh=False)
        assert problem is None and moved, problem
        forced = forced_logits(linked, answer.tokens)
        kl = [first_token_kl(a, b) for a, b in zip(wanted, forced, strict=True)]
        policies[name] = {
            "kl": [float(f"{nats:.4g}") for nats in kl],
            "computed": computed(linked, prefix, moved[0].start) / len(new),
            "same": forced.argmax(-1).tolist() == list(answer.tokens),
            "linked": sum(span.end - span.start for span in moved),
        }  # fmt: skip
    return row


@torch.inference_mode()
def forced_logits(linked: Linked, answer: Sequence[int]) -> torch.Tensor:
    """The logits [tokens, vocab] by which each token of a given answer would be chosen, in one pass."""
    linked.image.rewind()
    first = linked.image.logits
    assert first is not None
    if len(answer) < 2:
        return first[None]
    (hidden,) = hidden_after(linked, linked.image.num_tokens, [answer[:-1]])
    return torch.cat([first[None], linked.image.stack.logits(hidden)])


def computed(linked: Linked, prefix: int, first: int) -> float:
    """Tokens that were computed, a mean over layers. Those between the exact prefix and the first object were, though
    the policy measured before may have left them."""
    shares = linked.rows.mean(0)
    shares[linked.image.layout.num_context :] = 1
    shares[prefix:first] = 1
    return float(shares.sum())


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By shape and policy."""
    found = dict[str, Any]()
    for shape in (*SHAPES, "all"):
        own = [row for row in rows if shape in ("all", row["shape"])]
        if not own:
            continue
        naive = np.asarray([sum(row["policies"]["naive"]["kl"]) for row in own])
        exact = float(np.mean([1 - row["prefix"] / row["tokens"] for row in own]))
        found[shape] = {"prompts": len(own), "tokens": float(np.mean([row["tokens"] for row in own])), "exact": exact}
        for name in POLICIES:
            results = [row["policies"][name] for row in own]
            nats = np.asarray([sum(result["kl"]) for result in results])
            found[shape][name] = {
                "computed": float(np.mean([result["computed"] for result in results])), "nats": float(nats.mean()),
                "left": float(nats.sum() / naive.sum()),
                "interval": ratio_interval(nats, naive) if len(own) > 1 else (0, 0),
                "worst": float(nats.max()), "same": int(sum(result["same"] for result in results)),
            }  # fmt: skip
    return found


def table(found: Mapping[str, Any]) -> Iterator[str]:
    yield "| shape | policy | computed | KL, nats | of naive's | worst | equal answers |"
    yield "|---|---|---|---|---|---|---|"
    for shape, group in found.items():
        yield f"| {shape} ({group['prompts']}) | prefix alone | {group['exact']:.0%} | 0 | | | all |"
        for name in POLICIES:
            own, (low, high) = group[name], group[name]["interval"]
            yield (
                f"| | {name} | {own['computed']:.0%} | {own['nats']:.2f} | {own['left']:.2f} [{low:.2f}, {high:.2f}] | "
                f"{own['worst']:.1f} | {own['same']} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--histories", type=int, default=12, help="each of which is edited in three ways")
    parser.add_argument("--files", type=int, default=16, help="that histories read")
    parser.add_argument("--tokens", type=int, default=12, help="of an answer, at most")
    parser.add_argument("--out", type=Path, help="results file, written after each history")
    options = parser.parse_args()
    model, rows = load_model(options.model, device="cpu", dtype="float32"), list[dict[str, Any]]()
    known, results = list(files(model, options.files)), recorded_results()
    settings = BackendSettings(named_policy("auto"), learned_bytes=1 << 36, pool_bytes=None, refresh_s=3600)
    with tempfile.TemporaryDirectory() as root, TorchBackend(model, store := Store(root), settings) as backend:
        for index in range(options.histories):
            old, prompts = edits(index, random.Random(index).sample(known, TURNS), results)
            tokens = asyncio.run(learn(backend, old))
            rows += [{"history": index, **measure(backend, store, tokens, each, options.tokens)} for each in prompts]
            found = summary(rows)
            print(f"\n{index + 1} histories", *table(found), sep="\n", flush=True)
            if options.out is not None:
                write_results(options.out, {"model": model.name, "summary": found, "prompts": rows})


if __name__ == "__main__":
    main()

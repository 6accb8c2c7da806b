"""Which rows of a hybrid's chunks to compute: several cuts, seams at both ends, tables (docs/design.md §8).

    python -m benchmarks.hybrid_rows --sizes 20 60 --out benchmarks/results/hybrid_rows.json

The trained hybrids of `training/zoo.py`, and the prompts of `benchmarks.hybrids`. Every variant computes as many rows
of a chunk as `legolink` does at this share, other ones: at several cuts, at both ends, or those with the highest score
of a table that is measured when the chunk is compiled (docs/studies/fixups.md), in as many runs as they come in, or in
one, two or four. Stored tokens between two runs have a map of their own. `shifted` computes legolink's rows, and adds
to the stored keys and values of a chunk by how much its last computed ones changed, the mean of four. Under `start`
and `end` rows change no state, and follow the one at their chunk's start, or its end: no run has a map of its own.

Images are put together here; that `legolink` gives what `pictool.link` gives is asserted. Right: fed with the right
answer, the model prefers each of its tokens, and then ends. KL and intervals as in `benchmarks.hybrids`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.fixups import Record, interval, questions_of, summarise_all
from benchmarks.hybrids import SIZES, WORLDS, prompt_of
from benchmarks.output import write_results
from pictool import Chunk, Model, Store, link, load_model, make_policy
from pictool.core import Layout, RowMask
from pictool.engines.base import first_token_kl
from pictool.runtime.attention import Rows
from pictool.runtime.chat.template import make_frame
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.states import StateMap
from pictool.runtime.prefill import ChunkKV, prefill_stateful
from pictool.runtime.sensitivity import EXPECTED, cut_at_lines
from pictool.runtime.stack import LayerStack
from training.world.generate import KINDS, Question, WorldPrompt
from training.zoo import HYBRIDS, MODELS

SHARES = (0.05, 0.1, 0.2, 0.3)
PROBES, PROBE_TOKENS = 8, 60
WAYS = ("maps", "shifted", "start", "end")
SHIFTED = 4  # computed rows whose change is added to stored ones
Scores = NDArray[np.float64]  # of the tokens of a chunk
Choose = Callable[[int, int, Scores], RowMask]  # (tokens, rows, table) → which rows


# Which rows


def spread(parts: int) -> Choose:
    """The rows in equal parts, at the beginning and at cuts that are equally far from each other."""

    def choose(length: int, rows: int, _: Scores) -> RowMask:
        mask = np.zeros(length, dtype=bool)
        sizes = [len(part) for part in np.array_split(np.arange(rows), parts)]
        for part, size in enumerate(sizes):
            free = np.flatnonzero(~mask[part * length // parts :])[:size]
            mask[part * length // parts + free] = True
        mask[np.flatnonzero(~mask)[: rows - int(mask.sum())]] = True
        return mask

    return choose


def both_ends(length: int, rows: int, _: Scores) -> RowMask:
    mask, last = np.zeros(length, dtype=bool), rows // 2
    mask[: rows - last] = True
    mask[length - last :] = True
    return mask


def of_table(runs: int | None) -> Choose:
    """The rows with the highest scores; with at most so many runs those with the highest sum."""

    def choose(length: int, rows: int, table: Scores) -> RowMask:
        if runs is None:
            mask = np.zeros(length, dtype=bool)
            mask[np.argsort(-table, kind="stable")[:rows]] = True
            return mask
        return best_runs(table, rows, runs)

    return choose


def best_runs(table: Scores, rows: int, runs: int) -> RowMask:
    """Exactly `rows` tokens in at most `runs` runs, of the highest sum, by dynamic programming."""
    length = len(table)
    # best[inside, rows so far, runs so far] over the tokens so far; `came` says whether the token before was inside.
    best = np.full((2, rows + 1, runs + 1), -np.inf)
    best[0, 0, 0] = 0.0
    came = np.zeros((length, 2, rows + 1, runs + 1), dtype=bool)
    for at, score in enumerate(table):
        after = np.full_like(best, -np.inf)
        came[at, 0] = best[1] > best[0]
        after[0] = best.max(0)
        grown, begun = np.full_like(best[0], -np.inf), np.full_like(best[0], -np.inf)
        grown[1:] = best[1, :-1] + score
        begun[1:, 1:] = best[0, :-1, :-1] + score
        came[at, 1] = grown >= begun
        after[1] = np.maximum(grown, begun)
        best = after
    inside, count, mask = int(best[1, rows].max() > best[0, rows].max()), rows, np.zeros(length, dtype=bool)
    run = int(best[inside, rows].argmax())
    for at in reversed(range(length)):
        mask[at], before = bool(inside), bool(came[at, inside, count, run])
        count, run = count - inside, run - (inside and not before)
        inside = int(before)
    assert mask.sum() == rows
    return mask


CHOICES: dict[str, Choose] = {
    "legolink": spread(1), "two cuts": spread(2), "four cuts": spread(4), "both ends": both_ends,
    "table": of_table(None), "table, 1 run": of_table(1), "table, 2 runs": of_table(2), "table, 4 runs": of_table(4),
}  # fmt: skip


# Tables, as of `pictool/runtime/sensitivity.py`, of a model whose layers are not run in batches


@dataclass
class Tables:
    """The table of every chunk of one model, made once."""

    model: Model
    made: dict[tuple[int, ...], Scores] = field(default_factory=dict)

    def __post_init__(self) -> None:
        texts = write_texts(self.model.stack, PROBES, 3 * PROBE_TOKENS, self.model.bos_id or 0)
        self.probes = cut_at_lines(self.model, texts, PROBE_TOKENS).tolist()
        keys = [_read(self.model.stack, probe)[0] for probe in self.probes]
        joined = [torch.cat([one[layer][:, 1:] for one in keys], 1) for layer in range(len(keys[0]))]
        self.spread = [each.var(1, correction=0).sum(-1) for each in joined]  # [kv_heads] of each layer

    def of(self, tokens: tuple[int, ...]) -> Scores:
        if tokens not in self.made:
            self.made[tokens] = self._measure(tokens)
        return self.made[tokens]

    @torch.inference_mode()
    def _measure(self, tokens: tuple[int, ...]) -> Scores:
        count, keys, expected = len(tokens), list[list[Tensor]](), list[Tensor]()
        for probe in self.probes:
            own, logits = _read(self.model.stack, [*probe, *tokens])
            keys.append([key[:, -count:] for key in own])
            shares = logits[-count - 1 : -1].softmax(-1)
            expected.append(shares[torch.arange(count), torch.tensor(tokens)])
        dependence = torch.zeros(count)
        for layer, of_heads in enumerate(self.spread):
            changes = torch.stack([one[layer] for one in keys]).var(0, correction=0).sum(-1)  # [kv_heads, n]
            dependence = torch.maximum(dependence, (changes / of_heads[:, None]).amax(0))
        scores: Scores = (dependence * (1 - torch.stack(expected).mean(0)).clamp_min(EXPECTED)).double().numpy()
        return scores


@torch.inference_mode()
def write_texts(stack: LayerStack, count: int, length: int, first: int) -> Tensor:
    """Texts that the model writes itself, at temperature 1, int64 [count, length]."""
    generator, texts = torch.Generator().manual_seed(0), list[list[int]]()
    for _ in range(count):
        image, tokens = Image(stack, Layout.of((), [], ())), [first]
        while len(tokens) < length:
            logits = image.append(tokens[-1])
            logits[first] = -torch.inf
            tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        texts.append(tokens)
    return torch.tensor(texts)


@torch.inference_mode()
def _read(stack: LayerStack, tokens: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Un-rotated keys [kv_heads, n, head_dim] of each layer with attention, and the logits after each token."""
    image, rows = Image(stack, Layout.of((), [tokens], ())), Rows.of(torch.arange(len(tokens)))
    image.keep_keys()
    hidden = stack.embed(torch.tensor([list(tokens)]))
    for layer in range(stack.num_layers):
        hidden = image.compute(layer, hidden, rows)
    assert image.fresh_keys is not None
    return [key[0] for key in image.fresh_keys], stack.logits(hidden[0])


# Links of any rows


@dataclass
class Linker:
    """Images of prompts of one model, in which any rows are computed and the others are stored."""

    stack: LayerStack
    kv: dict[tuple[int, ...], ChunkKV] = field(default_factory=dict)
    maps: dict[tuple[tuple[int, ...], int, int], dict[int, StateMap]] = field(default_factory=dict)

    @torch.inference_mode()
    def link(self, head: Sequence[int], pages: Sequence[tuple[int, ...]], rows: RowMask, way: str = "maps") -> Image:
        """A context whose `rows` [n] are computed, in one of `WAYS`; the head is among them."""
        layout = Layout.of(head, pages, ())
        image, positions = Image(self.stack, layout), Rows.of(torch.from_numpy(np.flatnonzero(rows)))
        self._place(image, rows, way in ("maps", "shifted"))
        hidden = self.stack.embed(torch.from_numpy(layout.tokens[rows].astype(np.int64))[None])
        for layer, index in enumerate(self.stack.kv_index):
            if way in ("start", "end") and self.stack.state_index[layer] is not None:
                hidden = self._apart(image, layer, hidden, rows, way)
                continue
            if way == "shifted" and index is not None:
                assert self.stack.state_index[layer] is None
                image.keep_keys()
                image.compute(layer, hidden, positions)
                self._shift(image, index, rows)
            hidden = image.compute(layer, hidden, positions)
            if self.stack.state_index[layer] is not None:  # over what is stored at the end
                assert image.states is not None
                image.states.move(layer, len(rows), image.states.before(layer, len(rows)))
        return image

    def _place(self, image: Image, rows: RowMask, has_maps: bool) -> None:
        assert image.states is not None
        for start, end in image.layout.chunks:
            tokens = tuple(image.layout.tokens[start:end].tolist())
            for index, parts in enumerate(self._alone(tokens)):
                for place, part in zip(image.places(index, start, end), parts, strict=True):
                    place.copy_(part)
                image.relocate(index, start, end)
            for first, last in runs_of(~rows[start:end]) if has_maps else ():
                for layer, stored in self._maps_of(tokens, first, last).items():
                    image.states.place(layer, start + first, stored)

    def _maps_of(self, tokens: tuple[int, ...], first: int, last: int) -> dict[int, StateMap]:
        """What the tokens [first, last) of a chunk, with its own inputs, make of the states before them, by layer."""
        key = (tokens, first, last)
        if key not in self.maps:
            layers = [layer for layer, index in enumerate(self.stack.state_index) if index is not None]
            found = prefill_stateful(self.stack, tokens[:last], first)[1]
            self.maps[key] = dict(zip(layers, found, strict=True))
        return self.maps[key]

    def _apart(self, image: Image, layer: int, hidden: Tensor, rows: RowMask, way: str) -> Tensor:
        """Run a linear layer on rows that change no state: those of a chunk follow the one at its start, or its end."""
        assert image.states is not None
        (_, head), out, at = image.layout.head, list[Tensor](), 0
        if head:
            out.append(image.compute(layer, hidden[:, :head], Rows.of(torch.arange(head))))
            at = head
        for start, end in image.layout.chunks:
            tokens, before = tuple(image.layout.tokens[start:end].tolist()), image.states.before(layer, start)
            after = self._maps_of(tokens, 0, end - start)[layer].apply(before)
            for first, last in runs_of(rows[start:end]):
                seen = after if first and way == "end" else before
                tail = self._maps_of(tokens, 0, first)[layer].apply(before).tail if first else before.tail
                image.states.move(layer, start + first, replace(seen, tail=tail))
                run = Rows.of(torch.arange(start + first, start + last))
                out.append(image.compute(layer, hidden[:, at : at + last - first], run))
                at += last - first
            image.states.move(layer, end, after)
        return torch.cat(out, 1)

    def _alone(self, tokens: tuple[int, ...]) -> ChunkKV:
        if tokens not in self.kv:
            self.kv[tokens] = prefill_stateful(self.stack, tokens, len(tokens))[0]
        return self.kv[tokens]

    def _shift(self, image: Image, index: int, rows: RowMask) -> None:
        """Add to a layer's stored keys and values by how much the last computed ones of their chunk changed."""
        assert image.fresh_keys is not None
        keys, at = image.fresh_keys[-1][0], np.cumsum(rows) - 1
        for start, end in image.layout.chunks:
            count = int(rows[start:end].sum())
            if not 0 < count < end - start:
                continue
            stored = self._alone(tuple(image.layout.tokens[start:end].tolist()))[index]
            of_key = keys[:, at[start] : at[start] + count]
            fresh = image.unrotated(index, of_key, start, start + count)
            places = image.places(index, start + count, end)
            for place, own, new in zip(places, stored, fresh, strict=True):
                change = (new - own[:, :count])[:, -SHIFTED:].mean(1, keepdim=True)
                place.copy_(own[:, count:] + change)
            image.relocate(index, start + count, end)


def runs_of(rows: RowMask) -> Iterator[tuple[int, int]]:
    """[start, end) of the runs of a chunk's tokens that are True."""
    for is_one, group in groupby(range(len(rows)), key=lambda at: bool(rows[at])):
        if is_one:
            run = list(group)
            yield run[0], run[-1] + 1


# Answers


@torch.inference_mode()
def ask(context: Image, tail: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The logits after the tail and after each token of the answer but its last, [answer, vocab]."""
    stack, start = context.stack, context.layout.num_tokens
    tokens = [*context.layout.tokens.tolist(), *tail, *answer[:-1]]
    image, rows = Image(stack, Layout.of((), [], tokens)), Rows.of(torch.arange(start, len(tokens)))
    assert image.states is not None and context.states is not None
    for index in range(stack.geometry.layers):
        image.fill(index, 0, context.key(index)[0], context.value(index)[0])
    hidden = stack.embed(torch.tensor([tokens[start:]]))
    for layer, state in enumerate(stack.state_index):
        if state is not None:
            image.states.move(layer, start, context.states.before(layer, start))
        hidden = image.compute(layer, hidden, rows)
    return stack.logits(hidden[0, len(tail) - 1 :])


def measure_prompt(model: Model, linker: Linker, tables: Tables, prompt: WorldPrompt, per_kind: int) -> dict[str, Any]:
    """One prompt under every variant: by variant, of every question."""
    pages, questions = [tuple(model.encode(page)) for page in prompt.pages], questions_of(prompt, per_kind)
    frames = [make_frame(model, question.text) for question in questions]
    head, mean = model.encode(frames[0].head), float(np.mean([len(page) for page in pages]))
    asked = [
        (model.encode(frame.tail), (*model.encode(" " + question.answer), *sorted(model.eos_ids)))
        for frame, question in zip(frames, questions, strict=True)
    ]
    assert model.geometry.states is not None
    records, full = dict[str, Record](), list[Tensor]()  # of the first token under full
    for label, (rows, way) in rows_of(model, head, pages, tables, mean).items():
        context = linker.link(head, pages, rows, way)
        logits = [ask(context, *question) for question in asked]
        full = full or [each[0] for each in logits]
        right = [each.argmax(-1).tolist() == list(gold) for each, (_, gold) in zip(logits, asked, strict=True)]
        records[label] = {
            "right": np.asarray(right, dtype=float),
            "kl": np.asarray([first_token_kl(one, each[0]) for one, each in zip(full, logits, strict=True)]),
            "rows": float(rows[len(head) :].mean()), "kinds": kinds_of(questions), "tokens": mean,
            "maps": maps_of(rows, len(head), pages),
        }  # fmt: skip
    return records


def summary_of(prompts: Sequence[dict[str, Record]]) -> dict[str, Any]:
    """Of every variant; KL also as a share of naive's, and of legolink's at as many rows."""
    lines = summarise_all(prompts)
    kl = {label: np.asarray([one[label]["kl"].sum() for one in prompts]) for label in lines}
    for label, line in lines.items():
        line["maps"] = round(float(np.mean([one[label]["maps"] for one in prompts])), 2)
        share = label.partition(" @ ")[2]
        for name, base in (("naive", "naive"), *([("legolink", f"legolink @ {share}")] if share else [])):
            line[f"kl_of_{name}"] = round(float(kl[label].sum() / kl[base].sum()), 4)
            line[f"kl_of_{name}_interval"] = interval(kl[label], kl[base])
    return {
        "mean_chunk_tokens": round(float(np.mean([one["full"]["tokens"] for one in prompts])), 1),
        "questions": sum(len(one["full"]["right"]) for one in prompts), "policies": lines,
    }  # fmt: skip


def operators_of(linker: Linker) -> dict[str, float]:
    """Of objects of whole pages, cut at 0: how many heads' operators are zero, and bytes of these and of all states."""
    whole = [maps for (tokens, first, last), maps in linker.maps.items() if (first, last) == (0, len(tokens))]
    operators = [each.operator for maps in whole for each in maps.values() if each.operator is not None]
    are_zero, shape = torch.stack([~one.any(-1).any(-1) for one in operators]).float(), linker.stack.geometry.states
    assert shape is not None
    return {
        "share_zero": round(float(are_zero.mean()), 4), "state_bytes": shape.num_bytes(4),
        "zero_bytes": round(float(are_zero.sum() / len(whole)) * 4 * shape.operator**2),
    }  # fmt: skip


def kinds_of(questions: Sequence[Question]) -> NDArray[np.int64]:
    return np.asarray([KINDS.index(question.kind) for question in questions])


def maps_of(rows: RowMask, start: int, pages: Sequence[tuple[int, ...]]) -> float:
    """Stored runs of a chunk, each of which has a map; the mean."""
    counts = list[int]()
    for page in pages:
        counts.append(len(list(runs_of(~rows[start : start + len(page)]))))
        start += len(page)
    return float(np.mean(counts))


def rows_of(
    model: Model, head: Sequence[int], pages: Sequence[tuple[int, ...]], tables: Tables, mean: float
) -> dict[str, tuple[RowMask, str]]:
    """The rows of every variant, `full` first, and the way in which they are computed."""
    assert model.geometry.states is not None
    best = of_table(None)
    whole, none = (np.full(sum(map(len, pages)) + len(head), value) for value in (True, False))
    none[: len(head)] = True
    found = {"full": (whole, "maps"), "naive": (none, "maps")}
    for share in SHARES:
        count = max(model.geometry.states.columns, round(share * mean))
        for name, choose in CHOICES.items():
            own = [choose(len(page), min(count, len(page)), tables.of(page)) for page in pages]
            found[f"{name} @ {share}"] = np.concatenate([none[: len(head)], *own]), "maps"
        scores = np.concatenate([tables.of(page) for page in pages])
        chosen = best(len(scores), sum(min(count, len(page)) for page in pages), scores)
        found[f"table of prompt @ {share}"] = np.concatenate([none[: len(head)], chosen]), "maps"
        found[f"shifted @ {share}"] = found[f"legolink @ {share}"][0], "shifted"
        for name, way in (("legolink", "start"), ("table", "start"), ("table", "end")):
            found[f"{name}, {way} @ {share}"] = found[f"{name} @ {share}"][0], way
    return found


def require_same(model: Model, linker: Linker, prompt: WorldPrompt) -> None:
    """That images which are put together here give what a link does, with a head and without rows of its own."""
    pages, frame = [Chunk(page, model.encode(page), "page") for page in prompt.pages], make_frame(model, "Which?")
    head, tail = model.encode(frame.head), model.encode(frame.tail)
    with tempfile.TemporaryDirectory() as directory:
        linked = link(model, Store(directory), pages, frame.tail, make_policy("legolink", {"k": 5}), head=frame.head)
    rows = linked.rows[0][: linked.image.layout.num_context].copy()
    rows[: len(head)] = True
    context = linker.link(head, [page.tokens for page in pages], rows)
    assert linked.image.logits is not None
    torch.testing.assert_close(ask(context, tail, [0])[0], linked.image.logits, atol=1e-4, rtol=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--per-kind", type=int, default=3, help="questions of each kind per prompt, at most")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--models", nargs="+", choices=HYBRIDS, default=list(HYBRIDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in arguments.models:
        model = load_model(str(MODELS / name), "cpu", "float32")
        tables = Tables(model)
        require_same(model, Linker(model.stack), prompt_of(WORLDS[name], arguments.sizes[0], 0))
        results[name] = {"model_type": model.config.model_type}
        for size in arguments.sizes:
            linker = Linker(model.stack)
            prompts = [
                measure_prompt(model, linker, tables, prompt_of(WORLDS[name], size, index), arguments.per_kind)
                for index in range(arguments.prompts)
            ]
            results[name][str(size)] = summary_of(prompts) | {"operators": operators_of(linker)}
            for label, line in results[name][str(size)]["policies"].items():
                print(
                    f"{name} {size} {label:22} rows {line['rows']:.2f} maps {line['maps']:.1f} right "
                    f"{line['right']:.3f} won back {line['won_back']} KL {line['kl_of_naive']:.3f} "
                    f"{line['kl_of_naive_interval']} of legolink's {line.get('kl_of_legolink')}",
                    flush=True,
                )
            write_results(arguments.out, {"models": results})


if __name__ == "__main__":
    main()

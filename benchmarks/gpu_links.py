"""The part `links` of `make gpu`: what launches, replays and copies cost, and links with graphs beside links without.

Each measurement is a line of `links.jsonl` as soon as it is made, its `name` first; a run that finds the file goes on
with what it lacks, or what failed there. A link is measured under `PIC_GRAPHS=off` and `on` in turn, by two stacks of
layers over the same weights. Objects are in host memory, in the page cache, or in a pool on the device.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.context import ContextOptions, free_memory, make_prompts
from pictool.bench.prompts import BenchPrompt, random_chunks, random_tail
from pictool.bench.single_request import run_linked
from pictool.compiler.compile import compile_chunks
from pictool.linker.grid import LabelledPolicy, named_policy, parse_grid
from pictool.linker.link import Linked, link
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.residency import ResidentObjects
from pictool.linker.spec import Spec
from pictool.runtime import kernels
from pictool.runtime.attention import Scoring
from pictool.runtime.decode import generate
from pictool.runtime.device import synchronize
from pictool.runtime.kernels.pairing import pairings
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.memory.streams import host_buffer
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store

VARIABLE = "PIC_GRAPHS"
OFF, ON = "off", "on"
MODES = (OFF, ON) if find_spec("pictool.runtime.graphs") else (OFF,)
POLICIES = ("full", "naive", "legolink-16", "prophet-10", "cacheblend-15")
CODEC = "float8_e4m3_head"
_WARM_UP = 3  # links: the second of a bucket records it
_COPIES, _COPY_BYTES = 31, 1 << 21  # a layer of 31 objects of 512 tokens
_MEMORY_BYTES = 40 << 30  # host memory for objects
_CLOSE = 1e-3  # logits of tiny models in float32
_MOST_DROPPED = 8  # tokens, of a tail, which decoding computes

Numbers = dict[str, Any]


@dataclass(frozen=True)
class LinksOptions:
    """Lengths of prompts, what of them is measured, and how often. `tiny_models`: at most so many."""

    lengths: ContextOptions
    decoded: int
    repeats: int
    tiny_models: int
    limit_s: float


OPTIONS = LinksOptions(ContextOptions(4096, 32768, 512, 32), 65, 3, 100, 450)
REHEARSAL_OPTIONS = LinksOptions(ContextOptions(256, 512, 64, 16), 5, 1, 4, 450)


class Lines:
    """Measurements, each a line of a file as soon as it is made; what the file has is not measured again."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path, self._ends = path, time.monotonic() + limit_s
        written = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._done = {line["name"]: line for line in map(json.loads, written) if "error" not in line}
        self.num_failed = 0

    def measure(self, name: str, run: Callable[[], Numbers]) -> None:
        """Measure, unless that is done, or the time is over; what fails is a line, too."""
        if name in self._done or time.monotonic() > self._ends:
            return
        started = time.monotonic()
        try:
            numbers = run()
        except Exception:
            numbers = {"error": traceback.format_exc()[-2000:]}
            self.num_failed += 1
        line = {"name": name, **numbers, "seconds": round(time.monotonic() - started, 2)}
        print(json.dumps(line), flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def measure_links(make_model: Callable[[], Model], options: LinksOptions, out: Path) -> bool:
    """Measure all, most telling first; False if something failed. Objects go to a directory that is removed."""
    model, lines = make_model(), Lines(out / "links.jsonl", options.limit_s)
    device = torch.device(model.device)
    with tempfile.TemporaryDirectory() as inside:
        for name, run in launch_costs(device).items():
            lines.measure(name, run)
        links = Links(model, options, Store(Path(inside) / "objects"))
        for name, run in itertools.chain(
            links.from_memory(), links.decoding(), links.differences(), kernel_costs(model, options),
            tiny_models(device, options), links.from_elsewhere(), links.float8(), links.profiles(),
        ):  # fmt: skip
            lines.measure(name, run)
    return lines.num_failed == 0


# Time


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The median of some runs, each with all that the device does of it."""
    taken = []
    for _ in range(repeats + 2):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken[2:])


def host_microseconds(run: Callable[[], object], device: torch.device, repeats: int = 200) -> float:
    """What a call takes of the host, which does not wait for the device."""
    run()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    taken = time.perf_counter() - started
    synchronize(device)
    return 1e6 * taken / repeats


def replayed(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A CUDA graph of what a function launches; elsewhere the function."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        run()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def each_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a device for one of several runs, which a host that is slow does not delay."""
    times = 10 if device.type == "cuda" else 1

    def several() -> None:
        for _ in range(times):
            run()

    return milliseconds(replayed(several, device), device) / times


# What launches, replays and copies cost


def launch_costs(device: torch.device) -> Mapping[str, Callable[[], Numbers]]:
    return {
        "launch": partial(_launch, device),
        **{
            f"copy by {how}": partial(_copy, device, how) for how in ("copy_", "_foreach_copy_", "cudaMemcpyBatchAsync")
        },
    }


def _launch(device: torch.device) -> Numbers:
    one, many = torch.zeros(1, device=device), torch.zeros(36, 1, device=device).unbind()
    graph = replayed(lambda: [row.add_(1) for row in many], device)
    return {
        "kernel_us": host_microseconds(lambda: one.add_(1), device),
        "view_us": host_microseconds(lambda: one.view(1), device),
        "replay_of_36_us": host_microseconds(graph, device),
        "replay_of_36_whole_us": 1e3 * milliseconds(graph, device),
    }


def _copy(device: torch.device, how: str) -> Numbers:
    """A layer of all objects to a staging buffer: microseconds of the host for each object, and gigabytes a second."""
    to = torch.split(torch.empty(_COPIES * _COPY_BYTES, dtype=torch.uint8, device=device), _COPY_BYTES)
    host = [host_buffer(_COPY_BYTES, device).fill_(1) for _ in to]
    runs: dict[str, Callable[[], object]] = {
        "copy_": lambda: [own.copy_(given, non_blocking=True) for own, given in zip(to, host, strict=True)],
        "_foreach_copy_": lambda: torch._foreach_copy_(to, host, non_blocking=True),
    }
    if how not in runs and (device.type != "cuda" or find_spec("cuda") is None):
        return {"missing": "needs CUDA and cuda-bindings"}
    run = runs[how] if how in runs else _memcpy_batch(to, host)
    whole_ms, host_us = milliseconds(run, device), host_microseconds(run, device, 5)
    assert all(int(own[-1]) == 1 for own in to)
    return {"host_us": host_us / _COPIES, "GB_s": _COPIES * _COPY_BYTES / whole_ms / 1e6}


def _memcpy_batch(to: Sequence[Tensor], host: Sequence[Tensor]) -> Callable[[], object]:
    from cuda.bindings import runtime  # type: ignore[import-not-found, unused-ignore]

    order = runtime.cudaMemcpyAttributes()
    order.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    targets, sources = ([tensor.data_ptr() for tensor in tensors] for tensors in (to, host))
    sizes, stream = [_COPY_BYTES] * len(to), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run() -> None:
        error, *_ = runtime.cudaMemcpyBatchAsync(targets, sources, sizes, len(to), [order], [0], 1, stream.cuda_stream)
        if error != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(str(error))

    return run


# Links


@contextmanager
def graphs(mode: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = mode
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def stacks_of(model: Model) -> dict[str, Model]:
    """The model with a stack of layers of its own for each mode, over the same weights."""
    _ = model.module, model.target
    twins = {mode: copy.copy(model) for mode in MODES}
    for twin in twins.values():
        twin.__dict__.pop("stack", None)
    return twins


class Links:
    """Links of prompts of several lengths."""

    def __init__(self, model: Model, options: LinksOptions, store: Store) -> None:
        self._options, self._store = options, store
        self._near = Store(store.root, memory_bytes=_MEMORY_BYTES)
        self._models, self._policies = stacks_of(model), parse_grid(POLICIES)

    @cached_property
    def _prompts(self) -> list[tuple[int, BenchPrompt]]:
        return make_prompts(self._models[OFF], self._policies, self._options.lengths, self._store)

    def _named(self, tiers: Sequence[str]) -> Iterator[tuple[str, int, BenchPrompt, LabelledPolicy, str]]:
        """What is measured, by its name; full recompute reads no object."""
        for (tokens, prompt), labelled, tier in itertools.product(self._prompts, self._policies, tiers):
            if labelled.label != BASELINE or tier == "memory":
                yield f"{labelled.label}, {tokens} tokens, {tier}", tokens, prompt, labelled, tier

    def from_memory(self) -> Iterator[tuple[str, Callable[[], Numbers]]]:
        for name, tokens, prompt, labelled, tier in self._named(["memory"]):
            yield name, partial(self._ttft, tokens, prompt.spec(labelled.policy), tier)

    def from_elsewhere(self) -> Iterator[tuple[str, Callable[[], Numbers]]]:
        for name, tokens, prompt, labelled, tier in self._named(["page cache", "pool"]):
            yield name, partial(self._ttft, tokens, prompt.spec(labelled.policy), tier)

    def float8(self) -> Iterator[tuple[str, Callable[[], Numbers]]]:
        """Objects that are coded as float8, whose coding takes a while: of the shortest prompt."""
        tokens, prompt = self._prompts[0]
        for labelled in self._policies[1:3]:
            spec = replace(prompt.spec(labelled.policy), codec=CODEC)

            def run(spec: Spec = spec) -> Numbers:
                compile_chunks(self._models[OFF], self._store, prompt.chunks, spec.objects)
                return self._ttft(tokens, spec, "memory")

            yield f"{labelled.label}, {tokens} tokens, {CODEC}", run

    def _ttft(self, tokens: int, spec: Spec, tier: str) -> Numbers:
        """Milliseconds until the first token, and of them before the first layer, of every run."""
        store = self._store if tier == "page cache" else self._near
        models = self._models if spec.policy.name != BASELINE else {OFF: self._models[OFF]}  # it uses no graphs
        pools: dict[str, ResidentObjects] = {}
        if tier == "pool":
            pools = {mode: self._pool(model, tokens) for mode, model in models.items()}
        found: dict[str, list[list[float]]] = {mode: [] for mode in models}
        for repeat in range(_WARM_UP + self._options.repeats):
            for mode, model in models.items():
                with graphs(mode):
                    synchronize(model.device)
                    linked = link(model, store, spec, residents=pools.get(mode))
                if repeat >= _WARM_UP:
                    timing = linked.timing
                    found[mode].append(
                        [round(1e3 * part, 3) for part in (timing.ttft_s, timing.load_s + timing.select_s)]
                    )
                rows = float(linked.rows.sum(1).mean())
                del linked
        medians = {f"{mode}_ms": statistics.median(ttft for ttft, _ in found[mode]) for mode in found}
        free_memory()
        return {"tokens": tokens, "rows": rows, **medians, "ttft_and_waiting_ms": found}

    def _pool(self, model: Model, tokens: int) -> ResidentObjects:
        return ResidentObjects(model, 2 * (tokens + GROWTH) * slot_bytes(model), memory=self._near.memory)

    def decoding(self) -> Iterator[tuple[str, Callable[[], Numbers]]]:
        for tokens, prompt in self._prompts[:1]:
            yield f"decoding, {tokens} tokens", partial(self._decode, prompt)

    def _decode(self, prompt: BenchPrompt) -> Numbers:
        """Milliseconds a token, and whether both modes give the same tokens."""
        policy, found, answers = make_policy("naive"), dict[str, float](), set[tuple[int, ...]]()
        for mode, model in self._models.items():
            with graphs(mode):
                for _ in range(2):
                    measured = run_linked(model, replace(prompt, store=self._near), policy, self._options.decoded)
            assert measured.decode_tokens_per_s is not None
            found[f"{mode}_ms"] = 1e3 / measured.decode_tokens_per_s
            answers.add(measured.tokens)
        return {**found, "same_tokens": len(answers) == 1}

    def differences(self) -> Iterator[tuple[str, Callable[[], Numbers]]]:
        for (tokens, prompt), labelled in itertools.product(self._prompts, self._policies[1:]):
            yield f"logits, {labelled.label}, {tokens} tokens", partial(self._differences, prompt, labelled)

    def _differences(self, prompt: BenchPrompt, labelled: LabelledPolicy) -> Numbers:
        """How far logits are from those without graphs; and how far those are from themselves by other products.

        Those are of a link whose tail lacks its last tokens, which are decoded then: the same attention, in products of
        other numbers of rows.
        """
        model = self._models[OFF]
        plain = self._linked(OFF, prompt, labelled)
        assert plain.image.logits is not None
        found: Numbers = {"largest": float(plain.image.logits.abs().max())}
        if not labelled.policy.needs.attention:  # else the tail selects rows
            tail, dropped = shorter_tail(model, prompt.tail)
            shorter = self._linked(OFF, replace(prompt, tail=tail), labelled)
            with graphs(OFF):
                found["noise"] = apart([shorter.image.append(token) for token in dropped][-1], plain)
        for mode in MODES[1:]:
            for _ in range(_WARM_UP):
                linked = self._linked(mode, prompt, labelled)
            found["apart"] = apart(linked.image.logits, plain)
            found["same_rows"] = bool((linked.rows == plain.rows).all())
        return found

    def _linked(self, mode: str, prompt: BenchPrompt, labelled: LabelledPolicy) -> Linked:
        with graphs(mode):
            return link(self._models[mode], self._near, prompt.spec(labelled.policy))

    def profiles(self) -> Iterator[tuple[str, Callable[[], Numbers]]]:
        for mode, (tokens, prompt) in itertools.product(MODES, self._prompts[:1]):
            yield f"profile, {tokens} tokens, {mode}", partial(self._profile, mode, prompt)

    def _profile(self, mode: str, prompt: BenchPrompt) -> Numbers:
        """How long the device works of the whole link, and its longest kernels."""
        from torch.profiler import ProfilerActivity, profile

        device = self._models[mode].device
        if torch.device(device).type != "cuda":
            return {"missing": "needs CUDA"}
        labelled = self._policies[2]
        for _ in range(_WARM_UP):
            self._linked(mode, prompt, labelled)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            started = time.perf_counter()
            self._linked(mode, prompt, labelled)
            synchronize(device)
            whole_ms = 1e3 * (time.perf_counter() - started)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in seen.events() or ()
            if str(event.device_type).endswith("CUDA")
        )
        busy_us, last = 0.0, 0.0
        for start, end in spans:
            busy_us += max(0.0, end - max(start, last))
            last = max(last, end)
        longest = sorted(((event.self_device_time_total, event.key) for event in seen.key_averages()), reverse=True)
        return {
            "kernels": len(spans), "busy_ms": busy_us / 1e3, "whole_ms": whole_ms,
            "longest_ms": {key[:60]: round(us / 1e3, 3) for us, key in longest[:12]},
        }  # fmt: skip


def apart(logits: Tensor | None, linked: Linked) -> float:
    """The largest difference of logits."""
    assert logits is not None and linked.image.logits is not None
    return float((logits - linked.image.logits).abs().max())


def shorter_tail(model: Model, tail: str) -> tuple[str, list[int]]:
    """A tail without its last tokens, of which there are as few as its text allows, and those."""
    ids = model.encode(tail)
    for count in range(1, min(_MOST_DROPPED, len(ids) - 1) + 1):
        text = str(model.tokenizer.decode(ids[:-count], clean_up_tokenization_spaces=False))
        if model.encode(text) == ids[:-count]:
            return text, list(ids[-count:])
    raise ValueError(f"no beginning of {tail!r} has its tokens")


# Kernels


def kernel_costs(model: Model, options: LinksOptions) -> Iterator[tuple[str, Callable[[], Numbers]]]:
    if not kernels.available():
        yield "kernels", lambda: {"missing": "needs Triton and CUDA or ROCm"}
        return
    for tokens in options.lengths.lengths:
        for what, rows in (("naive", 0), ("legolink-16", 16)):
            yield f"attention, {what}, {tokens} tokens", partial(_attention, model, options, tokens, rows)
        yield f"place, {tokens} tokens", partial(_place, model, tokens, options.lengths.chunk_tokens)


def _attention(model: Model, options: LinksOptions, tokens: int, rows: int) -> Numbers:
    """Attention of a link's rows by the mask and SDPA, and by the kernel: milliseconds, TFLOP/s, how far apart."""
    from pictool.runtime.kernels.rows_attention import rows_attention

    device, (part, _), lengths = torch.device(model.device), model.geometry.parts, options.lengths
    heads, tail = model.config.num_attention_heads, tokens - lengths.tail_tokens
    chunks = [torch.arange(start, start + rows) for start in range(lengths.chunk_tokens, tail, lengths.chunk_tokens)]
    positions = torch.cat([*chunks, torch.arange(tail, tokens)]).to(device)
    draw = partial(torch.randn, device=device, dtype=model.torch_dtype)
    query = draw(1, heads, len(positions), part.width)
    key, value = draw(2, 1, part.heads, tokens, part.width).unbind()
    mask = torch.zeros(len(positions), tokens, device=device, dtype=query.dtype)
    mask.masked_fill_(torch.arange(tokens, device=device) > positions[:, None], float("-inf"))
    group = heads // part.heads
    by_group = query.view(part.heads, group, len(positions), -1).transpose(0, 1)

    def masked() -> Tensor:
        out = scaled_dot_product_attention(
            by_group, key.expand(group, -1, -1, -1), value.expand(group, -1, -1, -1), attn_mask=mask
        )
        return out.permute(2, 1, 0, 3).reshape(1, len(positions), heads, -1)

    def unmasked() -> Tensor:
        return rows_attention(query, key, value, positions, Scoring())

    runs: dict[str, Callable[[], Tensor]] = {"masked": masked, "kernel": unmasked}
    flops = 4 * heads * part.width * float((positions + 1).sum())
    times = {name: each_ms(run, device) for name, run in runs.items()}
    return {
        "rows": len(positions), "apart": float((masked() - unmasked()).abs().max()),
        **{f"{name}_ms": taken for name, taken in times.items()},
        **{f"{name}_tflops": flops / taken / 1e9 for name, taken in times.items()},
    }  # fmt: skip


def _place(model: Model, tokens: int, chunk: int) -> Numbers:
    """A layer of all objects to its places by torch's operations and by the kernel, raw and of float8."""
    from pictool.runtime.kernels.place import Places, place

    device, stack, (part, _) = torch.device(model.device), model.stack, model.geometry.parts
    index = torch.arange(tokens, device=device)
    tables, numbers = stack.rotary_tables(index), 2 * part.heads * part.width
    found, (kind, *_) = pairings(stack, tables), tables.of_kind
    if found is None:
        return {"missing": "the kernel does not rotate as this model does"}
    token, length = index % chunk, torch.full_like(index, chunk)
    length[tokens // chunk * chunk :] = tokens % chunk
    places = Places((index - token) * numbers, token, length, index)
    staged = torch.randn(tokens * numbers, device=device).to(model.torch_dtype)
    coded = torch.randint(0, 120, (len(staged) + 8 * part.heads,), dtype=torch.uint8, device=device)
    keys, values, own_keys, own_values = torch.zeros(
        4, 1, part.heads, tokens, part.width, device=device, dtype=model.torch_dtype
    ).unbind()
    head = torch.arange(2 * part.heads, device=device)[:, None]
    pieces = ((index - token) * 2 * part.heads + token + head * length).view(2, -1)

    def by_operations() -> None:
        key, value = (staged.view(-1, part.width).index_select(0, own).view_as(keys) for own in pieces)
        keys.index_copy_(2, index, stack.rotate(key, tables, 0))
        values.index_copy_(2, index, value)

    by_kernel = partial(place, staged, places, found[kind], tables.of_kind[kind], own_keys, own_values)
    times = {"operations_us": 1e3 * each_ms(by_operations, device), "kernel_us": 1e3 * each_ms(by_kernel, device)}
    equal = torch.equal(keys, own_keys) and torch.equal(values, own_values)
    widened = partial(place, coded, places, found[kind], tables.of_kind[kind], own_keys, own_values)
    times["float8_us"] = 1e3 * each_ms(widened, device)
    return {"equal": equal, **times, "kernel_GB_s": 2 * staged.nbytes / times["kernel_us"] / 1e3}


# All tiny models


def tiny_models(device: torch.device, options: LinksOptions) -> Iterator[tuple[str, Callable[[], Numbers]]]:
    for name in [name for name in tiny.CONFIGS if name not in tiny.HYBRIDS][: options.tiny_models]:
        yield f"model {name}", partial(_tiny, name, device)


def _tiny(name: str, device: torch.device) -> Numbers:
    """A tiny model's links of two prompts with graphs beside those without: how far apart, and what was recorded."""
    model = wrap_model(tiny.random_module(tiny.CONFIGS[name]()).to(device), tiny.tokenizer(), name)
    prompts = [(random_chunks(model, 3, 24 + seed, seed), random_tail(model, 9, seed)) for seed in (1, 2)]
    models, policy, found = stacks_of(model), named_policy("legolink-4"), dict[str, list[tuple[Tensor, Any]]]()
    with tempfile.TemporaryDirectory() as inside, warnings_of_pictool() as warnings:
        store = Store(inside, memory_bytes=1 << 28)
        for mode, own in models.items():
            found[mode] = []
            for chunks, tail in prompts * _WARM_UP:
                with graphs(mode):
                    image = link(own, store, Spec.raw(chunks, tail, policy)).image
                    assert image.logits is not None
                    logits = image.logits.clone()
                    found[mode].append((logits, generate(own, image, 3).tokens))
    pairs = list(zip(found[OFF], found[MODES[-1]], strict=True))
    difference = max(float((logits - others).abs().max()) for (logits, _), (others, _) in pairs)
    assert difference < _CLOSE, f"logits are {difference:.1e} apart"
    recorded = getattr(getattr(models[MODES[-1]].stack, "graphs", None), "num_recorded", None)
    is_same = all(tokens == others for (_, tokens), (_, others) in pairs)
    return {"apart": difference, "same_tokens": is_same, "recorded": recorded, "warnings": warnings}


@contextmanager
def warnings_of_pictool() -> Iterator[list[str]]:
    """What is logged meanwhile, as that a layer cannot be recorded."""
    handler, found = logging.Handler(logging.WARNING), list[str]()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pictool").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("pictool").removeHandler(handler)

"""The parts of `make gpu` that measure. Each writes one JSON file into PIC_GPU_OUT as soon as it has something."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention_kinds
from benchmarks.breakdown import bench_breakdown
from benchmarks.context import ContextOptions, free_memory, make_prompts
from benchmarks.gpu import REHEARSAL
from benchmarks.gpu_links import OPTIONS, REHEARSAL_OPTIONS, measure_links
from benchmarks.roofline import Rates, measure_rates, prompt_flops
from pictool.bench.options import PromptOptions
from pictool.bench.prompts import BenchPrompt
from pictool.bench.repeats import MedianRange, interleave, median_ratio
from pictool.bench.shapes import random_model
from pictool.bench.single_request import Measurement, run_linked
from pictool.bench.sync import bench_sync
from pictool.compiler.chunking import make_chunk
from pictool.doctor.exactness import examine_exactness
from pictool.doctor.examine import Examination, examine
from pictool.doctor.verdict import DoctorReport
from pictool.linker import loader
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.link import link
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime.device import accelerator
from pictool.runtime.machine import machine
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store

IS_REHEARSAL = bool(os.environ.get(REHEARSAL))
SHAPE = "tiny" if IS_REHEARSAL else "llama-3.1-8b"
LENGTHS = ContextOptions(256, 512, 64, 16, 1) if IS_REHEARSAL else ContextOptions(4096, 32768, 512, 32, 3)
PROMPT = PromptOptions(4, 64, 16, 4, 1) if IS_REHEARSAL else PromptOptions(8, 512, 32, 16, 5)
LONG_PROMPT = PromptOptions(4, 64, 16, 0, 1) if IS_REHEARSAL else PromptOptions(63, 512, 32, 0, 3)
KINDS = (
    ("tiny",) if IS_REHEARSAL else ("llama-3.1-8b", "gemma-3-12b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-30b-a3b")
)
KINDS_PROMPT = PromptOptions(4, 64, 16, 0, 1) if IS_REHEARSAL else PromptOptions(16, 512, 32, 0, 3)
POLICIES = ("full", "naive", "legolink-16", "cacheblend-15")
_MEMORY_BYTES = 40 << 30  # host memory for objects


def device() -> str:
    found = "cpu" if IS_REHEARSAL else accelerator()
    if found is None:
        sys.exit(f"no accelerator that torch {torch.__version__} uses is here; {REHEARSAL}=1 tries all on the CPU")
    return found


def subject() -> Model:
    return random_model(SHAPE, device())


def write(name: str, results: dict[str, Any]) -> None:
    model = {"shape": SHAPE, "device": device()}
    path = Path(os.environ["PIC_GPU_OUT"]) / f"{name}.json"
    path.write_text(json.dumps({"part": name, "machine": machine(), "model": model, **results}, indent=1) + "\n")


def doctor() -> bool:
    """`pic doctor` on the embedded models, in every dtype."""
    cases = [("embedded-small", "float32")] if IS_REHEARSAL else [
        ("embedded", dtype) for dtype in ("float32", "bfloat16", "float16")
    ]  # fmt: skip
    reports, is_good = [], True
    for model, dtype in cases:
        report = examine(Examination(model, device(), dtype, tempfile.gettempdir() + "/.pic"), print)
        is_good = is_good and report.is_good
        reports.append({"model": model, "dtype": dtype, **report.report()})
        write("doctor", {"reports": reports})
    return is_good


def shape() -> bool:
    """The exactness rules at 8B shape, in the dtype that such a model runs in."""
    with tempfile.TemporaryDirectory() as inside:
        verdicts = []
        for verdict in examine_exactness(subject(), Store(inside)):
            print(verdict)
            verdicts.append(verdict)
    report = DoctorReport(tuple(verdicts))
    write("shape", report.report())
    return report.is_good


def sync() -> bool:
    with tempfile.TemporaryDirectory() as inside:
        result = bench_sync(subject(), parse_grid(POLICIES), PROMPT, Path(inside))
    write("bench-sync", {"options": asdict(PROMPT), "results": result.report()})
    return True


def breakdown() -> bool:
    with tempfile.TemporaryDirectory() as inside:
        result = bench_breakdown(subject(), parse_grid(POLICIES[1:]), LONG_PROMPT, Path(inside))
    write("bench-breakdown", {"options": asdict(LONG_PROMPT), "results": result.report()})
    return True


def context() -> bool:
    """TTFT against the roofline by length, with objects in host memory, in the page cache and on disk."""
    model, policies, points = subject(), parse_grid(POLICIES), list[dict[str, Any]]()
    rates = measure_rates(model.device, model.dtype)
    with tempfile.TemporaryDirectory() as inside:
        store = Store(Path(inside) / "objects")
        near = Store(store.root, memory_bytes=_MEMORY_BYTES)
        for tokens, prompt in make_prompts(model, policies, LENGTHS, store):
            tiers = {"memory": (replace(prompt, store=near), False), "page cache": (prompt, False)}
            if tokens == LENGTHS.lengths[-1]:
                tiers["disk"] = (prompt, True)
            points += _measure(model, policies, tiers, rates, tokens)
            write("bench-context", {"options": asdict(LENGTHS), "rates": asdict(rates), "points": points})
    return True


def _measure(
    model: Model,
    policies: list[LabelledPolicy],
    tiers: Mapping[str, tuple[BenchPrompt, bool]],
    rates: Rates,
    tokens: int,
) -> list[dict[str, Any]]:
    runs: dict[tuple[str, str], Callable[[], Measurement]] = {
        (labelled.label, tier): partial(run_linked, model, prompt, labelled.policy, 0, is_cold)
        for labelled in policies
        for tier, (prompt, is_cold) in tiers.items()
        if labelled.label != BASELINE or tier == "memory"
    }
    samples = interleave({"|".join(name): run for name, run in runs.items()}, LENGTHS.repeats)
    full = [sample.ttft_s for sample in samples[f"{BASELINE}|memory"]]
    points = []
    for label, tier in runs:
        own = samples[f"{label}|{tier}"]
        ttft = [sample.ttft_s for sample in own]
        middle = MedianRange.of(ttft)
        num_bytes = model_bytes(model, own[0], tokens)
        policy = next(labelled.policy for labelled in policies if labelled.label == label)
        floor_s = rates.roofline_s(num_bytes, prompt_flops(model, tiers[tier][0], policy))
        point = {
            "tokens": tokens, "policy": label, "tier": tier, "ttft": asdict(middle),
            "speedup": median_ratio(full, ttft), "floor_s": floor_s, "ttft_by_floor": middle.median / floor_s,
            "rows": own[0].rows, "kv_bytes": num_bytes, "load_s": own[0].load_s, "peak_bytes": own[0].peak_bytes,
        }  # fmt: skip
        print(json.dumps(point))
        points.append(point)
    return points


def kinds() -> bool:
    """TTFT of legolink-16 against full, by kind of attention, at the shapes of current models."""
    rows = []
    for name in KINDS:
        rows.append(attention_kinds.measure(name, KINDS_PROMPT, device(), "auto"))
        print(json.dumps(rows[-1]))
        write("kinds", {"options": asdict(KINDS_PROMPT), "policy": attention_kinds.POLICY, "kinds": rows})
        free_memory()
    return True


def links() -> bool:
    """Launches, replays and copies; links with graphs beside those without; each a line of links.jsonl at once."""
    out = Path(os.environ["PIC_GPU_OUT"])
    return measure_links(subject, REHEARSAL_OPTIONS if IS_REHEARSAL else OPTIONS, out)


def model_bytes(model: Model, sample: Measurement, tokens: int) -> float:
    """Bytes of KV that are copied to the device: of all rows that are not computed, from whatever tier."""
    shape = model.geometry
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.torch_dtype.itemsize
    return (tokens - sample.rows) * row


def race() -> bool:
    """Links under torch's CUDA sanitizer, which finds streams that use the same memory unordered; it raises.

    It sees one thread, so that layers are loaded in this one, on their own stream all the same. Tensors without
    elements are hidden from it: it knows them by `id`, which Python gives again to another one.
    """
    from torch.cuda._sanitizer import ArgumentHandler

    handle = ArgumentHandler._handle_argument

    def with_elements(handler: ArgumentHandler, value: Any, *more: Any, **named: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.numel():
            handle(handler, value, *more, **named)

    ArgumentHandler._handle_argument = with_elements  # type: ignore[assignment, method-assign]
    loader.SMALL_LAYER_BYTES, loader.PATIENCE_S = 1 << 62, float("inf")
    model = load_model("embedded-small", device(), "float32")
    with tempfile.TemporaryDirectory() as inside:
        texts = [f"It holds the festival number {number}. " * 12 for number in range(8)]
        chunks = [make_chunk(model, text, "made") for text in texts]
        for store in (Store(inside), Store(inside, memory_bytes=1 << 28)):
            for policy in ("naive", "legolink", "cacheblend"):
                for codec in ("none", "int8"):
                    for _ in range(2):
                        link(model, store, Spec("Answer:", chunks, make_policy(policy), codec=codec, is_raw=True))
    print("no race was found")
    return True


PARTS: Mapping[str, Callable[[], bool]] = {
    "doctor": doctor, "shape": shape, "bench-sync": sync, "bench-breakdown": breakdown, "bench-context": context,
    "kinds": kinds, "race": race, "links": links,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(not PARTS[sys.argv[1]]())

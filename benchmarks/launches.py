"""What the host does for a link on an accelerator: operations, launches and time, now and by the number of chunks.

    OMP_NUM_THREADS=1 python -m benchmarks.launches --out benchmarks/results/launches.json

Counted on a CPU that is used as an accelerator (streams and events do nothing): `eager` is a link in an image of its
own, `lean` one in static tensors without graphs, `graphs` one whose steps are recorded, here on tapes
(`tests/tape.py`). What a graph would launch is counted as it is recorded; the host's time is of links whose replays
do nothing. Real launches cost more than these, and a replay some microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, DynamicCache

from benchmarks.output import write_results
from pictool.bench.prompts import BenchPrompt, compile_for, random_chunks, random_tail
from pictool.bench.shapes import random_module
from pictool.linker.fusor import Fusor
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.link import Linked, compute, link, prepare, start_link
from pictool.linker.loader import Loader
from pictool.runtime import products
from pictool.runtime.architectures import cache_name
from pictool.runtime.memory import streams
from pictool.runtime.model import Model, load_model, wrap_model
from pictool.store.store import Store

POLICIES = ("naive", "legolink-1")
TAIL = 8


class _Event:
    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def record_event(self) -> _Event:
        return _Event()

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def as_accelerator() -> Iterator[None]:
    """Have the CPU be a device with streams."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch, "Stream", _Stream))
        patches.enter_context(mock.patch.object(torch.accelerator, "current_stream", _Stream))
        patches.enter_context(mock.patch.object(streams, "has_streams", lambda _: True))
        host = lambda count, _: torch.empty(count, dtype=torch.uint8)  # noqa: E731
        patches.enter_context(mock.patch.object(streams, "host_buffer", host))
        yield


def make_model(layers: int) -> Model:
    """A random model of Llama's layers, so small that the host's work is all there is."""
    config = AutoConfig.for_model(
        "llama", vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=8, max_position_embeddings=1 << 17,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with mock.patch.object(products, "use_fastest"):  # its layers as an accelerator has them
        return wrap_model(random_module(config, "cpu", "float32", 0), load_model("embedded", "cpu").tokenizer)


def of_transformers(model: Model, cached: int, rows: int) -> float:
    """Launches a layer of `transformers`' own forward of so many rows after a prefix."""
    from tape import Launches

    module, cache, before = model.module, DynamicCache(), model.module.config._attn_implementation
    module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        module(torch.randint(2048, (1, cached)), **{cache_name(module): cache})
        with Launches() as counted:
            module(torch.randint(2048, (1, rows)), logits_to_keep=1, **{cache_name(module): cache})
    module.set_attn_implementation(before)
    return float(sum(counted.launches.values()) / module.config.num_hidden_layers)


def measure(model: Model, prompt: BenchPrompt, labelled: LabelledPolicy, repeats: int) -> dict[str, Any]:
    """Counts and times of one prompt."""
    from tape import Launches, Tape, graphed

    layers, spec = model.geometry.layers, prompt.spec(labelled.policy)

    def counted() -> tuple[Linked, Launches]:
        link(model, prompt.store, spec)
        with Launches() as launches:
            linked = link(model, prompt.store, spec)
        return linked, launches

    eager, launches = counted()
    found: dict[str, Any] = {"policy": labelled.label, "chunks": len(prompt.chunks)}
    found["eager"] = _per_layer(launches, layers)
    with graphed(model, records=False):
        lean, launches = counted()
        found["lean"] = _per_layer(launches, layers) | {"apart": _apart(lean, eager)}
    with graphed(model) as (_, tapes):
        for _ in range(2):
            replayed = link(model, prompt.store, spec)
        found["graphs"] = {"apart": _apart(replayed, eager)}
        del replayed
        with mock.patch.object(Tape, "is_mute", True):
            _, launches = counted()
            prepared_s, layers_s, rest_s = zip(*(_times(model, prompt, spec) for _ in range(repeats)), strict=True)
        found["graphs"] |= {
            "operations_outside": sum(launches.operations.values()),
            "launches_of_steps": {name: max(counts) for name, counts in tapes.launches.items()},
            "prepare_ms": 1e3 * statistics.median(prepared_s),
            "host_us_a_layer": 1e6 * statistics.median(layers_s) / layers,
            "rest_ms": 1e3 * statistics.median(rest_s),
        }
    return found


def _per_layer(launches: Any, layers: int) -> dict[str, float]:
    kinds = ("operations", "launches")
    return {f"{kind}_a_layer": sum(getattr(launches, kind).values()) / layers for kind in kinds}


def _apart(one: Linked, other: Linked) -> float:
    assert one.image.logits is not None and other.image.logits is not None
    return float((one.image.logits - other.image.logits).abs().max())


def _times(model: Model, prompt: BenchPrompt, spec: Any) -> tuple[float, float, float]:
    """Seconds of the processor for a link: before it has an image, for its layers, and for the rest."""
    layers_s = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            nonlocal layers_s
            started = time.thread_time()
            found = method(*given)
            layers_s += time.thread_time() - started
            return found

        return call

    with ExitStack() as opened:
        for kind, name in ((Loader, "synchronize"), (Fusor, "prefill_layer")):
            opened.enter_context(mock.patch.object(kind, name, timed(getattr(kind, name))))
        run, started = start_link(model, prompt.store, spec), time.thread_time()
        prepared = prepare(run, opened)
        between = time.thread_time()
        compute(prepared, run.context.reserve(prepared.reused))
        return between - started, layers_s, time.thread_time() - between - layers_s


def measure_links(
    model: Model, counts: Sequence[int], chunk_tokens: int, names: Sequence[str], repeats: int
) -> Iterator[dict[str, Any]]:
    """Links of so many chunks each, under each policy; their objects are in host memory."""
    policies = parse_grid(names)
    with tempfile.TemporaryDirectory() as inside, as_accelerator():
        store = Store(Path(inside) / "objects", memory_bytes=1 << 30)
        chunks, tail = random_chunks(model, max(counts), chunk_tokens), random_tail(model, TAIL)
        compile_for(model, store, chunks, policies)
        for count in counts:
            for labelled in policies:
                yield measure(model, BenchPrompt(store, tuple(chunks[:count]), tail), labelled, repeats)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--chunk-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    model, found = make_model(options.layers), []
    own = of_transformers(model, 256, 40)
    print(f"transformers: {own:.1f} launches a layer")
    for each in measure_links(model, options.chunks, options.chunk_tokens, POLICIES, options.repeats):
        found.append(each)
        print(each, flush=True)
    if options.out is not None:
        write_results(options.out, {"layers": options.layers, "transformers_launches_a_layer": own, "links": found})


if __name__ == "__main__":
    main()

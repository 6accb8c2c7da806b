"""Linking a GGUF file against llama.cpp's own prefill of the same prompt, at the shape of Qwen2.5-0.5B in q8_0.

The weights are random: times do not depend on them. CPU seconds of the process with one thread, the least of some
repeats, and their ratios.

    python -m benchmarks.llamacpp --out benchmarks/results/llamacpp.json
    python -m benchmarks.llamacpp --memory --out benchmarks/results/llamacpp_memory.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pictool.compiler.compile import compile_chunks
from pictool.core import Chunk
from pictool.engines.llamacpp.library import api
from pictool.engines.llamacpp.model import GgufModel, open_gguf
from pictool.linker.grid import named_policy
from pictool.linker.link import link
from pictool.linker.spec import Spec
from pictool.runtime.machine import PeakMemory, machine
from pictool.runtime.model import load_model
from pictool.store.store import Store

SHAPES = ((8, 512), (4, 256))
POLICIES = ("legolink-16", "naive")
_TAIL, _DECODED = 32, 16


def write_model(path: Path) -> None:
    """A random model of the shape, with the embedded tokenizer."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import gguf_files

    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        gguf_files.write_gguf(path, Qwen2ForCausalLM(config), load_model().tokenizer, quantize="Q8_0")


def cpu_s(run: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    started = time.process_time()
    run()
    return time.process_time() - started


def least(repeats: int, run: Callable[[], object]) -> float:
    """CPU seconds of this process, the least of some runs."""
    return min(cpu_s(run) for _ in range(repeats))


def own_prefill(model: GgufModel, tokens: Sequence[int]) -> tuple[float, float]:
    """CPU seconds of llama.cpp's prefill alone, and of one token after it."""
    context = model.stack.take(len(tokens) + 256, 2)
    prefill = cpu_s(lambda: context.decode(list(tokens), 0, wants_logits=True))
    started = time.process_time()
    for position in range(len(tokens), len(tokens) + _DECODED):
        context.decode([7], position, wants_logits=True)
    decode = time.process_time() - started
    model.stack.give_back(context)
    return prefill, decode / _DECODED


def measure(model: GgufModel, documents: int, length: int, repeats: int) -> dict[str, Any]:
    """All numbers of one shape of prompt."""
    draw = torch.Generator().manual_seed(documents)
    ids = torch.randint(3, model.config.vocab_size, (documents, length), generator=draw).tolist()
    chunks = [Chunk(f"chunk {i}", tuple(tokens), f"chunk {i}") for i, tokens in enumerate(ids)]
    tail = model.tokenizer.decode(list(range(300, 300 + _TAIL)))
    with tempfile.TemporaryDirectory() as root:
        store = Store(root)
        alone_s = sum(own_prefill(model, chunk.tokens)[0] for chunk in chunks)
        compile_s = cpu_s(lambda: compile_chunks(model, store, chunks))
        specs = {name: Spec.raw(chunks, tail, named_policy(name)) for name in POLICIES}
        prompt = link(model, store, specs["naive"]).image.layout.tokens.tolist()
        prefill_s, decode_s = own_prefill(model, prompt)
        linked = {name: least(repeats, partial(link, model, store, spec)) for name, spec in specs.items()}
        decode = {name: linked_decode_s(model, store, spec) for name, spec in specs.items()}
    return {
        "documents": documents, "length": length, "prompt_tokens": len(prompt), "prefill_cpu_s": prefill_s,
        "link_cpu_s": linked, "speedup": {name: prefill_s / seconds for name, seconds in linked.items()},
        "compile_cpu_s": compile_s, "compile_over_prefill": compile_s / alone_s,
        "decode_cpu_s_per_token": {"own prefill": decode_s, **decode},
    }  # fmt: skip


def measure_memory(model: GgufModel, documents: int, length: int) -> dict[str, Any]:
    """Bytes that a link takes beside its context's KV, which stays: at the first link, and when a context is there."""
    draw = torch.Generator().manual_seed(documents)
    ids = torch.randint(3, model.config.vocab_size, (documents, length), generator=draw).tolist()
    chunks = [Chunk(f"chunk {i}", tuple(tokens), f"chunk {i}") for i, tokens in enumerate(ids)]
    token_bytes = model.geometry.layers * sum(part.heads * part.width for part in model.geometry.parts) * 2
    peaks = dict[str, list[int | None]]()
    with tempfile.TemporaryDirectory() as root:
        store = Store(root)
        compile_chunks(model, store, chunks)
        for name in POLICIES:
            peaks[name] = []
            for _ in range(3):
                with PeakMemory("cpu") as peak:
                    link(model, store, Spec.raw(chunks, "Answer:", named_policy(name)))
                peaks[name].append(peak.bytes)
    return {
        "documents": documents, "length": length, "chunk_bytes": length * token_bytes,
        "context_kv_bytes": (documents * length + 256) * token_bytes, "peak_bytes": peaks,
    }  # fmt: skip


def linked_decode_s(model: GgufModel, store: Store, spec: Spec) -> float:
    """CPU seconds of one token after a link."""
    image = link(model, store, spec).image
    return cpu_s(lambda: [image.append(7) for _ in range(_DECODED)]) / _DECODED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "qwen2.5-0.5b-random-q8_0.gguf"
        write_model(path)
        model = open_gguf(str(path), "cpu", "float16")
        results = [
            measure_memory(model, *shape) if options.memory else measure(model, *shape, options.repeats)
            for shape in SHAPES
        ]
    report = {
        "shape": "Qwen2.5-0.5B, random weights, q8_0, KV in float16", "threads": 1, "load_average_before": load,
        "load_average_after": os.getloadavg(), "llama.cpp": api().llama_version().decode(), "machine": machine(),
        "results": results,
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

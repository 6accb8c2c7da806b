"""What a table of fixups costs to compile, and TTFT of fixup against legolink at equal rows; in one run.

    python -m benchmarks.fixup_speed --out benchmarks/results

Compile: the sample documents on the embedded model, and 2 chunks × 512 tokens on a random model of 8 layers; probes are
made before the clock starts. TTFT: 8 such chunks on the latter. Each is the least of interleaved rounds: what is
compared is the work, and other processes only add to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.link_speed import TAIL, medians, random_chunks
from pictool import Chunk, Model, Store, compile, link, load_model, make_policy, wrap_model
from pictool.compiler.sensitivity import probe_tokens
from pictool.runtime.machine import machine
from pictool.runtime.sensitivity import probes_of

DOCUMENTS = Path("fixtures/docs")


def middle_model() -> Model:
    """A random model of 8 layers, with the embedded model's tokenizer."""
    config = Qwen2Config(
        vocab_size=1416, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=32768, use_sliding_window=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    return wrap_model(module, load_model("embedded").tokenizer, "random, 8 layers")


def compile_times(
    model: Model, chunks: list[Chunk], counts: tuple[int, ...], repeats: int, by: Model | None = None
) -> dict[str, Any]:
    """Seconds of compiling by number of probes, and as multiples of the plain compile; `by` measures, or the model."""
    measurer = by or model
    for count in counts:
        if count:
            probes_of(measurer, count, probe_tokens(measurer))

    def run(count: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            compile(model, Store(directory), chunks, probes=count, probe_model=measurer)

    seconds = medians({str(count): partial(run, count) for count in counts}, repeats)
    least = {name: min(each) for name, each in seconds.items()}
    times = {name: round(one / least["0"], 2) for name, one in least.items()}
    return {"seconds": least, "times_plain": times, "raw": seconds}


def ttft(model: Model, chunks: list[Chunk], repeats: int) -> dict[str, Any]:
    """TTFT of legolink-51 and of fixup with as many rows (a tenth), in seconds."""
    k = 51
    ratio = k / len(chunks[0])
    policies = {"legolink": make_policy("legolink", {"k": k}), "fixup": make_policy("fixup", {"ratio": ratio})}
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        compile(model, store, chunks, probes=2)
        rows = {name: link(model, store, chunks, TAIL, one, head="Q").recomputed for name, one in policies.items()}
        found: dict[str, list[float]] = {name: [] for name in policies}
        for turn in range(repeats):
            for name, policy in sorted(policies.items(), reverse=bool(turn % 2)):  # neither always goes first
                found[name].append(link(model, store, chunks, TAIL, policy, head="Q").timing.ttft_s)
    ratios = [mine / theirs for mine, theirs in zip(found["fixup"], found["legolink"], strict=True)]
    least = {name: min(each) for name, each in found.items()}
    return {
        "rows": rows, "seconds": least, "fixup_over_legolink": least["fixup"] / least["legolink"],
        "median_of_rounds": statistics.median(ratios), "raw": found,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for fixup_speed.json")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model("embedded", device="cpu")
    texts = [path.read_text() for path in sorted(DOCUMENTS.glob("*.txt"))]
    documents = [Chunk(text, model.encode(text), "page") for text in texts]
    found: dict[str, Any] = {"machine": machine()}
    found["compile_embedded"] = compile_times(model, documents, (0, 2, 4, 8, 16), arguments.repeats)
    large, chunks = middle_model(), random_chunks(8, 512, 0)
    found["compile_random"] = compile_times(large, chunks[:2], (0, 2, 8), arguments.repeats)
    found["ttft_random"] = ttft(large, chunks, 3 * arguments.repeats)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fixup_speed.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: one for name, one in found.items() if name != "machine"}, indent=1))


if __name__ == "__main__":
    main()

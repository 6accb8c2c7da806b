"""What the states of a hybrid cost and save: time by length of chunk, bytes against KV, and bfloat16 against float32.

    python -m benchmarks.hybrid_states speed --out benchmarks/results/hybrid_speed.json
    python -m benchmarks.hybrid_states codecs --out benchmarks/results/hybrid_states.json

- speed: a random Gated DeltaNet hybrid (Qwen3.5's text model, 8 layers of 1,024, 2 with attention, in float32), 4
  chunks of each length and a tail of 32 tokens; policies in turn, ratios are the medians of the repeats' ratios.
- codecs: the trained hybrids of `training/zoo.py`, held-out prompts of 6 pages; what the codec `states_bfloat16`
  changes under naive and legolink (k: a fifth of a page). KL: of the first token from full, as a share of naive's in
  float32; `from float32`: the same link's KL from its own with states in float32, in nats.
- factors: the bytes of A, and of A as a number and two factors of as many columns as the chunk has tokens (WY form).
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig

from benchmarks.hybrids import interval, prompt_of, questions_of
from benchmarks.output import write_results
from pictool import Chunk, Model, Sampling, Store, generate, link, load_model, make_policy, wrap_model
from pictool.bench.prompts import random_chunks, random_tail
from pictool.bench.repeats import interleave, median_ratio
from pictool.compiler.compile import compile_chunks
from pictool.core import CompileOptions
from pictool.engines.base import first_token_kl
from pictool.runtime.architectures import geometry_of
from pictool.runtime.chat.template import make_frame
from pictool.runtime.decode import forced_logits
from training.zoo import HYBRIDS, MODELS

LENGTHS = (16, 64, 256, 1024)
CHUNKS, TAIL = 4, 32
POLICIES = ("full", "naive", "legolink-16")
CODECS = ("none", "states_bfloat16")


def random_hybrid() -> Model:
    config = Qwen3_5TextConfig(
        vocab_size=2048, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, linear_num_key_heads=16, linear_num_value_heads=16,
    )  # fmt: skip
    torch.manual_seed(0)
    tokenizer = load_model("embedded", "cpu", "float32").tokenizer
    return wrap_model(Qwen3_5ForCausalLM(config).eval(), tokenizer, "random hybrid")


def measure_speed(model: Model, length: int, repeats: int) -> dict[str, Any]:
    """TTFT of each policy over chunks of a length, and the bytes of an object."""
    chunks, tail = random_chunks(model, CHUNKS, length), random_tail(model, TAIL)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        for cut in (0, min(16, length - 1)):
            done = compile_chunks(model, store, chunks, CompileOptions(cut=cut))
        with store.peek(done[0].key) as file:
            states, kv = file.state_bytes, sum(file.stored_bytes(layer) for layer in range(model.geometry.layers))
        runs = {name: partial(link, model, store, chunks, tail, name) for name in POLICIES}
        samples = {
            name: [linked.timing.ttft_s for linked in some] for name, some in interleave(runs, repeats).items()
        }  # fmt: skip
    return {
        "chunk_tokens": length, "states_bytes": states, "kv_bytes": kv,
        "full_ms": round(1e3 * float(np.median(samples["full"])), 1),
        "speedup": {name: round(median_ratio(samples["full"], samples[name]), 2) for name in POLICIES[1:]},
    }  # fmt: skip


def measure_codecs(model: Model, name: str, size: int, count: int) -> dict[str, Any]:
    """Answers and KL with states in float32 and in bfloat16."""
    labels = [f"{policy}, {codec}" for policy in ("naive", "legolink @ 0.2") for codec in CODECS]
    kls, rights = {label: list[list[float]]() for label in labels}, {label: list[float]() for label in labels}
    between: dict[str, list[float]] = {policy: [] for policy in ("naive", "legolink @ 0.2")}
    for index in range(count):
        prompt = prompt_of(HYBRIDS[name].world, size, index)
        pages = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
        k = max(3, round(0.2 * float(np.mean([len(page) for page in pages]))))
        policies = {"naive": make_policy("naive"), "legolink @ 0.2": make_policy("legolink", {"k": k})}
        of_prompt: dict[str, list[float]] = {label: [] for label in labels}
        with tempfile.TemporaryDirectory() as directory:
            store = Store(directory)
            for question in questions_of(prompt, 3):
                frame = make_frame(model, question.text)
                linked = link(model, store, pages, frame.tail, "full", head=frame.head)
                answer = generate(model, linked.image, 8, Sampling(stop=("\n",)))
                (wanted, *_) = forced_logits(linked.image, answer.tokens)
                for policy, made in policies.items():
                    found = dict[str, torch.Tensor]()
                    for codec in CODECS:
                        own = link(model, store, pages, frame.tail, made, head=frame.head, codec=codec)
                        text = generate(model, own.image, 8, Sampling(stop=("\n",))).text
                        (found[codec], *_) = forced_logits(own.image, answer.tokens)
                        of_prompt[f"{policy}, {codec}"].append(first_token_kl(wanted, found[codec]))
                        rights[f"{policy}, {codec}"].append(float(text.strip() == question.answer))
                    between[policy].append(first_token_kl(*(found[codec] for codec in CODECS)))
        for label, values in of_prompt.items():
            kls[label].append(values)
    sums = {label: np.asarray([sum(one) for one in some]) for label, some in kls.items()}
    naive = sums["naive, none"]
    return {
        "questions": sum(map(len, kls[labels[0]])),
        "lines": {
            label: {
                "right": round(float(np.mean(rights[label])), 4),
                "kl_of_naive": round(float(of.sum() / naive.sum()), 4),
                "kl_of_naive_interval": interval(of, naive),
            }
            for label, of in sums.items()
        },
        "from_float32": {name: {"mean": float(np.mean(some)), "max": max(some)} for name, some in between.items()},
    }  # fmt: skip


def factored_bytes(config: Any, length: int) -> dict[str, Any]:
    """Bytes of an object of a chunk of `length` tokens beyond its cut, A as it is and in factors."""
    geometry = geometry_of(config)
    states = geometry.states
    assert states is not None
    whole, width = states.num_bytes(2), states.operator
    saved = 4 * states.layers * states.heads * (width * width - min(width * width, 2 * width * length + 1))
    kv = 2 * length * geometry.layers * geometry.width
    return {"chunk_tokens": length, "kv_bytes": kv, "states_bytes": whole, "factored_bytes": whole - saved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "codecs"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.part == "speed":
        torch.set_num_threads(options.threads)
        hybrid, found = random_hybrid(), dict[str, Any]()
        found |= {"threads": options.threads, "repeats": options.repeats}
        found["lengths"] = [measure_speed(hybrid, length, options.repeats) for length in options.lengths]
    else:
        torch.set_num_threads(1)
        found = {"factors, Qwen3-Next": [factored_bytes(Qwen3NextConfig(), length) for length in (4, 16, 32, 64, 256)]}
        for name in HYBRIDS:
            model = load_model(str(MODELS / name), "cpu", "float32")
            found[name] = {size: measure_codecs(model, name, size, options.prompts) for size in (20, 60)}
    print(found)
    write_results(options.out, found)


if __name__ == "__main__":
    main()

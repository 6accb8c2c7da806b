"""What tables cost to compile if a smaller model makes them, as multiples of the plain compile; in one run.

    python -m benchmarks.fixup_compile --out benchmarks/results

The sample documents on the embedded model, whose tables `embedded-small` makes, and one chunk on a random model of
`--shape`, whose tables a random model of its speculative shape makes; of both a quarter of the layers and of the
vocabulary, so that their ratio is that of the whole models. Probes are made before the clock starts. The least of
interleaved rounds: what is compared is the work, and other processes only add to it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.fixup_speed import DOCUMENTS, compile_times
from benchmarks.link_speed import random_chunks
from pictool import Chunk, Model, load_model, wrap_model
from pictool.bench.shapes import random_module, shape_of
from pictool.runtime.machine import machine

SHARE = 4


def part_of(name: str, seed: int) -> Model:
    """A random model of a share of a shape's layers and vocabulary, with the embedded model's tokenizer."""
    config = shape_of(name).make_config()
    layers, vocabulary = config.num_hidden_layers // SHARE, config.vocab_size // SHARE
    less = shape_of(name).make_config(num_hidden_layers=layers, vocab_size=vocabulary, bos_token_id=0, eos_token_id=1)
    return wrap_model(random_module(less, "cpu", "float32", seed), load_model("embedded").tokenizer, f"part of {name}")


def of_shape(shape: str, tokens: int, repeats: int) -> dict[str, Any]:
    """One chunk of `tokens`: the plain compile, and tables by the speculative shape."""
    small = shape_of(shape).speculative
    found = compile_times(part_of(shape, 0), random_chunks(1, tokens, 0), (0, 4, 8), repeats, part_of(small, 1))
    return {"shape": shape, "by": small, "share": 1 / SHARE, "tokens": tokens, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for fixup_compile.json")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--shape-repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, small = (load_model(name, device="cpu") for name in ("embedded", "embedded-small"))
    texts = [path.read_text() for path in sorted(DOCUMENTS.glob("*.txt"))]
    documents = [Chunk(text, model.encode(text), "page") for text in texts]
    counts = (0, 2, 4, 8, 16)
    found: dict[str, Any] = {"machine": machine()}
    found["embedded by itself"] = compile_times(model, documents, counts, arguments.repeats)
    found["embedded by embedded-small"] = compile_times(model, documents, counts, arguments.repeats, small)
    found["shape"] = of_shape(arguments.shape, arguments.tokens, arguments.shape_repeats)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fixup_compile.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: one.get("times_plain") for name, one in found.items()}, indent=1))


if __name__ == "__main__":
    main()

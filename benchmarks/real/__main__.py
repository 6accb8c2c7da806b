"""Policies on a real model: how much of naive's divergence each leaves, over whole answers.

    python -m benchmarks.real MODEL --musique musique_s.json --seed 8 --out benchmarks/results/real_smollm2.json
    python -m benchmarks.real model.gguf --gguf --musique musique_s.json --out benchmarks/results/real_smollm2_gguf.json
    python -m benchmarks.real --show benchmarks/results/real_smollm2.json --worst prophet-10

POLICY@AFTER compiles the documents after a context of that name (`pictool/compiler/contexts.py`), POLICY after the
default one; POLICY+CODEC links objects of that codec. `naive@none`, documents that were computed alone and are reused
as they are, is the yardstick. `again` is full recompute by another computation, whose sums are rounded differently: the
noise.

Prompts are texts that people wrote, of eight documents: `passages` (about 180 tokens each, of MuSiQue, one with the
answer), `pieces` (consecutive pieces of one text: the descriptions of installed packages), `code` (functions of
Python's library), `records` (packages' metadata as JSON, one of them asked about), `long` (passages of 480 tokens), and
`tasks` (find, copy or quote a sentence that was put into one of them). Each is answered greedily under full recompute;
under each policy the same answer is forced, and KL(full ‖ policy) is summed over its tokens. A policy is told by the
share of naive's sum that it leaves, a ratio of sums over prompts with its 95 % bootstrap interval; by the worst prompt;
by how many answers are full's, token by token; by how many have the expected text where full's has it; and by its TTFT.

In float32 the sums over three prompts of six policies (naive, naive@text, legolink-16, cacheblend-15, prophet-10@none,
full) were those of an independent implementation in plain PyTorch within 0.2 %; of all but cacheblend within 0.002 %.

Seed 7 draws the prompts that policies were chosen by; every other seed draws from the other half of the documents.

The results file is written after each prompt, kinds in turn, and a run that finds one goes on with it. MuSiQue (Trivedi
et al. 2022) as CacheBlend's authors publish it, `musique_s.json`, is not in this repository; without it those kinds are
left out. GGUF files need llama.cpp (`make test-llamacpp` makes an environment with it).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import write_results
from benchmarks.real.measure import measure
from benchmarks.real.prompts import CHOICE_SEED, make_questions
from benchmarks.real.report import KINDS, markdown_lines, summary, text_lines, worst_lines
from pictool import Model, Store, load_model
from pictool.engines.llamacpp.model import open_gguf

POLICIES = (
    "naive@none,naive@text,naive,legolink-16@none,legolink-16,cacheblend-15@none,cacheblend-15,prophet-10@none,auto,"
    "prophet-20,again"
)
STATIC_POLICIES = "naive@none,naive@text,naive,legolink-16@none,legolink-16,again"
SETTINGS = ("policies", "prompts", "tokens", "seed", "dtype")


def main() -> None:
    options = parse(sys.argv[1:])
    if options.show:
        results = json.loads(options.show.read_text(encoding="utf-8"))
    else:
        results = measure_all(options)
        print()
    print("\n".join((markdown_lines if options.markdown else text_lines)(results["summary"])))
    for label in filter(None, options.worst.split(",")):
        print("\n".join(worst_lines(results["answers"], label)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a directory, or with --gguf a .gguf file")
    parser.add_argument("--gguf", action="store_true", help="run the file by llama.cpp, under static policies")
    parser.add_argument("--musique", type=Path, help="musique_s.json, for passages and long")
    parser.add_argument("--policies", default="", help="naive@none is one of them")
    parser.add_argument("--prompts", type=int, default=10, help="of passages, pieces and tasks; half of the others")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these")
    parser.add_argument("--seed", type=int, default=8, help=f"{CHOICE_SEED}: the prompts that policies were chosen by")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--dtype", default="", help="of the model, float32; of a GGUF file's KV, float16")
    parser.add_argument("--out", type=Path, help="results file; one that is there is continued")
    parser.add_argument("--show", type=Path, help="print a results file, and measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print one table in Markdown")
    parser.add_argument("--worst", default="", help="print the worst prompts of these policies")
    options = parser.parse_args(arguments)
    if not options.show and not (options.model and options.out):
        parser.error("MODEL and --out, or --show")
    options.policies = options.policies or (STATIC_POLICIES if options.gguf else POLICIES)
    options.dtype = options.dtype or ("float16" if options.gguf else "float32")
    return options


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the prompts that the results file lacks."""
    model: Model = (open_gguf if options.gguf else load_model)(options.model, "cpu", options.dtype)
    settings = {"model": model.name} | {name: getattr(options, name) for name in SETTINGS}
    done: list[dict[str, Any]] = []
    if options.out.exists():
        known = json.loads(options.out.read_text(encoding="utf-8"))
        if known["settings"] != settings:
            raise SystemExit(f"{options.out}: has other settings, {known['settings']}; choose another file")
        done = known["answers"]
    results = {"settings": settings, "summary": summary(done), "answers": done}
    ids = {each["id"] for each in done}
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        kinds = [kind for kind in KINDS if kind in options.kinds.split(",")]
        for question in make_questions(model, kinds, options.musique, options.prompts, options.seed):
            if question.id in ids:
                continue
            done.append(measure(model, store, question, options.policies.split(","), options.tokens))
            results["summary"] = summary(done)
            write_results(options.out, results)
            print(f"\r{len(done)} prompts", end="", flush=True)
    return results


if __name__ == "__main__":
    main()

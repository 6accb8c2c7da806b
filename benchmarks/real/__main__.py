"""Policies on a real model: how much of naive's divergence each leaves, over whole answers.

    python -m benchmarks.real MODEL                     # half an hour; writes real-results/MODEL.row.json
    python -m benchmarks.real --add real-results/MODEL.row.json   # its row in docs/studies/results.md
    python -m benchmarks.real model.gguf --gguf
    python -m benchmarks.real MODEL --musique musique_s.json --minutes 600 --out benchmarks/results/real_smollm2.json
    python -m benchmarks.real --show benchmarks/results/real_smollm2.json --worst prophet-10

POLICY@AFTER compiles the documents after a context of that name (`pictool/compiler/contexts.py`), POLICY after the
default one; POLICY+CODEC links objects of that codec. `naive@none`, documents that were computed alone and are reused
as they are, is the yardstick. `again` is full recompute by another computation, whose sums are rounded differently: the
noise.

Prompts are texts that people wrote, of eight documents: `passages` (about 180 tokens each, of MuSiQue, one with the
answer), `long` (the same, of 480 tokens), `pieces` (consecutive pieces of one text: the descriptions of installed
packages), `chapters` (the same, of 480 tokens), `code` (functions of Python's library), `records` (packages' metadata
as JSON, one of them asked about), and `tasks` (find, copy or quote a sentence that was put into one of them). Each is
answered greedily under full recompute; under each policy the same answer is forced, and KL(full ‖ policy) is summed
over its tokens. A policy is told by the share of naive's sum that it leaves, a ratio of sums over prompts with its 95 %
bootstrap interval; by the worst prompt; by how many answers are full's, token by token; by how many have the expected
text where full's has it; and by its TTFT.

In float32 the sums over three prompts of six policies (naive, naive@text, legolink-16, cacheblend-15, prophet-10@none,
full) were those of an independent implementation in plain PyTorch within 0.2 %; of all but cacheblend within 0.002 %.

Seed 7 draws the prompts that policies were chosen by; every other seed draws from the other half of the documents.

The results file is written after each prompt, kinds in turn, and a run that finds one goes on with it; beside it is the
row to hand in, without questions and answers. A prompt is left out if, by its length and the prompts before it, it
would not end within the minutes: what it would have shown has no part in that. Descriptions and records are those of
the packages of this environment, so another one asks about others.

MuSiQue (Trivedi et al. 2022) as CacheBlend's authors publish it, `musique_s.json`, is not in this repository; without
it its kinds are left out. GGUF files need llama.cpp (`make test-llamacpp` makes an environment with it).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import write_results
from benchmarks.real.measure import measure
from benchmarks.real.prompts import CHOICE_SEED, Question, make_questions
from benchmarks.real.report import KINDS, markdown_lines, summary, text_lines, worst_lines
from benchmarks.real.rows import add, write_page, write_row
from pictool import Model, Store, load_model
from pictool.engines.llamacpp.model import open_gguf
from pictool.runtime.model import api_name

POLICIES = "naive@none,legolink-16,auto,prophet-20"
STATIC_POLICIES = "naive@none,legolink-16"  # which `auto` is there
SETTINGS = ("policies", "prompts", "tokens", "seed")


def main() -> None:
    options = parse(sys.argv[1:])
    if options.add is not None:
        for path in options.add:
            print(add(path, options.note))
        write_page()
        return
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
    parser.add_argument("--prompts", type=int, default=12, help="of passages, pieces and tasks; half of the others")
    parser.add_argument("--minutes", type=float, default=30, help="for all of them")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these")
    parser.add_argument("--seed", type=int, default=8, help=f"{CHOICE_SEED}: the prompts that policies were chosen by")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--device", default="", help="auto; of a GGUF file cpu")
    parser.add_argument("--dtype", default="auto", help="of the model; of a GGUF file's KV")
    parser.add_argument(
        "--out", type=Path, help="results file; one that is there is continued (real-results/MODEL.json)"
    )
    parser.add_argument("--add", type=Path, nargs="*", help="put rows into the table of results, and write its page")
    parser.add_argument("--note", default="", help="with --add: what the row should say, as busy")
    parser.add_argument("--show", type=Path, help="print a results file, and measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print one table in Markdown")
    parser.add_argument("--worst", default="", help="print the worst prompts of these policies")
    options = parser.parse_args(arguments)
    if not options.model and not options.show and options.add is None:
        parser.error("MODEL, --show or --add")
    options.device = options.device or ("cpu" if options.gguf else "auto")
    options.policies = options.policies or (STATIC_POLICIES if options.gguf else POLICIES)
    return options


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the prompts that the results file lacks, within the minutes."""
    ends = time.monotonic() + 60 * options.minutes
    model: Model = (open_gguf if options.gguf else load_model)(options.model, options.device, options.dtype)
    name = api_name(model.name)
    out = options.out or Path("real-results") / f"{name.replace('/', '_')}.json"
    settings = {"model": name} | {each: getattr(options, each) for each in SETTINGS} | {"dtype": model.dtype}
    done: list[dict[str, Any]] = []
    if out.exists():
        known = json.loads(out.read_text(encoding="utf-8"))
        if known["settings"] != settings:
            raise SystemExit(f"{out}: has other settings, {known['settings']}; choose another file")
        done = known["answers"]
    results = {"settings": settings, "summary": summary(done), "answers": done}
    ids = {each["id"] for each in done}
    kinds = [kind for kind in KINDS if kind in options.kinds.split(",")]
    questions = make_questions(model, kinds, options.musique, options.prompts, options.seed)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        for question in in_time([each for each in questions if each.id not in ids], ends):
            done.append(measure(model, store, question, options.policies.split(","), options.tokens))
            results["summary"] = summary(done)
            write_results(out, results)
            write_row(out.with_suffix(".row.json"), model, options.device if options.gguf else model.device, results)
            print(f"\r{len(done)} prompts", end="", flush=True)
    if not done:
        raise SystemExit(f"no prompt would end within {options.minutes:g} minutes: use a larger --minutes")
    print(f"\nto hand in: {out.with_suffix('.row.json')}")
    return results


def in_time(questions: Sequence[Question], ends: float) -> Iterator[Question]:
    """Those that are likely to end in time, by the slowest one so far and their lengths alone."""
    slowest = 0.0  # seconds a character
    for question in questions:
        length, started = sum(map(len, question.documents)), time.monotonic()
        if started + slowest * length < ends:
            yield question
            slowest = max(slowest, (time.monotonic() - started) / length)


if __name__ == "__main__":
    main()

"""Speed of this checkout beside that of another revision: the requests of `pic bench`, and compiling.

    python -m benchmarks.against main~20 --out benchmarks/results

Both run at once, each in a process that keeps its model and its objects: this working tree as it is, and a git worktree
of the revision, which is removed afterwards. A request is measured by one and then by the other, in turns which of them
is first, so that a slow moment of the machine meets both. Ratios are this ÷ the other, medians of the repeats'
ratios: above 1 is slower. The raw times are in the JSON.

The measuring code is this file's for both, over `pictool.bench` of each; a revision in which that is another is
refused by the error that it raises.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pictool.linker.policies.base import Policy

CHECKOUT = Path(__file__).parents[1]
ALGOS = ("full", "naive", "legolink-16", "cacheblend-15")
COMPILE = "compile"  # beside the policies: the chunks of the prompt, from tokens to objects


class PromptSize(NamedTuple):
    chunks: int
    chunk_tokens: int
    tail_tokens: int


# The measured process: imports pictool of the revision that PYTHONPATH names


def serve(shape: str, threads: int, size: PromptSize, algos: Sequence[str]) -> None:
    """Run what each line of stdin names; a line of stdout for each is its seconds, the first line what runs here."""
    import torch

    import pictool
    from pictool.bench.options import PromptOptions
    from pictool.bench.prompts import make_prompt, needs_speculative, with_speculative
    from pictool.bench.shapes import random_model, save_speculative
    from pictool.bench.single_request import run_linked
    from pictool.compiler.compile import compile_chunks
    from pictool.linker.grid import parse_repeatable
    from pictool.store.store import Store

    torch.set_num_threads(threads)
    model = random_model(shape, "cpu", "float32")
    with tempfile.TemporaryDirectory() as directory:
        policies = parse_repeatable(algos)
        if needs_speculative(policies):
            policies = with_speculative(policies, save_speculative(shape, f"{directory}/speculative"))
        options = PromptOptions(**size._asdict())
        prompt = make_prompt(model, policies, options, Path(directory))

        def compile_all() -> float:
            with tempfile.TemporaryDirectory() as fresh:
                started = time.perf_counter()
                compile_chunks(model, Store(Path(fresh)), prompt.chunks)
                return time.perf_counter() - started

        def link(policy: Policy) -> float:
            return run_linked(model, prompt, policy, 0).ttft_s

        runs = {COMPILE: compile_all} | {each.label: partial(link, each.policy) for each in policies}
        print(json.dumps({"root": str(Path(pictool.__file__).parents[1]), "runs": list(runs)}), flush=True)
        for line in sys.stdin:
            print(runs[line.strip()](), flush=True)


# The measuring process: imports nothing of pictool before the other one is done


class Side:
    """A process that measures the pictool of one checkout."""

    def __init__(self, checkout: Path, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__)), "--serve", *arguments],
            env={**os.environ, "PYTHONPATH": str(checkout)}, cwd=checkout,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._checkout = checkout

    def runs(self) -> list[str]:
        """The names of what can be run, once the model and its objects are there."""
        ready = json.loads(self._answer())
        assert Path(ready["root"]).samefile(self._checkout), f"{ready['root']} was imported, not {self._checkout}"
        return list(ready["runs"])

    def run(self, name: str) -> float:
        """Seconds of one run."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._checkout}: its process ended with exit code {self._process.wait()}")
        return line


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A checkout of a revision, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "revision"
        git("worktree", "add", "--detach", str(path), revision)
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def compare(this: Side, other: Side, repeats: int) -> dict[str, Any]:
    """Seconds of every run by either, and their ratios."""
    names, known = this.runs(), other.runs()
    assert names == known, f"{names} here, {known} there"
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for repeat in range(repeats + 1):
        for name in names:
            sides = ((this, 0), (other, 1))
            for side, at in sides if repeat % 2 else reversed(sides):
                took = side.run(name)
                if repeat:  # the first is a warm-up
                    seconds[name][at].append(took)
    return {name: summary(*both) for name, both in seconds.items()}


def summary(this: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Raw seconds, medians, and the median of the repeats' ratios."""
    from statistics import median

    return {
        "this_s": list(this), "other_s": list(other), "median_this_s": median(this), "median_other_s": median(other),
        "ratio": median(a / b for a, b in zip(this, other, strict=True)),
    }  # fmt: skip


def print_ratios(results: Mapping[str, Any]) -> None:
    print(f"{'run':<16} {'this s':>8} {'other s':>8} {'ratio':>7}")
    for name, result in results.items():
        medians = f"{result['median_this_s']:>8.3f} {result['median_other_s']:>8.3f}"
        print(f"{name:<16} {medians} {result['ratio']:>7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="a commit, branch or tag of this repository")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--algo", nargs="+", default=list(ALGOS))
    passed_on = {
        "--shape": "qwen2.5-0.5b",
        "--threads": "2",
        "--chunks": "8",
        "--chunk-tokens": "512",
        "--tail-tokens": "32",
    }
    for name, default in passed_on.items():
        parser.add_argument(name, default=default)
    options = parser.parse_args()
    if options.serve:
        prompt = PromptSize(int(options.chunks), int(options.chunk_tokens), int(options.tail_tokens))
        serve(options.shape, int(options.threads), prompt, options.algo)
        return
    if options.revision is None:
        parser.error("which revision?")
    passed = [word for name in passed_on for word in (name, vars(options)[name[2:].replace("-", "_")])]
    with worktree(options.revision) as path:
        this, other = (Side(checkout, [*passed, "--algo", *options.algo]) for checkout in (CHECKOUT, path))
        try:
            results = compare(this, other, options.repeats)
        finally:
            this.close()
            other.close()
    from benchmarks.output import write_results

    head = git("rev-parse", "HEAD") + (" and changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    revisions = {"this": head, "other": git("rev-parse", options.revision)}
    write_results(options.out / "against.json", {"revisions": revisions, "runs": results})
    print_ratios(results)


if __name__ == "__main__":
    main()

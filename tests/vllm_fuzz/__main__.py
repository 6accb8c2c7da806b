"""The fuzzer of a running server: requests of several clients at once, while its store has faults.

    python -m vllm_fuzz --requests 5000 --seed 1          `make fuzz-vllm REQUESTS=5000 SEED=1`
    python -m vllm_fuzz --seed 1 --case 123               one request again, alone, without faults

A request is a pure function of seed and number. What must hold (issue 15): the engine lives; every answer is that of its
exact or of its linked reference; no request hangs, those of an ordinary client among them; no response has a salt, key or
path that its client did not name; after the faults, all is linked again. Exit code 1 if anything failed; what failed is
kept below `--keep`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import vllm_rig as rig
from faults.shim import PLAN_VARIABLE, SharedPlan, build, compiler, environment
from hostile.fuzz import SCRATCH
from vllm_server import log_of, server

from vllm_fuzz.clients import Client, Clients, Exchange, Ordinary
from vllm_fuzz.judge import Judge, Verdict, require_apart
from vllm_fuzz.requests import Requests
from vllm_fuzz.scene import Scene, make_scene
from vllm_fuzz.storm import Storm

EXTRA = {
    "recognise": True, "policy": "legolink-4", "min_tokens": 8, "refresh_s": 1, "compile": True, "memory_bytes": 1 << 20,
}  # fmt: skip
OPTIONS = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "80", "--max-num-batched-tokens", "256")
HANG_S = 60.0  # of a request on a machine that does other things; a quiet one is measured
RECOVERY_S = 60.0


def fuzz(directory: Path, requests: int, seed: int, clients: int, case: int | None, keep: Path) -> dict[str, Any]:
    """Run requests against a server; what became of them, by kind, and what failed."""
    scene, started = make_scene(directory, seed), time.monotonic()
    require_apart(scene)
    numbers = range(requests) if case is None else [case]
    made, judge = Requests(scene, seed), Judge(scene)
    with ExitStack() as stack:
        plan, variables = None, {}
        if compiler() is not None:
            plan = SharedPlan(directory / "plan")
            variables = {**environment(build(directory)), PLAN_VARIABLE: str(directory / "plan")}
        url = stack.enter_context(server(scene.world, EXTRA, *OPTIONS, variables=variables))
        storm = Storm(scene.world.store, scene.unspoilt, plan, seed)
        ordinary, asking = Ordinary(url, seed), Clients(url, made, clients)
        first = ordinary.ask(0)  # vLLM makes much only for its first request
        serving_s = time.monotonic()
        if case is None:
            storm.start()
            ordinary.start()
        exchanges = asking.run(numbers)
        if case is None:
            ordinary.stop()
            storm.stop()
        serving_s = time.monotonic() - serving_s
        problems = [*asking.problems, *recovery_problems(url, scene, judge)]
    verdicts = [judge.judge(exchange.asked, exchange.response) for exchange in [*exchanges, *ordinary.exchanges]]
    failed = [(exchange, verdict) for exchange, verdict in zip(exchanges, verdicts, strict=False) if verdict.problem]
    problems += [f"ordinary: {verdict.problem}" for verdict in verdicts[len(exchanges) :] if verdict.problem]
    problems += [f"{path}: {why}" for path, why in damaged(scene)]
    slowest = max((exchange.response.seconds for exchange in [*exchanges, *ordinary.exchanges]), default=0.0)
    problems += [f"a request took {slowest:.1f} s"] if slowest > HANG_S else []
    for exchange, verdict in failed:
        save(exchange, verdict, keep)
    return {
        "requests": len(exchanges), "seed": seed, "failed": len(failed), "problems": problems,
        "verdicts": dict(Counter(verdict.kind for verdict in verdicts).most_common()),
        "asked": dict(Counter(exchange.asked.what.split(" (")[0] for exchange in exchanges).most_common()),
        "faults": dict(storm.counts.most_common()), "ordinary": ordinary.summary(),
        "seconds": {"serving": round(serving_s, 1), "all": round(time.monotonic() - started, 1),
                    "first": round(first.response.seconds, 3), "slowest": round(slowest, 3)},
        "unexpected": dict(unexpected(log_of(scene.world).read_text(errors="replace"))),
    }  # fmt: skip


def recovery_problems(url: str, scene: Scene, judge: Judge) -> list[str]:
    """Once the store is whole again, all documents of all prompts must be linked, by name and unsaid."""
    client, until = Client(url), time.monotonic() + RECOVERY_S
    waiting = [(prompt, named) for prompt in scene.prompts if prompt.places for named in (True, False)]
    answers: list[Any] = []
    while waiting and time.monotonic() < until:
        answers = [(prompt, named, client.ask_whole(scene, prompt, named)) for prompt, named in waiting]
        waiting = [(prompt, named) for prompt, named, whole in answers if whole.problem is not None]
        time.sleep(0.5 if waiting else 0)
    return [f"not linked again: {whole.problem}" for _, _, whole in answers if whole.problem is not None][:3]


def damaged(scene: Scene) -> list[tuple[str, str]]:
    """Objects that are not whole, once all faults are mended: requests may have compiled some."""
    found = []
    for key in scene.world.store.keys():
        try:
            with scene.world.store.peek_local(key) as file:
                file.verify()
        except Exception as error:
            found.append((key[:12], str(error)))
    return found


def unexpected(log: str) -> Counter[str]:
    """The exceptions of which the connector warns with a traceback, by their last line."""
    found: Counter[str] = Counter()
    for part in log.split("pic: unexpected")[1:]:
        last = next(
            (line for line in part.splitlines() if re.search(r"\] \w*(Error|Exception)\b|^\w+Error", line)), "?"
        )
        found[last.rpartition("] ")[2][:160]] += 1
    return found


def save(exchange: Exchange, verdict: Verdict, keep: Path) -> None:
    """Keep what was asked and answered."""
    keep.mkdir(parents=True, exist_ok=True)
    (keep / f"{exchange.number}.json").write_text(
        json.dumps({"verdict": asdict(verdict), "asked": asdict(exchange.asked), "response": asdict(exchange.response)})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6, help="that send at once")
    parser.add_argument("--case", type=int, help="only this request, without faults")
    parser.add_argument("--keep", type=Path, default=Path(".fuzz-vllm"))
    options = parser.parse_args()
    rig.small_environment()
    torch.set_num_threads(1)  # of the references: several are slower
    with tempfile.TemporaryDirectory(prefix="vllm-fuzz-", dir=SCRATCH) as directory:
        root = Path(directory).resolve()
        keep = options.keep.absolute()
        report = fuzz(root, options.requests, options.seed, options.clients, options.case, keep)
        if report["failed"] or report["problems"]:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / "server.log").write_bytes((root / "server.log").read_bytes())
    print(json.dumps(report, indent=1))
    for path in sorted(keep.glob("*.json")) if report["failed"] else []:
        print(f"{path}: again: make fuzz-vllm SEED={options.seed} CASE={path.stem}", file=sys.stderr)
    raise SystemExit(bool(report["failed"] or report["problems"]))


if __name__ == "__main__":
    main()

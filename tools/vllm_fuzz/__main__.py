"""The fuzzer of a running server: requests of several clients at once, while its store has faults.

    python -m vllm_fuzz --requests 5000 --seed 1          `make fuzz-vllm REQUESTS=5000 SEED=1`
    python -m vllm_fuzz --seed 1 --case 123               one request again, alone, without faults

A request is a pure function of seed and number, and so are the server's options. What must hold (issue 15):

- the engine lives, and no request hangs, those of an ordinary client among them;
- every answer is that of its exact or of its linked reference;
- no response has a salt, key or path that its client did not name;
- after the faults everything is linked again, and every object is whole.

Exit code 1 if anything failed; what failed is kept below `--keep`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import vllm_rig as rig
from faults.shim import PLAN_VARIABLE, SharedPlan, build, compiler, environment
from hostile.fuzz import SCRATCH
from vllm_server import log_of, server

from pictool.errors import PicError
from vllm_fuzz.clients import Client, Clients, Exchange, Ordinary
from vllm_fuzz.judge import Judge, Verdict, require_apart
from vllm_fuzz.requests import Requests
from vllm_fuzz.scene import Scene, make_scene
from vllm_fuzz.storm import Storm

HANG_S = 240.0  # of a request, on a machine that has other work; what it takes on a quiet one is in the report
RECOVERY_S = 120.0


def extra_of(seed: int) -> dict[str, Any]:
    """The connector's fields of a server."""
    draw = random.Random(f"fields {seed}")
    return {
        "recognise": True, "policy": "legolink-4", "min_tokens": 8, "refresh_s": 1, "compile": True,
        "memory_bytes": draw.choice((0, 1 << 18, 1 << 24)), "step_bytes": draw.choice((1 << 12, 1 << 25)),
        "step_rows": draw.choice((0, 7)),
    }  # fmt: skip


def options_of(seed: int) -> list[str]:
    """vLLM's options of a server. It has so few blocks that requests are preempted."""
    draw = random.Random(f"options {seed}")
    return [
        "--max-num-seqs", "8", "--num-gpu-blocks-override", "80",
        "--max-num-batched-tokens", draw.choice(("64", "256")),
        draw.choice(("--enable-prefix-caching", "--no-enable-prefix-caching")),
    ]  # fmt: skip


@dataclass(frozen=True)
class Served:
    """What a server answered, to the fuzzer's requests and to the ordinary client."""

    exchanges: list[Exchange]
    ordinary: Ordinary
    first: Exchange  # for which vLLM makes what it makes once
    faults: Counter[str]
    problems: list[str]
    seconds: float
    unexpected: Counter[str]


def serve(scene: Scene, options: argparse.Namespace) -> Served:
    """Send requests to a server, with faults meanwhile unless it is a single one."""
    is_whole_run = options.case is None
    numbers = range(options.requests) if is_whole_run else [options.case]
    plan, variables = armed(scene.world.directory.parent)
    with server(scene.world, extra_of(options.seed), *options_of(options.seed), variables=variables) as url:
        storm = Storm(scene.world.store, scene.unspoilt, plan, options.seed)
        ordinary, clients = Ordinary(url, options.seed), Clients(url, Requests(scene, options.seed), options.clients)
        first, started = ordinary.ask(0), time.monotonic()
        for thread in (storm, ordinary) if is_whole_run else ():
            thread.start()
        exchanges = clients.run(numbers)
        for thread in (ordinary, storm) if is_whole_run else ():
            thread.stop()
        seconds = time.monotonic() - started
        problems = [*clients.problems, *recovery_problems(url, scene)]
    log = log_of(scene.world).read_text(errors="replace")
    return Served(exchanges, ordinary, first, storm.counts, problems, seconds, unexpected(log))


def armed(directory: Path) -> tuple[SharedPlan | None, dict[str, str]]:
    """The plan of system calls that fail, and the environment of processes that follow it; none without a compiler."""
    if compiler() is None:
        return None, {}
    plan = SharedPlan(directory / "plan")
    return plan, {**environment(build(directory)), PLAN_VARIABLE: str(directory / "plan")}


def fuzz(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run requests against a server; what became of them, by kind, and what failed."""
    started, scene = time.monotonic(), make_scene(directory, options.seed)
    require_apart(scene)
    judge, served = Judge(scene), serve(scene, options)
    verdicts = [judge.judge(exchange.asked, exchange.response) for exchange in served.exchanges]
    ordinary = [judge.judge(exchange.asked, exchange.response) for exchange in served.ordinary.exchanges]
    failed = [pair for pair in zip(served.exchanges, verdicts, strict=True) if pair[1].problem is not None]
    for exchange, verdict in failed:
        save(exchange, verdict, options.keep)
    slowest = max(exchange.response.seconds for exchange in [*served.exchanges, *served.ordinary.exchanges])
    problems = [*served.problems, *(f"ordinary: {verdict.problem}" for verdict in ordinary if verdict.problem)]
    problems += damaged(scene) + [f"a request took {slowest:.1f} s"] * (slowest > HANG_S)
    return {
        "requests": len(served.exchanges), "failed": len(failed), "problems": problems, "seed": options.seed,
        "server": [extra_of(options.seed), options_of(options.seed)],
        "verdicts": dict(Counter(verdict.kind for verdict in verdicts).most_common()),
        "asked": dict(Counter(exchange.asked.what.split(" (")[0] for exchange in served.exchanges).most_common()),
        "faults": dict(served.faults.most_common()), "unexpected": dict(served.unexpected.most_common()),
        "ordinary": served.ordinary.summary(),
        "seconds": {"serving": round(served.seconds, 1), "all": round(time.monotonic() - started, 1),
                    "first": round(served.first.response.seconds, 3), "slowest": round(slowest, 3)},
    }  # fmt: skip


def recovery_problems(url: str, scene: Scene) -> list[str]:
    """Once the store is whole again, all documents of all prompts must be linked, by name and unsaid."""
    client, until = Client(url), time.monotonic() + RECOVERY_S
    waiting = [(prompt, named) for prompt in scene.prompts if prompt.places for named in (True, False)]
    answers: list[Any] = []
    while waiting and time.monotonic() < until:
        answers = [(prompt, named, client.ask_whole(scene, prompt, named)) for prompt, named in waiting]
        waiting = [(prompt, named) for prompt, named, whole in answers if whole.problem is not None]
        time.sleep(0.5 if waiting else 0)
    return [f"not linked again: {whole.problem}" for _, _, whole in answers if whole.problem is not None][:3]


def damaged(scene: Scene) -> list[str]:
    """Objects that are not whole, once all faults are mended: requests may have compiled some."""
    found = []
    for key in scene.world.store.keys():
        try:
            with scene.world.store.peek_local(key) as file:
                file.verify()
        except PicError as error:
            found.append(str(error))
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
        report = fuzz(root, options)
        if report["failed"] or report["problems"]:
            options.keep.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / "server.log", options.keep / "server.log")
    print(json.dumps(report, indent=1))
    for path in sorted(options.keep.glob("*.json")) if report["failed"] else []:
        print(f"{path}: again: make fuzz-vllm SEED={options.seed} CASE={path.stem}", file=sys.stderr)
    raise SystemExit(bool(report["failed"] or report["problems"]))


if __name__ == "__main__":
    main()

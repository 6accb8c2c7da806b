"""An agent's loop against `pic serve` over HTTP: tokens reused, and whether `pic estimate` reads the same.

    OMP_NUM_THREADS=1 python -m benchmarks.agent_loop --out benchmarks/results/agent_loop.json

A system text that all conversations share, then turns: the answer as it came, and a tool's output. Conversations take
turns. `reused` is what the responses say (`pic.prefix_tokens`), `counted` what `/metrics` counts, and `estimated` what
`pic estimate` finds in the requests, which hold no answers: those come back with the next request, and
the server has them. `possible` is what an exact prefix cache without limits has: the request before and its answer.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.conversations import make_parser
from benchmarks.output import write_results
from pictool.runtime.model import load_model
from training.world.generate import filler, write_prompt

ANSWER = 16  # tokens at most
_ADDRESS = re.compile(r"on (http://\S+)/v1")
_PREFIX = re.compile(r'^pic_tokens_total\{kind="prefix"\} (\S+)$', re.MULTILINE)


def start_server(model: str, *options: str, python: str = sys.executable) -> tuple[subprocess.Popen[str], str]:
    """A server's process, and its address. What the server says later is read, so that it never waits for us."""
    command = [python, "-m", "pictool", "serve", "-m", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = next(found for line in process.stderr if (found := _ADDRESS.search(line)))
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process, address[1]


@contextmanager
def serving(model: str, *options: str, python: str = sys.executable) -> Iterator[httpx.Client]:
    """A client of a server with these options."""
    process, address = start_server(model, *options, python=python)
    try:
        with httpx.Client(base_url=address, timeout=900) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def make_system(draw: random.Random) -> str:
    """The system text that conversations share."""
    return " ".join(filler(draw) for _ in range(20))


def converse(client: httpx.Client, model: str, conversations: int, turns: int, log: Path) -> dict[str, Any]:
    """The loop, whose requests are logged as a gateway would; what its responses say."""
    draw = random.Random(conversations)
    system = make_system(draw)
    talks = [[{"role": "system", "content": system}] for _ in range(conversations)]
    last = [len(load_model(model).encode(system))] * conversations  # what a cache without limits has
    last[0] = 0
    sums = dict.fromkeys(("requests", "prompt_tokens", "possible", "reused", "answers"), 0)
    for turn in range(turns):
        for number, talk in enumerate(talks):
            output = write_prompt(draw, 2).pages[0].strip() + f"\n\nWhat comes next in step {turn}?"
            talk.append({"role": "user", "content": output})
            body = {"model": client.get("/v1/models").json()["data"][0]["id"], "messages": talk, "temperature": 0}
            with log.open("a") as file:
                file.write(json.dumps(body) + "\n")
            response = client.post("/v1/chat/completions", json=body | {"max_tokens": ANSWER}).raise_for_status().json()
            usage = response["usage"]
            talk.append({"role": "assistant", "content": response["choices"][0]["message"]["content"]})
            sums["requests"] += 1
            sums["prompt_tokens"] += usage["prompt_tokens"]
            sums["reused"] += response["pic"]["prefix_tokens"]
            sums["possible"] += last[number]
            sums["answers"] += usage["completion_tokens"] if turn < turns - 1 else 0
            last[number] = usage["prompt_tokens"] + usage["completion_tokens"]
    return sums


def measure(model: str, conversations: int, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        log = Path(root) / "requests.jsonl"
        with serving(model, "--store", f"{root}/store") as client:
            sums = converse(client, model, conversations, turns, log)
            counted = _PREFIX.search(client.get("/metrics").text)
            assert counted is not None
        command = [sys.executable, "-m", "pictool", "estimate", str(log), "--json"]
        estimated = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    prefix = round(estimated["tokens"]["prefix"])
    return {
        "conversations": conversations, **sums, "share": sums["reused"] / sums["possible"],
        "counted": int(float(counted[1])), "estimated": prefix, "estimate_prompt_tokens": estimated["tokens"]["total"],
    }  # fmt: skip


def main() -> None:
    options = make_parser(__doc__, turns=8).parse_args()
    rows = []
    for number in map(int, options.conversations.split(",")):
        rows.append(measure(options.model, number, options.turns))
        print(rows[-1], flush=True)
    if options.out is not None:
        write_results(options.out, {"model": options.model, "rows": rows})


if __name__ == "__main__":
    main()

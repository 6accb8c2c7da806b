"""An agent's loop against `pic serve` over a GGUF file: tokens reused, with the server killed (-9) and started again.

    OMP_NUM_THREADS=2 python -m benchmarks.agent_restarts -m smollm2 --out benchmarks/results/agent_restarts.json

The loop is that of `agent_loop.py`. Each request is answered by two servers: one that keeps prefixes, in memory and on
disk, and one that keeps nothing (`--pool 0`), as a fresh server would. `different` counts answers of the one that are
not those of the other; `gaps` are the nats between the fresh server's two likeliest tokens where they part.
`possible` is what an exact prefix cache without limits has: the request before and its answer, or the system text.
The kills are between two requests, and within one, whose client asks again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.agent_loop import ANSWER, make_system, start_server
from benchmarks.output import write_results
from pictool.engines.llamacpp.model import open_gguf
from training.world.generate import write_prompt

DISK = "4G"  # of prefixes


class Served:
    """A server's process, that can be killed and started again on its store."""

    def __init__(self, model: str, *options: str) -> None:
        self._arguments = (model, "--check", "off", *options)
        self.start()

    def start(self) -> None:
        self.process, address = start_server(*self._arguments)
        self.client = httpx.Client(base_url=address, timeout=900)
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, messages: Sequence[Any]) -> Any:
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": ANSWER}
        body |= {"logprobs": True, "top_logprobs": 2}
        return self.client.post("/v1/chat/completions", json=body).raise_for_status().json()

    def kill_within(self, messages: Sequence[Any], seconds: float) -> None:
        """Send a request, and kill the server while it is answered."""

        def ask() -> None:
            with suppress(httpx.HTTPError):
                self.ask(messages)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(seconds)
        self.kill()
        asking.join()


def gap(ours: Any, fresh: Any) -> float | None:
    """How far the fresh answer's two likeliest tokens are apart where ours has another token; None: nowhere."""
    ours, fresh = (answer["choices"][0]["logprobs"]["content"] for answer in (ours, fresh))
    for mine, other in zip(ours, fresh, strict=False):
        if mine["token"] != other["token"]:
            first, second = (each["logprob"] for each in other["top_logprobs"])
            return float(first - second)
    return None


def converse(ours: Served, fresh: Served, model: str, conversations: int, turns: int, kills: int) -> dict[str, Any]:
    """The loop; `kills` of its requests come after a server that was killed, before them or within them."""
    draw = random.Random(conversations)
    system = make_system(draw)
    talks = [[{"role": "system", "content": system}] for _ in range(conversations)]
    requests = [(turn, number) for turn in range(turns) for number in range(conversations)]
    killed = set(draw.sample(requests[1:], kills))
    sums = dict.fromkeys(("requests", "kills", "prompt_tokens", "possible", "reused"), 0)
    last = [len(open_gguf(model, "cpu").encode(system))] * conversations
    last[0], gaps, seconds = 0, list[float | None](), {"ours": 0.0, "fresh": 0.0}
    for turn, number in requests:
        talk = talks[number]
        output = write_prompt(draw, 2).pages[0].strip() + f"\n\nWhat comes next in step {turn}?"
        talk.append({"role": "user", "content": output})
        if (turn, number) in killed:
            sums["kills"] += 1
            if sums["kills"] % 2:
                ours.kill_within(talk, draw.uniform(0.05, 1.0))
            else:
                ours.kill()
            ours.start()
        answers = list[Any]()
        for name, server in (("ours", ours), ("fresh", fresh)):
            started = time.perf_counter()
            answers.append(server.ask(talk))
            seconds[name] += time.perf_counter() - started
        usage, texts = answers[0]["usage"], [answer["choices"][0]["message"]["content"] for answer in answers]
        if texts[0] != texts[1]:
            gaps.append(gap(*answers))
        talk.append({"role": "assistant", "content": texts[0]})
        sums["requests"] += 1
        sums["prompt_tokens"] += usage["prompt_tokens"]
        sums["reused"] += answers[0]["pic"]["prefix_tokens"]
        sums["possible"] += last[number]
        last[number] = usage["prompt_tokens"] + usage["completion_tokens"]
    share = sums["reused"] / sums["possible"]
    return {**sums, "share": share, "different": len(gaps), "gaps": gaps, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", dest="model", required=True, help="a GGUF file, or smollm2")
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--conversations", default="1,8")
    parser.add_argument("--kills", type=int, default=4)
    options = parser.parse_args()
    rows = []
    for number in map(int, options.conversations.split(",")):
        for kills in (0, options.kills):
            with tempfile.TemporaryDirectory() as root:
                ours = Served(options.model, "--store", f"{root}/store", "--keep-prefixes", DISK)
                fresh = Served(options.model, "--store", f"{root}/fresh", "--pool", "0")
                try:
                    found = converse(ours, fresh, options.model, number, options.turns, kills)
                finally:
                    ours.kill()
                    fresh.kill()
            rows.append({"conversations": number, **found})
            print(rows[-1], flush=True)
    if options.out is not None:
        write_results(options.out, {"model": options.model, "engine": "llamacpp", "rows": rows})


if __name__ == "__main__":
    main()

"""What `pic serve --learn` costs requests in which nothing repeats: TTFT with and without it.

    OMP_NUM_THREADS=1 python -m benchmarks.learning_costs --out benchmarks/results/learning_costs.json

Two servers of one model, with stores of their own, have the same requests in turn, one that learns (2 GB)
and one that does not. A request is a text of this repository's documentation that no other request has, and a
question; the next one comes after a pause, drawn with the mean `--pause`, or at once (0). Before a server's turn the
other one has nothing to do. So what a request of the learning server finds is the compiling of those before it.
`learning`: the requests while it compiled new texts; `later`: those after an eighth of its bytes were never used, when
it compiles what repeats and nothing else. `ratio` is the median over pairs of requests, of wall and of CPU seconds: the
latter are of this process, so that what else the machine does matters less; to the first text they have what was
compiled meanwhile. `same` has two servers that do not learn: by so much pairs differ anyway.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import httpx

from benchmarks.output import write_results
from pictool.linker.grid import parse_policy
from pictool.runtime.model import Model, load_model
from pictool.serve.app import make_app
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.running import Server
from pictool.serve.service import Service
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store

LEARNED_BYTES = 2_000_000_000
DOCS = Path(__file__).parent.parent / "docs"
QUESTION = "\n\nWhat is this about?"
Pair = tuple[tuple[float, float], tuple[float, float], bool]  # wall, CPU seconds without, with; is learning


@contextmanager
def serving(model: Model, learned_bytes: int) -> Iterator[tuple[TorchBackend, httpx.Client]]:
    """A server in a thread, and its client."""
    with tempfile.TemporaryDirectory() as root, socket() as listener:
        settings = BackendSettings(parse_policy("auto"), learned_bytes=learned_bytes, pool_bytes=None)
        backend = TorchBackend(model, Store(root), settings)
        listener.bind(("127.0.0.1", 0))
        server = Server(make_app(Service(backend, Path(root), Keys(default=Tenant("default"))), "benchmark"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=600) as client:
            yield backend, client
        server.should_exit = True
        thread.join()
        backend.close()


def texts(model: Model, tokens: int, draw: random.Random) -> Iterator[str]:
    """Texts of at least so many tokens, each of paragraphs that no other has."""
    pages = (path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    paragraphs = list(dict.fromkeys(part for page in pages for part in re.split(r"\n\n+", page) if len(part) > 100))
    draw.shuffle(paragraphs)
    kept, count = list[str](), 0
    for paragraph in paragraphs:
        kept.append(paragraph)
        count += len(model.encode(paragraph))
        if count >= tokens:
            yield "\n\n".join(kept)
            kept, count = [], 0


def ttft(client: httpx.Client, backend: TorchBackend, text: str) -> tuple[float, float]:
    """Wall and CPU seconds of this process to the first text of an answer."""
    body = {
        "model": backend.model, "max_tokens": 4, "temperature": 0, "stream": True,
        "messages": [{"role": "user", "content": text + QUESTION}],
    }  # fmt: skip
    started, cpu, first = time.perf_counter(), time.process_time(), (0.0, 0.0)
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            choice = json.loads(line[6:])["choices"][0] if line.startswith("data: {") else {}
            if choice and (choice["delta"].get("content") or choice["finish_reason"]):  # an answer may be empty
                first = first if any(first) else (time.perf_counter() - started, time.process_time() - cpu)
    return first


def has_ended(backend: TorchBackend) -> None:
    """Wait until nothing is compiled any more."""
    while backend._finding or backend._is_learning or backend.status().active:
        time.sleep(0.02)


def summary(pairs: list[Pair]) -> dict[str, Any]:
    row: dict[str, Any] = {"requests": len(pairs)}
    for index, name in enumerate(("wall", "cpu")):
        off, on = [pair[0][index] for pair in pairs], [pair[1][index] for pair in pairs]
        row |= {f"{name}_off_s": statistics.median(off), f"{name}_on_s": statistics.median(on)}
        row[f"{name}_ratio"] = statistics.median(b / a for a, b in zip(off, on, strict=True))
    return row


def measure(model: Model, arguments: argparse.Namespace, pause_s: float, learned_bytes: int) -> dict[str, Any]:
    """Pairs of requests: blocks of one server and of the other, which begins in turn."""
    draw, pairs = random.Random(arguments.seed), list[Pair]()
    found = texts(model, arguments.tokens, draw)
    with ExitStack() as servers:
        sides = [servers.enter_context(serving(model, size)) for size in (0, learned_bytes)]
        for backend, client in sides:
            ttft(client, backend, "Hello.")  # warm
        end, turn = time.monotonic() + arguments.minutes * 60, 0
        while time.monotonic() < end:
            block = [text for _, text in zip(range(arguments.block), found, strict=False)]
            if len(block) < arguments.block:
                break
            pauses = [draw.expovariate(1 / pause_s) if pause_s else 0.0 for _ in block]
            times: dict[int, list[tuple[tuple[float, float], int]]] = {}
            for side in (turn % 2, 1 - turn % 2):
                backend, client = sides[side]
                times[side] = []
                for text, pause in zip(block, pauses, strict=True):
                    seconds = ttft(client, backend, text)
                    times[side].append((seconds, backend.status().learned_bytes))
                    time.sleep(pause)
                has_ended(backend)
            turn += 1
            pairs += [(a, b, 8 * size < learned_bytes) for (a, _), (b, size) in zip(times[0], times[1], strict=True)]
        learned = sides[1][0].status().learned_bytes
    parts = {"all": pairs, "learning": [pair for pair in pairs if pair[2]], "later": [p for p in pairs if not p[2]]}
    row = {"pause_s": pause_s, "learned_bytes": learned}
    return row | {name: summary(part) for name, part in parts.items() if part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="embedded")
    parser.add_argument("--tokens", type=int, default=300, help="least tokens of a text")
    parser.add_argument("--pause", default="0,1", help="mean seconds between an answer and the next request")
    parser.add_argument("--block", type=int, default=6, help="requests of one server's turn")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each row")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    _ = model.stack
    rows = dict[str, Any]()
    for pause in map(float, arguments.pause.split(",")):
        for name, size in (("learn", LEARNED_BYTES), ("same", 0)):
            rows[f"{name}, pause {pause:g} s"] = row = measure(model, arguments, pause, size)
            print(name, json.dumps(row), flush=True)
    if arguments.out is not None:
        settings = {name: getattr(arguments, name) for name in ("tokens", "block", "minutes", "seed")}
        write_results(arguments.out, {"model": Path(arguments.model).name, **settings, "rows": rows})


if __name__ == "__main__":
    main()

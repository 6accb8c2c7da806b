"""A mixed load on one `pic serve` for minutes or hours: `make soak MINUTES=60`.

    python -m benchmarks.soak --minutes 10 --out benchmarks/results/soak.json --plot docs/images/soak.svg

Two tenants in five dialects: exact answers, conversations, documents as leases, texts that the server learns, others
that come once (so that the store evicts), foreign leases, nonsense, and clients that vanish. Beside it run
`pic compile` (half of them killed), `pic store gc` and `pic estimate` on the server's own log. Answers of conversations
are compared with `transformers`, others with those of full recompute before the load, which have to be the same under
every policy. Memory, descriptors, threads, disk and latency are sampled. This server has no workers that could be
killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import transformers

from benchmarks.exact_conversations import ANSWER, exact
from benchmarks.output import write_results
from pictool.core import PromptText
from pictool.runtime.model import load_model
from training.world.generate import WorldPrompt, question_text, write_prompt

MODEL = "embedded"
KEYS = {"a": "key-of-tenant-a-0001", "b": "key-of-tenant-b-0002"}
LIMITS = {"PIC_MAX_SIZE": "24M", "PIC_MEMORY": "8M"}
OPTIONS = ("--pool", "48M", "--keep-prefixes", "8M", "--learn", "4M", "--active", "4")
WEIGHTS = {
    "exact": 30,
    "turns": 15,
    "leased": 20,
    "learned": 10,
    "fresh": 10,
    "vanishes": 8,
    "foreign": 3,
    "nonsense": 4,
}
PATHS = {
    "completions": "/v1/completions", "chat": "/v1/chat/completions", "messages": "/v1/messages",
    "responses": "/v1/responses", "gemini": f"/v1beta/models/{MODEL}:generateContent",
}  # fmt: skip


@dataclass
class Load:
    """What the clients share: what is asked, what is right, and what came of it."""

    client: httpx.AsyncClient
    draw: random.Random
    turns: list[list[tuple[str, str]]]  # conversations: prompts, and the exact answer of each
    chats: list[tuple[str, str]] = field(default_factory=list)  # texts of one message, and its exact answer
    leased: list[tuple[tuple[str, ...], str, str]] = field(default_factory=list)  # pages, question, answer
    ends: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)  # when, and seconds

    async def ask(self, dialect: str, text: str, tenant: str, policy: str | None = "full", **more: Any) -> str:
        """The answer to a text in a dialect."""
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": ANSWER} | more
        messages = [{"role": "user", "content": text}]
        if dialect == "completions":
            body["prompt"] = text
        elif dialect == "responses":
            body |= {"input": text, "max_output_tokens": body.pop("max_tokens"), "store": False}
        elif dialect == "gemini":
            body = {
                "contents": [{"role": "user", "parts": [{"text": text}]}],
                "generationConfig": {"temperature": 0, "maxOutputTokens": ANSWER},
            }  # fmt: skip
        else:
            body["messages"] = messages
        headers = self.headers(tenant) | ({} if policy is None else {"X-Pic-Policy": policy})
        started = time.monotonic()
        response = await self.client.post(PATHS[dialect], json=body, headers=headers)
        self.latencies.append((time.monotonic(), time.monotonic() - started))
        assert response.status_code == 200, f"{dialect}: {response.status_code} {response.text[:200]}"
        return text_of(dialect, response.json())

    def headers(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEYS[tenant]}"}

    async def lease(self, pages: tuple[str, ...], tenant: str, ttl: int) -> list[str]:
        """The ids of new caches, unless the tenant's share is full."""
        names = []
        for page in pages:
            body = {"model": MODEL, "text": page, "ttl": ttl}
            response = await self.client.post("/v1/caches", json=body, headers=self.headers(tenant))
            if response.status_code == 429:
                self.outcomes["no room for a lease"] += 1
                return []
            assert response.status_code == 200, response.text[:200]
            names.append(response.json()["id"])
        return names

    def judge(self, kind: str, got: str, want: str) -> None:
        """Count an answer."""
        self.outcomes[kind if got == want else f"{kind}, wrong"] += 1
        if got != want:
            self.wrong.append(f"{kind}: {got!r} and not {want!r}")


def text_of(dialect: str, answer: dict[str, Any]) -> str:
    """The text of an answer."""
    if dialect in ("completions", "chat"):
        choice = answer["choices"][0]
        return str(choice["text"] if dialect == "completions" else choice["message"]["content"])
    if dialect == "messages":
        return "".join(block.get("text", "") for block in answer["content"])
    if dialect == "responses":
        return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))
    return "".join(part.get("text", "") for part in answer["candidates"][0]["content"]["parts"])


def conversations(count: int, draw: random.Random) -> list[list[tuple[str, str]]]:
    """Conversations of three turns with the answers of `transformers`, each prompt beginning with the one before."""
    model = load_model(MODEL, "cpu", "float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval()
    talks = []
    for _ in range(count):
        prompt, text, talk = write_prompt(draw, 3), "", []
        text = "".join(prompt.pages)
        for question in prompt.questions[:3]:
            text += question_text(question.text)
            bos = model.tokenizer.bos_token or ""
            answer = exact(model, reference, list(model.encode(PromptText(bos + text))))
            talk.append((text, answer))
            text += answer
        talks.append(talk)
    return talks


async def prepare(load: Load, count: int) -> None:
    """Choose chats, and documents whose answer is the same under every policy, however much of them is reused."""
    while len(load.chats) < count:
        text = whole(write_prompt(load.draw, 4))
        load.chats.append((text, await load.ask("chat", text, "a")))
    while len(load.leased) < count:
        prompt = write_prompt(load.draw, 4)
        pages, question = tuple(prompt.pages), load.draw.choice(prompt.questions).text
        names = await load.lease(pages, "a", 60)
        answers = {
            await load.ask("chat", question, "a", policy, cache_ids=names)
            for policy in ("full", "naive", "legolink-16") if names
        }  # fmt: skip
        if len(answers) == 1:
            load.leased.append((pages, question, answers.pop()))


def whole(prompt: WorldPrompt) -> str:
    return "".join(prompt.pages) + "\n\n" + prompt.questions[0].text


async def run_client(load: Load) -> None:
    """One client: requests of all kinds, one after another."""
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while time.monotonic() < load.ends:
        kind, tenant = load.draw.choices(kinds, weights)[0], load.draw.choice("ab")
        try:
            await request(load, kind, tenant)
        except (AssertionError, httpx.HTTPError, KeyError) as error:
            load.outcomes[f"{kind}, failed"] += 1
            load.wrong.append(f"{kind}: {type(error).__name__} {error}")
        await asyncio.sleep(load.draw.expovariate(20))


async def request(load: Load, kind: str, tenant: str) -> None:
    """One request of a kind, or a few that belong together."""
    draw = load.draw
    if kind == "turns":
        for text, want in draw.choice(load.turns):
            load.judge(kind, await load.ask("completions", text, tenant), want)
    elif kind == "exact":
        text, want = draw.choice(load.chats)
        load.judge(kind, await load.ask(draw.choice([*PATHS][1:]), text, tenant), want)
    elif kind == "leased":
        pages, question, want = draw.choice(load.leased)
        if names := await load.lease(pages, tenant, draw.choice((60, 120))):
            load.judge(kind, await load.ask("chat", question, tenant, None, cache_ids=names), want)
            if draw.random() < 0.5:
                gone = await load.client.delete(f"/v1/caches/{names[0]}", headers=load.headers(tenant))
                assert gone.status_code in (200, 404), gone.text  # it may have expired
    elif kind in ("learned", "fresh"):
        text = draw.choice(load.chats)[0] if kind == "learned" else whole(write_prompt(draw, 4))
        await load.ask(draw.choice([*PATHS]), text, tenant, None)
        if kind == "fresh":
            await load.lease(tuple(write_prompt(draw, 4).pages), tenant, 5)
        load.outcomes[kind] += 1
    elif kind == "vanishes":
        body = {"model": MODEL, "stream": True, "max_tokens": 200, "prompt": draw.choice(load.chats)[0]}
        async with load.client.stream("POST", PATHS["completions"], json=body, headers=load.headers(tenant)) as answer:
            await anext(answer.aiter_lines())
        load.outcomes[kind] += 1
    elif kind == "foreign":
        names = await load.lease(load.leased[0][0][:1], "a", 5)
        answer = await load.client.get(
            f"/v1/caches/{names[0]}" if names else "/v1/caches/none", headers=load.headers("b")
        )
        assert answer.status_code == 404, answer.text
        load.outcomes[kind] += 1
    else:
        answer = await load.client.post(PATHS["chat"], content=os.urandom(40), headers=load.headers(tenant))
        assert 400 <= answer.status_code < 500, answer.text
        load.outcomes[kind] += 1


async def run_commands(load: Load, root: Path) -> None:
    """Other processes on the same store: compiles, half of them killed, and gc."""
    number = 0
    while time.monotonic() < load.ends:
        number += 1
        page = root / f"page{number % 8}.txt"
        page.write_text("".join(write_prompt(load.draw, 4).pages))
        commands = [["compile", str(page), "--store", f"{root}/st"], ["store", "gc", "--store", f"{root}/st"]]
        words = commands[number % 2]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pictool", *words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=os.environ | LIMITS,
        )  # fmt: skip
        if words[0] == "compile" and load.draw.random() < 0.5:
            await asyncio.sleep(load.draw.uniform(0, 10))
            if process.returncode is None:
                process.kill()
        _, said = await process.communicate()
        is_good = process.returncode in (0, -9)
        load.outcomes[
            f"pic {words[0]}" + ("" if is_good else ", failed") + ", killed" * (process.returncode == -9)
        ] += 1
        if not is_good:
            load.wrong.append(f"pic {words[0]}: {said.decode(errors='replace')[-200:]}")
        await asyncio.sleep(min(15.0, max(0.0, load.ends - time.monotonic())))


async def sample(load: Load, process: psutil.Process, root: Path, every_s: float) -> list[dict[str, float]]:
    """What the server holds, from time to time, and the latency since the last sample."""
    samples, began, seen = list[dict[str, float]](), time.monotonic(), 0
    while time.monotonic() < load.ends:
        await asyncio.sleep(every_s)
        recent = sorted(seconds for _, seconds in load.latencies[seen:]) or [0.0]
        seen = len(load.latencies)
        sizes = list[int]()
        for path in root.rglob("*"):
            with suppress(FileNotFoundError):  # it was evicted meanwhile
                sizes.append(path.stat().st_size)
        samples.append({
            "minutes": (time.monotonic() - began) / 60, "rss_mb": process.memory_info().rss / 1e6,
            "files": process.num_fds(), "threads": process.num_threads(), "children": len(process.children()),
            "disk_mb": sum(sizes) / 1e6, "disk_files": len(sizes), "requests": seen,
            "p50_ms": 1e3 * statistics.median(recent), "p99_ms": 1e3 * recent[int(0.99 * (len(recent) - 1))],
            **memory_kinds(process.pid),
        })  # fmt: skip
        print(json.dumps(samples[-1]), flush=True)
    return samples


def memory_kinds(pid: int) -> dict[str, float]:
    """MB that are resident: malloc's main heap, its arenas of other threads, Python's own arenas, files, the rest."""
    kinds = dict.fromkeys(("heap_mb", "thread_arenas_mb", "python_mb", "mapped_files_mb", "other_mb"), 0.0)
    text = Path(f"/proc/{pid}/smaps").read_text()
    for low, high, name, kb in re.findall(r"(?m)^(\w+)-(\w+) \S+ \S+ \S+ \S+ *(.*)\n(?:[^R].*\n)*?Rss: +(\d+)", text):
        start, size = int(low, 16), int(high, 16) - int(low, 16)
        kind = "heap_mb" if name == "[heap]" else "mapped_files_mb" if name.startswith("/") else "other_mb"
        if not name and start % (64 << 20) == 0:
            kind = "thread_arenas_mb"
        elif not name and size % (1 << 20) == 0:
            kind = "python_mb"
        kinds[kind] += int(kb) / 1e3
    return kinds


@contextmanager
def serving(root: Path) -> Iterator[tuple[psutil.Process, str, Path]]:
    """A server in a process of its own: the process, its address, and the file of what it says."""
    keys, said = root / "keys", root / "said.txt"
    keys.write_text("".join(f"{name} {key} {name * 32}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    words = [
        "-m",
        MODEL,
        "--port",
        "0",
        "--store",
        f"{root}/st",
        "--keys",
        str(keys),
    ]
    with said.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pictool", "serve", *words, *OPTIONS],
            stdout=file,
            stderr=file,
            env=os.environ | LIMITS,
        )
    try:
        while not (found := re.search(r"http://[\d.]+:\d+", said.read_text())):
            assert process.poll() is None, said.read_text()
            time.sleep(0.2)
        while httpx.get(f"{found[0]}/health", timeout=60).status_code != 200:
            time.sleep(0.2)
        yield psutil.Process(process.pid), found[0], said
    finally:
        process.terminate()
        process.wait(60)


def growth(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The medians of the second and of the last quarter of the run."""
    quarter = max(1, len(samples) // 4)
    parts = {"second_quarter": samples[quarter : 2 * quarter], "last_quarter": samples[-quarter:]}
    names = ("rss_mb", "files", "threads", "disk_mb", "disk_files", "p50_ms", "p99_ms")
    return {
        part: {name: statistics.median(each[name] for each in some) for name in names} for part, some in parts.items()
    }


def plot(samples: list[dict[str, float]], path: Path) -> None:
    """The curves: memory, descriptors, disk, latency."""
    from benchmarks.pictures import picture

    panels = {"memory, MB": ("rss_mb",), "open files, threads": ("files", "threads"),
              "disk of store and log, MB": ("disk_mb",), "latency, ms": ("p50_ms", "p99_ms")}  # fmt: skip
    with picture(path, 9.0, 4.6) as figure:
        for axes, (title, names) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
            for name in names:
                axes.plot([each["minutes"] for each in samples], [each[name] for each in samples], label=name)
            axes.set(title=title, xlabel="minutes", ylim=(0, None))
            if len(names) > 1:
                axes.legend(fontsize=7)


async def soak(
    process: psutil.Process, url: str, root: Path, minutes: float, clients: int, seed: int
) -> dict[str, Any]:
    draw = random.Random(seed)
    turns = conversations(6, draw)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=clients)) as client:
        load = Load(client, draw, turns)
        await prepare(load, 8)
        load.latencies.clear()
        load.ends = time.monotonic() + 60 * minutes
        jobs = [run_client(load) for _ in range(clients)]
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(sample(load, process, root, max(2.0, minutes / 2)))
            for job in (run_commands(load, root), *jobs):
                group.create_task(job)
        samples = sampling.result()
        health = (await client.get("/health")).json()
    return {
        "outcomes": dict(sorted(load.outcomes.items())), "wrong": load.wrong[:20], "num_wrong": len(load.wrong),
        "left": {name: health[name] for name in ("waiting", "active")}, **growth(samples), "samples": samples,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        with serving(root) as (process, url, said):
            found = asyncio.run(soak(process, url, root, options.minutes, options.clients, options.seed))
        log = said.read_text(errors="replace")
        found["tracebacks"] = log.count("Traceback")
        found["failed"] = [line for line in log.splitlines() if "a request failed" in line][:20]
    print({name: value for name, value in found.items() if name != "samples"})
    if options.plot is not None:
        plot(found["samples"], options.plot)
    if options.out is not None:
        settings = {"minutes": options.minutes, "clients": options.clients, "options": [*OPTIONS], "limits": LIMITS}
        write_results(options.out, {**settings, **found})
    sys.exit(1 if found["num_wrong"] or found["tracebacks"] else 0)


if __name__ == "__main__":
    main()

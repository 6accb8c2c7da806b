"""A recorded loop of a coding agent against `pic serve` at its defaults: the share of its prompts that is reused.

    OMP_NUM_THREADS=1 python -m benchmarks.recorded_agent --out benchmarks/results/recorded_agent.json
    OMP_NUM_THREADS=1 python -m benchmarks.recorded_agent --edits --out benchmarks/results/recorded_edits.json
    python -m benchmarks.recorded_agent --record PATH/TO/codex      records the loop anew

The loop is that of `codex exec`, driven by a scripted model (tests/scripted.py): it reads ten files, one a call, mends
one, runs its check, and ends. The agent's own texts (instructions, descriptions of tools, surroundings) are recorded
with other letters in each word, so lengths and repeats stay. `possible` is what an exact prefix cache without limits
has: the request before and its answer.

With `--edits` the loop is edited once, at the request after six of its files: the first three results are stubs
(`dropped`), the first three turns a summary (`compacted`), or the date that codex tells is another one (`system`).
Servers that learn, under `auto` and `legolink-16`, and one without (`full`) have the loop up to there, as a request
under full, and then the edited request and the two after it, with time to learn between them. `computed` is what the
usage of each leaves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import zstandard

from benchmarks.agent_loop import serving
from benchmarks.output import write_results
from training.world.generate import write_prompt

RECORDED = Path(__file__).parent / "recorded" / "codex.jsonl.zst"
FILES = 10
SHAPES, EDITED, BEFORE = ("dropped", "compacted", "system"), 3, 6  # turns that are edited; turns before it
_AGENT, _DATE = "codex exec 0.169.0", "2026-11-26"
_WORD = re.compile(r"[^\W\d_]{3,}")
_FIELDS = ("model", "input", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "store")
_TASK = "Mend the sum in sums.py; (say mend)"


def replies() -> dict[str, list[str]]:
    """What the model says: a call of the shell a turn."""
    commands = [f"cat notes{number}.md" for number in range(FILES)]
    commands += ["sed -i 's/a - b/a + b/' sums.py", "python3 -c 'import sums; print(sums.add(2, 3))'"]
    calls = [json.dumps({"name": "exec_command", "arguments": {"cmd": command}}) for command in commands]
    said = [f"Turn {number} of the loop. <call>{call}</call></s>" for number, call in enumerate(calls)]
    return {"mend": [*said, "The sum is mended, and its check passes.</s>"]}


def scripted(root: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from scripted import save_scripted

    return save_scripted(root / "model", replies(), positions=1 << 17, layers=1)


def disguised(text: str) -> str:
    """Each word of a text with letters that its hash gives."""

    def other(match: re.Match[str]) -> str:
        digest = hashlib.sha256(match[0].encode()).digest() * (1 + len(match[0]) // 32)
        return "".join(chr(97 + byte % 26) for byte in digest[: len(match[0])])

    return _WORD.sub(other, text)


def without_texts(value: Any, name: str = "") -> Any:
    """A request with its agent's own texts disguised; answers and what tools gave are ours."""
    if isinstance(value, Mapping):
        if value.get("type") in ("function_call", "function_call_output") or value.get("role") == "assistant":
            return value
        return {key: without_texts(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_texts(inner, name) for inner in value]
    is_own = name in ("instructions", "description", "text") and isinstance(value, str) and _TASK not in value
    return disguised(value) if is_own else value


# Recording


def record(codex: Path) -> list[dict[str, Any]]:
    """The requests of a run of codex in a small repository."""
    bodies = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as root:
        repository, model = Path(root) / "repository", scripted(Path(root))
        repository.mkdir()
        (repository / "sums.py").write_text("def add(a, b):\n    return a - b\n")
        for number in range(FILES):
            pages = write_prompt(random.Random(number), 20).pages
            (repository / f"notes{number}.md").write_text("".join(pages))
        subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
        with serving(str(model), "--store", f"{root}/store") as client, Recorder(client, bodies) as url:
            name = client.get("/v1/models").json()["data"][0]["id"]
            provider = {"name": "pic", "base_url": f"{url}/v1", "wire_api": "responses"}
            options = {"model": name, "model_provider": "pic"}
            options |= {f"model_providers.pic.{key}": value for key, value in provider.items()}
            settings = [word for key, value in options.items() for word in ("-c", f"{key}={json.dumps(value)}")]
            command = [str(codex), "exec", "--dangerously-bypass-approvals-and-sandbox", *settings, _TASK]
            home = {"HOME": root, "PATH": "/usr/bin:/bin"}
            subprocess.run(command, cwd=repository, env=home, check=True, timeout=600, stdin=subprocess.DEVNULL)
            assert "a + b" in (repository / "sums.py").read_text()
    return [without_texts({key: body[key] for key in body if key in _FIELDS}) for body in bodies]


class Recorder:
    """A proxy of a server: the bodies of its requests for answers are kept."""

    def __init__(self, client: httpx.Client, bodies: list[dict[str, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                bodies.append(json.loads(data))
                self._answer(client.post(self.path, content=data, headers={"Content-Type": "application/json"}))

            def do_GET(self) -> None:
                self._answer(client.get(self.path))

            def _answer(self, response: httpx.Response) -> None:
                self.send_response(response.status_code)
                self.send_header("Content-Type", response.headers["Content-Type"])
                self.send_header("Content-Length", str(len(response.content)))
                self.end_headers()
                self.wfile.write(response.content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()


# Replay


def replay(bodies: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What the server says of each request."""
    rows, last = list[dict[str, int]](), 0
    with (
        tempfile.TemporaryDirectory() as root,
        serving(str(scripted(Path(root))), "--store", f"{root}/store") as client,
    ):
        name = client.get("/v1/models").json()["data"][0]["id"]
        for body in bodies:
            more = {"model": name, "stream": False, "temperature": 0}
            usage = client.post("/v1/responses", json=body | more).raise_for_status().json()["usage"]
            reused = usage["input_tokens_details"]["cached_tokens"]
            rows.append({"prompt_tokens": usage["input_tokens"], "possible": last, "reused": reused})
            print(rows[-1], flush=True)
            last = usage["total_tokens"]
    return rows


# Edits


def edited(body: dict[str, Any], shape: str, start: int) -> dict[str, Any]:
    """A request with its early turns, of three items each from `start` on, or the date before them edited."""
    items, end = [*body["input"]], start + 3 * EDITED
    if shape == "compacted":
        items[start:end] = [said("So far the notes 0 to 2 were read; they do not tell of the sum.")]
    for index in range(start + 2, end, 3) if shape == "dropped" else ():
        items[index] = items[index] | {"output": "[Old tool result content cleared]"}
    if shape == "system":
        items = json.loads(json.dumps(items).replace(_DATE, "2026-11-27"))
        assert items != body["input"]
    return body | {"input": items}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def replay_edits(bodies: list[dict[str, Any]], policy: str, shape: str) -> list[dict[str, int]]:
    """What a server computes of the request before an edit, and of three from there on."""
    start = next(i for i, item in enumerate(bodies[-1]["input"]) if item.get("role") == "assistant")
    learns = () if policy == "full" else ("--learn", "8G")
    with (
        tempfile.TemporaryDirectory() as root,
        serving(str(scripted(Path(root))), "--store", f"{root}/store", "--algo", policy, *learns) as client,
    ):
        name = client.get("/v1/models").json()["data"][0]["id"]

        def ask(body: dict[str, Any], policy: str) -> dict[str, int]:
            more = {"model": name, "stream": False, "temperature": 0, "max_output_tokens": 1}
            response = client.post("/v1/responses", json=body | more, headers={"X-Pic-Policy": policy})
            usage = response.raise_for_status().json()["usage"]
            if learns:
                has_learned(client)
            return {
                "prompt_tokens": usage["input_tokens"],
                "computed": usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"],
            }

        first = ask(bodies[BEFORE], "full")
        rows = [first, *(ask(edited(body, shape, start), policy) for body in bodies[BEFORE:][:3])]
    print(policy, shape, rows, flush=True)
    return rows


def has_learned(client: httpx.Client) -> None:
    """Wait until nothing more was learned for a while."""
    last, now = None, ""
    while last != now:
        last = now
        time.sleep(5)
        now = "".join(line for line in client.get("/metrics").text.splitlines() if "pic_learned_bytes_total " in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--record", type=Path, metavar="CODEX", help="record the loop of this program")
    parser.add_argument("--edits", action="store_true", help="edit the loop, and measure what is computed then")
    options = parser.parse_args()
    if options.record is not None:
        lines = "".join(json.dumps(body) + "\n" for body in record(options.record))
        RECORDED.parent.mkdir(exist_ok=True)
        RECORDED.write_bytes(zstandard.compress(lines.encode(), 19))
        return
    bodies = [json.loads(line) for line in zstandard.decompress(RECORDED.read_bytes()).splitlines()]
    if options.edits:
        policies = ("auto", "legolink-16", "full")
        found = {policy: {shape: replay_edits(bodies, policy, shape) for shape in SHAPES} for policy in policies}
        if options.out is not None:
            write_results(options.out, {"agent": _AGENT, "policies": found})
        return
    rows = replay(bodies)
    sums = {key: sum(row[key] for row in rows) for key in rows[0]}
    if options.out is not None:
        shares = {
            "share": sums["reused"] / sums["possible"],
            "share_of_prompts": sums["reused"] / sums["prompt_tokens"],
        }
        write_results(options.out, {"agent": _AGENT, "requests": len(rows), **sums, **shares, "rows": rows})


if __name__ == "__main__":
    main()

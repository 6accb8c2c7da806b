"""How fast `pic estimate` reads a log: 100,000 requests of about 10 KB, 1 GB, on one core, against `zstdcat | wc`.

    python -m benchmarks.estimate_speed --out benchmarks/results/estimate_speed.json

Times are CPU seconds of the process and its children, which a busy machine changes less than those of a clock; both are
written. Memory is the most that was resident.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.output import write_results
from benchmarks.traffic import Writer, rag

_WC = """
import sys, zstandard
lines = 0
with open(sys.argv[1], "rb") as file:
    for part in zstandard.ZstdDecompressor().read_to_iter(file, write_size=1 << 20):
        lines += part.count(b"\\n")
print(lines)
"""  # `zstdcat LOG | wc -l` in one process


def run(command: Sequence[str]) -> dict[str, Any]:
    """Run a command: seconds of CPU and of the clock, megabytes, and what it printed."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, stdout=printed, env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, used = os.wait4(process.pid, 0)
        printed.seek(0)
        out = printed.read().decode()
    if status:
        raise SystemExit(f"{' '.join(command)}: ended with status {status}")
    return {
        "cpu_s": round(used.ru_utime + used.ru_stime, 2), "wall_s": round(time.monotonic() - started, 2),
        "max_mb": round(used.ru_maxrss / 1e3), "out": out,
    }  # fmt: skip


def records(count: int, is_prompt: bool, documents: int) -> Iterator[bytes]:
    """Requests of about 10 KB over documents of 1.5 KB on the average, as chats or as one prompt each."""
    for number, turns in zip(range(count), rag(Writer(0), documents), strict=False):
        texts = {role: "".join(pieces) for role, pieces in turns}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        body: dict[str, Any] = {"prompt": "".join(texts.values())} if is_prompt else {"messages": messages}
        yield json.dumps({"time": 1.76e9 + number, **body}).encode() + b"\n"


def measure(path: Path, options: Sequence[str]) -> dict[str, Any]:
    done = run([sys.executable, "-m", "pictool", "estimate", str(path), "--json", "--top", "0", *options])
    report = json.loads(done.pop("out"))
    return {**done, "requests": report["requests"], "bytes": report["bytes"], "verdict": report["verdict"],
            "tokens": report["tokens"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--kinds", nargs="+", choices=("chats", "prompts"), default=["chats", "prompts"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, Any] = {"documents": options.documents, "runs": {}}
    with tempfile.TemporaryDirectory() as directory:
        for name in options.kinds:
            path = Path(directory) / f"{name}.jsonl.zst"
            with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
                for record in records(options.requests, name == "prompts", options.documents):
                    packed.write(record)
            count = run([sys.executable, "-c", _WC, str(path)])
            done = {"estimate": measure(path, []), "zstdcat | wc": count}
            done["ratio"] = round(done["estimate"]["cpu_s"] / count["cpu_s"], 1)
            results["runs"][name] = done
            write_results(options.out, results)
            if name == "chats":
                results["runs"]["chats, --memory 200M"] = {"estimate": measure(path, ["--memory", "200M"])}
                write_results(options.out, results)
            path.unlink()


if __name__ == "__main__":
    main()

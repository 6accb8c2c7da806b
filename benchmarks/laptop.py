"""A GGUF file on a laptop: memory of an idle server, and the speed of decoding, beside llama-cpp-python's own.

    python -m benchmarks.laptop -m smollm2 --out benchmarks/results/laptop.json

Both are of one process each, with the file loaded and one prompt answered: `pic serve`, and llama-cpp-python's `Llama`
with a context of the prompt's size. Memory is what the process has of its own and what it shares (RSS), and without
the pages of the file (`anonymous`). Decoding: the two in turn, in one process, after the same prompt; medians of tokens
a second, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.agent_restarts import Served
from benchmarks.output import write_results
from pictool.core import Sampling
from pictool.engines.llamacpp.engine import LlamaCppEngine
from pictool.engines.llamacpp.model import GgufModel, open_gguf
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime.gguf import find_files
from pictool.store.store import Store

TEXT = "The harbour was quiet in the morning, and nobody knew why the ships had gone. "
TOKENS = 128  # decoded
OWN = """
import sys
from llama_cpp import Llama
path, text = sys.argv[1:]
own = Llama(path, n_ctx=2048, verbose=False)
own.create_completion(text, max_tokens=16, temperature=0)
print("ready", flush=True)
sys.stdin.read()
"""


def memory(pid: int) -> dict[str, int]:
    """Bytes in memory of a process: all, and those that are of no file."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    fields = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "RssAnon:")}
    return {"rss": fields["VmRSS:"], "anonymous": fields["RssAnon:"]}


def measure_memory(path: Path, text: str) -> dict[str, Any]:
    with subprocess.Popen(
        [sys.executable, "-c", OWN, str(path), text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline().strip() == "ready"
        own = memory(process.pid)
        process.stdin.close()
    with tempfile.TemporaryDirectory() as root:
        served = Served(str(path), "--store", root)
        try:
            served.ask([{"role": "user", "content": text}])
            time.sleep(2)
            ours = memory(served.process.pid)
        finally:
            served.kill()
    return {"pic serve": ours, "llama-cpp-python": own, "more": {name: ours[name] - own[name] for name in own}}


def measure_decoding(model: GgufModel, path: Path, text: str, repeats: int) -> dict[str, Any]:
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    own = Llama(str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    tokens = list(model.encode(text))
    rates: dict[str, list[float]] = {"pic": [], "llama-cpp-python": []}
    with tempfile.TemporaryDirectory() as root, LlamaCppEngine(model, Store(root)) as engine:
        spec = Spec(text, (), make_policy(BASELINE), is_raw=True, max_new_tokens=TOKENS, sampling=Sampling(0.0))
        for repeat in range(repeats + 1):
            answer = engine.answer(spec)
            ours = len(answer.generated.tokens) / answer.decode_s
            own.reset()
            own.eval(tokens)
            started, count = time.perf_counter(), 0
            for token in own.generate([], temp=0.0, reset=False):
                count += 1
                if count > TOKENS or token == own.token_eos():
                    break
            theirs = (count - 1) / (time.perf_counter() - started)
            if repeat:
                rates["pic"].append(ours)
                rates["llama-cpp-python"].append(theirs)
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return {
        "prompt_tokens": len(tokens), "decoded": TOKENS, "threads": threads, "tokens_per_s": medians,
        "ratio": medians["pic"] / medians["llama-cpp-python"], "all": rates,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", dest="model", required=True, help="a GGUF file, or smollm2")
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    path, text = find_files(options.model)[0], TEXT * 30
    found = {"model": path.name, "memory": measure_memory(path, text)}
    print(found, flush=True)
    found["decoding"] = measure_decoding(open_gguf(options.model, "cpu"), path, text, options.repeats)
    print(found["decoding"])
    if options.out is not None:
        write_results(options.out, found)


if __name__ == "__main__":
    main()

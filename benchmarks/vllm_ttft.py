"""TTFT inside vLLM: linked, full prefill, prefix cache; and what the connector costs ordinary requests.

    .venv-vllm/bin/python -m benchmarks.vllm_ttft --out benchmarks/results

Two engines, each in a process of its own, one with the connector and one without; their requests are interleaved, so
that a slow moment of the machine meets both. A random model of Qwen2.5-0.5B's shape. Times are medians; the raw ones
are in the JSON. Every request has its documents in an order of its own; one that must miss vLLM's prefix cache has a
salt of its own.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pictool.runtime.machine import machine

QWEN: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 1500, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
HEAD, TAIL = 16, 32
LINKED = ("naive", "legolink-16", "cacheblend-15")
DECODED, BATCH = 16, 4  # tokens and requests of the ordinary load


def save_model(directory: Path, shape: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from pictool import load_model

    torch.manual_seed(0)
    config = Qwen2Config(
        **shape, max_position_embeddings=32768, tie_word_embeddings=True, use_sliding_window=False, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    load_model("embedded").tokenizer.save_pretrained(directory)


def serve(
    pipe: Connection, directory: str, store: str | None, length: int, threads: int, kv_cache_bytes: int | None,
    more: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """An engine's process: answers (prompts, params, salt, tokens) with each request's TTFT.

    Of several requests each may have its own `params` and salt, as a list. `more` is of the connector's configuration.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if store is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="PicConnector", kv_connector_module_path="pictool.engines.vllm.connector", kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config={"store": store} | (more or {}),
        )  # fmt: skip
    llm: Any = LLM(
        directory, dtype="float32", max_model_len=length, enforce_eager=True, enable_prefix_caching=True,
        disable_log_stats=False, kv_cache_memory_bytes=kv_cache_bytes, **options,
    )  # fmt: skip
    spent = count_seconds() if store is not None else [0.0]
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        token_ids, params, salt, count = request
        salts, every = (
            one if isinstance(one, list) else [one] * len(token_ids) for one in (salt, params)
        )  # fmt: skip
        prompts = [
            {"prompt_token_ids": tokens} | ({} if own is None else {"cache_salt": own})
            for tokens, own in zip(token_ids, salts, strict=True)
        ]
        sampling = [
            SamplingParams(
                max_tokens=count, temperature=0, ignore_eos=True, detokenize=False,
                extra_args=None if own is None else {"kv_transfer_params": own},
            )
            for own in every
        ]  # fmt: skip
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        states = [(output.kv_transfer_params or {}).get("pic", {}).get("state") for output in outputs]
        assert params is None or set(states) == {"linked"}, states
        last = [output.metrics.last_token_ts - output.metrics.queued_ts for output in outputs]
        pipe.send(([output.metrics.first_token_latency for output in outputs], max(last), spent[0]))
        spent[0] = 0.0
    llm.llm_engine.engine_core.shutdown()


def count_seconds() -> list[float]:
    """Count the seconds that this process spends in the connector's own methods from now on; a list of the sum."""
    from pictool.engines.vllm.connector import PicConnector

    spent = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - started

        return run

    for name, method in list(vars(PicConnector).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(PicConnector, name, timed(method))
    return spent


class Process:
    """One of the two engines."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, worker_end = context.Pipe()
        self._process = context.Process(target=serve, args=(worker_end, *arguments), daemon=True)
        self._process.start()
        worker_end.close()  # so that an engine that fails to start ends this process too
        assert self._pipe.recv() == "ready"

    def request(self, prompts: list[list[int]], params: Any = None, salt: Any = None, count: int = 1) -> Any:
        self._pipe.send((prompts, params, salt, count))
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(60)


class Prompts:
    """Prompts of the same documents, in orders drawn anew."""

    def __init__(self, chunks: list[tuple[int, ...]], keys: list[str], vocab: int) -> None:
        self._chunks, self._keys, self._draw = chunks, keys, np.random.default_rng(7)
        self._head, self._tail = ([int(t) for t in self._draw.integers(3, vocab, n)] for n in (HEAD, TAIL))

    def next(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Tokens, and the key and start of every object."""
        tokens, places = list(self._head), []
        for i in self._draw.permutation(len(self._chunks)).tolist():
            places.append({"key": self._keys[i], "start": len(tokens)})
            tokens += self._chunks[i]
        return [*tokens, *self._tail], places


def measure(linking: Process, plain: Process, prompts: Prompts, repeats: int) -> dict[str, list[float]]:
    """Seconds of every kind of request, interleaved; the first repeat warms up and is dropped."""
    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        seconds_of = {}
        for spec in LINKED:
            tokens, places = prompts.next()
            (seconds_of[spec],), *_ = linking.request([tokens], {"pic": {"chunks": places, "policy": spec}})
        tokens, _ = prompts.next()
        (seconds_of["full prefill"],), *_ = plain.request([tokens], salt=f"full {repeat}")
        (seconds_of["full prefill, connector loaded"],), *_ = linking.request([tokens], salt=f"full {repeat}")
        (seconds_of["prefix cache, another order"],), *_ = plain.request([prompts.next()[0]])
        seconds_of |= request_in_turn(linking, plain, prompts, repeat)
        for name, took in seconds_of.items():
            seconds.setdefault(name, []).append(took)
    return {name: took[1:] for name, took in seconds.items()}


def request_in_turn(linking: Process, plain: Process, prompts: Prompts, repeat: int) -> dict[str, float]:
    """Seconds of one ordinary load on both engines, in turn the one and the other first."""
    load = [prompts.next()[0][: HEAD + 256] for _ in range(BATCH)]
    in_turn = [("ordinary load", plain), ("ordinary load, connector loaded", linking)]
    pairs = in_turn if repeat % 2 else in_turn[::-1]
    took = {name: engine.request(load, salt=f"load {repeat}", count=DECODED)[1:] for name, engine in pairs}
    spent = {"ordinary load, within the connector": took["ordinary load, connector loaded"][1]}
    return {name: seconds for name, (seconds, _) in took.items()} | spent


def measure_loads(linking: Process, plain: Process, prompts: Prompts, repeats: int) -> dict[str, list[float]]:
    """Seconds of ordinary loads only; the first repeat warms up and is dropped."""
    repeated = [request_in_turn(linking, plain, prompts, repeat) for repeat in range(repeats + 1)][1:]
    return {name: [times[name] for times in repeated] for name in repeated[0]}


def overhead_of(seconds: dict[str, list[float]]) -> float:
    """What the connector costs ordinary requests: the median of the repeats' ratios, less one."""
    with_it, without = seconds["ordinary load, connector loaded"], seconds["ordinary load"]
    return statistics.median(a / b for a, b in zip(with_it, without, strict=True)) - 1


def run(
    shape: dict[str, Any], documents: int, tokens: int, repeats: int, threads: int, only_loads: bool,
    kv_cache_bytes: int | None,
) -> dict[str, Any]:  # fmt: skip
    from pictool import Chunk, Store, compile, load_model

    with tempfile.TemporaryDirectory(prefix="pic-vllm-") as scratch:
        directory, store = Path(scratch) / "model", Store(Path(scratch) / "store")
        save_model(directory, shape)
        drawn = np.random.default_rng(0).integers(3, 1400, (documents, tokens)).tolist()
        chunks = [Chunk(f"chunk {i}", tuple(row), "random") for i, row in enumerate(drawn)]
        keys = [done.key for done in compile(load_model(str(directory), "cpu", "float32"), store, chunks)]
        length = HEAD + documents * tokens + TAIL + DECODED + 1
        arguments = (str(directory), str(store.root), length, threads, kv_cache_bytes)
        linking, plain = Process(*arguments), Process(arguments[0], None, *arguments[2:])
        try:
            work = measure_loads if only_loads else measure
            seconds = work(linking, plain, Prompts([chunk.tokens for chunk in chunks], keys, 1400), repeats)
        finally:
            linking.stop()
            plain.stop()
    medians = {name: statistics.median(took) for name, took in seconds.items()}
    result = {
        "documents": documents, "tokens": tokens, "shape": shape, "repeats": repeats, "threads": threads,
        "machine": machine(), "medians_s": medians, "seconds": seconds, "overhead": overhead_of(seconds),
        "within_connector": medians["ordinary load, within the connector"] / medians["ordinary load, connector loaded"],
    }  # fmt: skip
    if not only_loads:
        full, cache = medians["full prefill"], medians["prefix cache, another order"]
        result["speedup"] = {spec: full / medians[spec] for spec in LINKED}
        result["speedup_over_prefix_cache"] = {spec: cache / medians[spec] for spec in LINKED}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the result (vllm_ttft.json)")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a document")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kv-cache-mb", type=int, help="of each engine; default: what vLLM takes")
    parser.add_argument("--tiny", action="store_true", help="a model of a few layers: shows that all runs")
    parser.add_argument("--only-loads", action="store_true", help="ordinary requests only, to vllm_overhead.json")
    options = parser.parse_args()
    shape = TINY if options.tiny else QWEN
    kv_cache_bytes = None if options.kv_cache_mb is None else options.kv_cache_mb << 20
    result = run(
        shape, options.documents, options.tokens, options.repeats, options.threads, options.only_loads, kv_cache_bytes
    )
    options.out.mkdir(parents=True, exist_ok=True)
    name = "vllm_overhead.json" if options.only_loads else "vllm_ttft.json"
    (options.out / name).write_text(json.dumps(result, indent=2) + "\n")
    for name, took in result["medians_s"].items():
        print(f"{name:34s} {took * 1e3:9.1f} ms")
    for spec in result.get("speedup", {}):
        over = result["speedup_over_prefix_cache"][spec]
        print(f"{spec:34s} {result['speedup'][spec]:.1f}x full prefill, {over:.1f}x prefix cache")
    print(f"{'connector, ordinary requests':34s} {result['overhead']:+.1%}")
    print(f"{'of that within its own methods':34s} {result['within_connector']:+.3%}")


if __name__ == "__main__":
    main()

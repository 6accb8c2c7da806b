"""How long linked requests inside vLLM hold another one: the gaps between the tokens of a request that decodes.

    .venv-vllm/bin/python -m benchmarks.vllm_gaps --out benchmarks/results/vllm_gaps.json

One engine with the connector. A request decodes; after some tokens others arrive whose documents are linked from
objects, all in the page cache. Reported are the gaps between its tokens (median, p99, longest) without loads, and from
the arrival of the linked requests until the last of them has its first token. Gaps in which vLLM itself prefills, the
tail of a linked prompt, are apart: ordinary requests make them too. So is the time in which vLLM takes the requests in
(`LLMEngine.add_request`: here it runs between two steps, in a server in another process), less the connector's part of
it, which counts. A random model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import write_results

SHAPE = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
HEAD, TAIL = 16, 32
PLAIN = 200  # tokens of the request that decodes, then comes another: its own context is short throughout
KINDS = ("before", "during", "prefill")  # of gaps


def make_prompts(store_dir: str, model_dir: str, tokens: int, chunk: int, count: int) -> tuple[list[Any], int]:
    """Compile random documents; returns prompts (token ids, keys) of `tokens` tokens each, and their bytes of KV."""
    from pictool import CompileOptions, load_model
    from pictool.compiler.compile import compile_chunks
    from pictool.core import Chunk
    from pictool.store.store import Store

    model, store = load_model(model_dir, "cpu", "float32"), Store(store_dir)
    draw, prompts, num_bytes = np.random.default_rng(0), [], 0
    for number in range(count):
        chunks = [
            Chunk(f"{number}.{part}", tuple(draw.integers(3, 2000, chunk).tolist()), "random")
            for part in range(tokens // chunk)
        ]
        done = compile_chunks(model, store, chunks, CompileOptions())
        num_bytes += sum(path.path.stat().st_size for path in done)
        ids = [*draw.integers(3, 2000, HEAD).tolist()]
        places = []
        for part, compiled in zip(chunks, done, strict=True):
            places.append({"key": compiled.key, "start": len(ids)})
            ids += part.tokens
        prompts.append((ids + draw.integers(3, 2000, TAIL).tolist(), places))
    return prompts, num_bytes


def run_once(llm: Any, prompts: Sequence[Any], policy: str, number: int) -> dict[str, Any]:
    """The gaps of a request that decodes, in ms: before the linked requests arrive, and while they are linked."""
    from vllm import SamplingParams

    engine, scheduled = llm.llm_engine, _scheduled_tokens(llm)
    connector_s = _seconds_in_connector(llm)
    plain = SamplingParams(max_tokens=PLAIN, temperature=0, ignore_eos=True, detokenize=False)
    num_plain, is_first = 0, True

    def add_plain() -> None:
        engine.add_request(f"plain {number} {num_plain}", {"prompt_token_ids": [5, 6, 7, 8]}, plain)

    add_plain()
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    waiting: set[str] = set()
    last, started, loads = time.perf_counter(), 0.0, 0.0
    while True:
        arrived = engine.step()
        now = time.perf_counter()
        for output in arrived:
            if output.request_id.startswith("plain"):
                kind = "before" if not started else "during" if scheduled[-1] == 1 else "prefill"
                if not is_first:
                    gaps[kind].append((now - last) * 1e3)
                last, is_first = now, output.finished
                if output.finished:
                    num_plain += 1
                    add_plain()
            elif output.outputs[0].token_ids:
                waiting.discard(output.request_id)
        if not started and len(gaps["before"]) == 100:
            connector_s.clear()
            for index, (ids, places) in enumerate(prompts):
                name = f"linked {number} {index}"
                params = {"pic": {"chunks": places, "policy": policy}}
                sampling = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": params})
                engine.add_request(name, {"prompt_token_ids": ids}, sampling)
                waiting.add(name)
            started = now
            last += time.perf_counter() - now - sum(connector_s)  # vLLM's own part
        if started and not waiting:
            loads = now - started
            break
    engine.abort_request([f"plain {number} {num_plain}"])
    while engine.has_unfinished_requests():
        engine.step()
    return gaps | {"linked_s": round(loads, 3)}


def _scheduled_tokens(llm: Any) -> list[int]:
    """How many tokens vLLM computes in each step from now on."""
    scheduler, counts = llm.llm_engine.engine_core.engine_core.scheduler, list[int]()
    schedule = type(scheduler).schedule

    def counted(*arguments: Any, **options: Any) -> Any:
        output = schedule(scheduler, *arguments, **options)
        counts.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counted
    return counts


def _seconds_in_connector(llm: Any) -> list[float]:
    """How long the connector takes for each request that is added from now on."""
    side, seconds = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler_side, list[float]()
    add = type(side).add_request

    def timed(request: Any) -> None:
        started = time.perf_counter()
        add(side, request)
        seconds.append(time.perf_counter() - started)

    side.add_request = timed
    return seconds


def summary(gaps: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(float(np.median(gaps)), 2),
        "p99": round(float(np.percentile(gaps, 99)), 2),
        "longest": round(max(gaps), 2),
        "count": len(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm_gaps.json"))
    parser.add_argument("--tokens", type=int, default=10_240, help="of a linked prompt's documents")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4], help="linked requests that arrive at once")
    parser.add_argument("--policies", nargs="+", default=["naive", "legolink-16", "cacheblend-15"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--step-bytes", type=int, default=32 << 20)
    parser.add_argument("--step-rows", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=0)
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options, folder)
    write_results(options.out, results)


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from pictool import load_model

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=65536, bos_token_id=0, eos_token_id=1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(f"{folder}/model")
    load_model("embedded").tokenizer.save_pretrained(f"{folder}/model")
    most = max(options.requests)
    prompts, num_bytes = make_prompts(f"{folder}/store", f"{folder}/model", options.tokens, options.chunk, most)
    extra = {"store": f"{folder}/store", "step_bytes": options.step_bytes, "step_rows": options.step_rows}
    extra |= {"step_ms": options.step_ms}
    transfer = KVTransferConfig(
        kv_connector="PicConnector", kv_connector_module_path="pictool.engines.vllm.connector", kv_role="kv_both",
        kv_load_failure_policy="recompute", kv_connector_extra_config=extra,
    )  # fmt: skip
    llm: Any = LLM(
        f"{folder}/model", dtype="float32", max_model_len=options.tokens + 4096, enforce_eager=True, block_size=32,
        enable_prefix_caching=False, kv_transfer_config=transfer, disable_log_stats=True, max_num_batched_tokens=2048,
        kv_cache_memory_bytes=int(num_bytes * 1.3) + (256 << 20),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    run_once(llm, prompts, "naive", 10**6)  # reads every object once
    for policy in options.policies:
        for count in options.requests:
            runs = [run_once(llm, prompts[:count], policy, len(raw) * 100 + i) for i in range(options.repeats)]
            row = {"policy": policy, "requests": count, "mb": round(num_bytes * count / most / 1e6)}
            row |= {
                name: summary([gap for run in runs for gap in run[name]]) for name in ("before", "during", "prefill")
            }
            row["p99_ratio"] = round(row["during"]["p99"] / row["before"]["p99"], 2)
            row["linked_s"] = float(np.median([run["linked_s"] for run in runs]))
            rows.append(row)
            print(row, flush=True)
    return {"unit": "ms between tokens", "rows": rows, "raw": raw}


if __name__ == "__main__":
    main()

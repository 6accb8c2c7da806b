"""Recognition of stored documents: seconds per request, and of the index, with 10,000 objects in the store.

    python -m benchmarks.recognition --out benchmarks/results/recognition.json

Times are CPU time of one thread, medians. Objects are of random tokens, and as small as can be but for these.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.output import write_results
from pictool.core import Geometry, Target, TokenIds
from pictool.recognition.index import ContentIndex
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store

TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(1, 1, 1))
VOCAB, MIN_TOKENS = 100_000, 16
LENGTHS = (20, 1000)  # of documents, from and to


def put(store: Store, tokens: TokenIds, salt: str = "") -> None:
    part = bytes(4 * len(tokens))
    own = TARGET.identify(tokens, "none", salt)
    meta = ObjectMeta(own.key, TARGET, len(tokens), "none", salted=own.salted)
    store.put(CompiledChunk(meta, "text", tokens, [(part, part)]), durable=False)


def put_all(store: Store, documents: Iterable[TokenIds], salt: str = "") -> None:
    with mock.patch("os.fsync"):
        for tokens in documents:
            put(store, tokens, salt)


def cpu_ms(run: Callable[[], object], repeats: int = 1) -> float:
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        run()
        times.append(1000 * (time.thread_time() - started))
    return statistics.median(times)


def random_tokens(draw: np.random.Generator, count: int) -> TokenIds:
    return draw.integers(3, VOCAB, count).astype(np.int32)


def prompt_of(draw: np.random.Generator, documents: Sequence[TokenIds], length: int) -> TokenIds:
    """Documents of the store with 20 other tokens between them."""
    parts: list[TokenIds] = []
    while sum(map(len, parts)) < length:
        parts += [documents[int(draw.integers(len(documents)))], random_tokens(draw, 20)]
    return np.concatenate(parts)[:length]


def measure_find(index: ContentIndex, prompt: TokenIds, salt: str = "") -> dict[str, Any]:
    ms = cpu_ms(lambda: index.find(prompt, salt), 7)
    return {
        "tokens": len(prompt), "matches": len(index.find(prompt, salt)), "ms": ms,
        "ms_per_1000_tokens": 1000 * ms / len(prompt),
    }  # fmt: skip


def measure(store: Store, count: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    documents = [random_tokens(draw, int(length)) for length in draw.integers(*LENGTHS, count)]
    put_all(store, documents)
    index = ContentIndex(store, TARGET, MIN_TOKENS, lambda tokens: " ".join(map(str, tokens)))
    refresh = {"first_ms": cpu_ms(index.refresh), "nothing_new_ms": cpu_ms(index.refresh, 5)}
    put_all(store, (random_tokens(draw, 300) for _ in range(10)))
    refresh["ten_new_ms"] = cpu_ms(index.refresh)
    lengths = (1000, 8000, 32_768, 131_072)
    found: dict[str, Any] = {
        "other_text": [measure_find(index, random_tokens(draw, length)) for length in lengths],
        "documents": [measure_find(index, prompt_of(draw, documents, length)) for length in lengths],
    }
    put_all(store, (np.full(length, 7, dtype=np.int32) for length in range(16, 600, 3)))
    small = [random_tokens(draw, MIN_TOKENS) for _ in range(2048)]
    put_all(store, small[:1024])
    put_all(store, small[1024:], "another tenant")
    for tenant in range(1000):
        put_all(store, documents[:1], f"tenant {tenant}")
    index.refresh()
    equal = np.full(32_768, 7, dtype=np.int32)
    interrupted = equal.copy()
    interrupted[::40] = 9
    found["worst"] = {
        "equal_tokens": measure_find(index, equal),
        "equal_tokens_interrupted": measure_find(index, interrupted),
        "smallest_documents": measure_find(index, np.concatenate(small[:1024])),
        "smallest_documents_of_another_tenant": measure_find(index, np.concatenate(small[1024:])),
        "a_document_of_1000_tenants": measure_find(index, np.concatenate([documents[0]] * 50), "tenant 7"),
    }
    return {"objects": count, "refresh": refresh, "find": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the results are written (JSON)")
    parser.add_argument("--objects", type=int, default=10_000, help="objects in the store")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_results(arguments.out, measure(Store(Path(directory)), arguments.objects))


if __name__ == "__main__":
    main()

"""Damaged and forged logs of requests, under `pic estimate`."""

from __future__ import annotations

import copy
import gzip
import random
from pathlib import Path
from typing import Any, ClassVar

import zstandard

from hostile.judge import Case, Step
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import check_json
from hostile.values import dumps, mutate_bytes, mutate_tree

NAME = "requests.jsonl"
_MARKED = {"type": "text", "text": "a document " * 20, "cache_control": {"type": "ephemeral"}}
_HUMAN = {"type": "constructor", "id": ["HumanMessage"], "kwargs": {"content": "x"}}
_STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2]}
_INPUT = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, {"output": "o"}]
RECORDS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "a question " * 30}], "tools": [{"name": "f"}], "time": 1.7e9},
    {"system": [{"type": "text", "text": "be kind"}], "messages": [{"role": "user", "content": [_MARKED, "b"]}]},
    {"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "a document " * 20}], "tenant": "t"},
    {"custom_id": "1", "body": {"messages": [{"role": "user", "content": "y"}]}, "response": {"body": {"choices": []}}},
    {"prompt": [[1, 2, 3], [4, 5]], "timestamp": "2026-01-01T00:00:00Z"},
    {"prompt": "some text " * 40, "cache_salt": "s"},
    {"input": _INPUT, "instructions": "i"},
    {"contents": [{"role": "user", "parts": [{"text": "x"}]}], "systemInstruction": {"parts": [{"text": "s"}]}},
    {"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]},
    {"ts": 1.0, "events": [_STORED]},
    {"run_type": "llm", "inputs": {"messages": [[_HUMAN]]}},
    {"pic_request": 1, "time": 1.0, "tenant": "t", "segments": [["user", False, [["0123456789abcdef", 70]]]]},
)
_VLLM = b"INFO 11-24 10:00:00 [logger.py:43] Received request a: prompt: 'x', params: P(), prompt_token_ids: [1, 2]\n"


class Logs(Surface):
    name: ClassVar[str] = "logs"
    weight: ClassVar[int] = 3

    def make(self, draw: random.Random) -> Case:
        records = [copy.deepcopy(draw.choice(RECORDS)) for _ in range(draw.choice((1, 2, 5)))]
        what = " and ".join(mutate_tree(draw.choice(records), draw) for _ in range(draw.choice((0, 1, 1, 2))))
        lines = [dumps(record).encode("utf-8", "surrogatepass") + b"\n" for record in records]
        data = b"".join(lines) + draw.choice((b"", _VLLM))
        if draw.random() < 0.2:
            data, more = mutate_bytes(data, draw)
            what += f" and {more}"
        kind = draw.choice(("plain", "plain", "gzip", "zstd", "utf-16", "bomb", "else"))
        if kind == "bomb":
            data = draw.choice((gzip.compress(bytes(80 << 20)), zstandard.compress(b"[" * (80 << 20))))
        elif kind == "utf-16":
            data = data.decode(errors="replace").encode("utf-16")
        elif kind in ("gzip", "zstd"):
            data = gzip.compress(data) if kind == "gzip" else zstandard.compress(data)
            data = data[: draw.choice((len(data), len(data) - 3, len(data) // 2))]
        Path(NAME).write_bytes(data)
        if kind == "else":
            what = put_something_else(Path(NAME), draw, self.scene.root / "outside")
        more_options = draw.choice(((), ("--json",), ("--text",), ("--memory", "16MiB"), ("--min-tokens", 1)))
        arguments = ("estimate", NAME, *more_options)
        return Case(f"{kind}: {what}", (Step(arguments, (NAME,), check_json(arguments)),))

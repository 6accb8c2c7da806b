"""Damaged and forged logs of requests, under `pic estimate`."""

from __future__ import annotations

import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any, ClassVar

import zstandard
from estimate import gateways

from hostile.judge import Case, Step
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import check_json
from hostile.values import dumps, mutate_bytes, mutate_text, mutate_tree

NAME = "requests.jsonl"
_MARKED = {"type": "text", "text": "a document " * 20, "cache_control": {"type": "ephemeral"}}
_HUMAN = {"type": "constructor", "id": ["HumanMessage"], "kwargs": {"content": "x"}}
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
    {"run_type": "llm", "inputs": {"messages": [[_HUMAN]]}},
    {"pic_request": 1, "time": 1.0, "tenant": "t", "segments": [["user", False, [["0123456789abcdef", 70]]]]},
)
_IDS = "INFO 11-24 10:00:00 [logger.py:43] Received request a: prompt: 'x', params: P(), prompt_token_ids: [1, 2]"
LOGS: tuple[list[Any], ...] = (
    *([record] for record in RECORDS),
    [_IDS],
    *(log(gateways.CHATS) for log in gateways.LOGS),
)
# repeated to a long text: what ends a prompt, a message, a document, a text, a line; what nests
PIECES = (
    ", params: ", "', prompt_token_ids: ", "Received request a: prompt: '", 'Request b details: prompt: "', "\\", "'",
    '"', "\n---\n", "<doc>", "</doc>", "\nDocument 1:\n", "<|user|>\n", "a", "ab ", "\u2028", "é", "{",
    '{"a":', "[", "[1],", "1, ",
)  # fmt: skip
_MOST = 1 << 20  # characters of them


class Logs(Surface):
    name: ClassVar[str] = "logs"
    weight: ClassVar[int] = 3

    def make(self, draw: random.Random) -> Case:
        log = [copy.deepcopy(line) for lines in (draw.choice(LOGS), draw.choice(([], [], *LOGS))) for line in lines]
        what = " and ".join(self._change(log, draw) for _ in range(draw.choice((0, 1, 1, 2, 4))))
        lines = [line if isinstance(line, str) else dumps(line) for line in log]
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
        if draw.random() < 0.2:
            data, more = mutate_bytes(data, draw)
            what += f" and {more}"
        kind = draw.choice(("plain",) * 4 + ("gzip", "zstd", "utf-16", "utf-32", "cp437", "bomb", "else"))
        if kind == "bomb":
            data = draw.choice((gzip.compress(bytes(80 << 20)), zstandard.compress(b"[" * (80 << 20))))
        elif kind in ("utf-16", "utf-32", "cp437"):
            data = data.decode(errors="replace").encode(kind, errors="replace")
        elif kind in ("gzip", "zstd"):
            data = gzip.compress(data) if kind == "gzip" else zstandard.compress(data)
            data = data[: draw.choice((len(data), len(data) - 3, len(data) // 2))]
        Path(NAME).write_bytes(data)
        if kind == "else":
            what = put_something_else(Path(NAME), draw, self.scene.root / "outside")
        more_options = draw.choice(((), ("--json",), ("--text",), ("--memory", "16MiB")))
        arguments = ("estimate", NAME, *more_options)
        return Case(f"{kind}: {what}", (Step(arguments, (NAME,), check_json(arguments)),))

    def _change(self, log: list[Any], draw: random.Random) -> str:
        """Change a line of a log: its tree, the JSON within it, or a text that gets very long."""
        number = draw.randrange(len(log))
        line, kind = log[number], draw.choice(("tree", "tree", "text", "long", "inner"))
        if kind == "tree" and isinstance(line, dict):
            return mutate_tree(line, draw)
        if kind == "inner" and isinstance(line, dict):  # as a gateway writes a request within its record
            name = draw.choice(sorted(line))
            inner = line[name] if not isinstance(line[name], str) else {"messages": line[name]}
            what = mutate_tree(inner, draw) if isinstance(inner, dict) and inner else "nothing"
            line[name] = dumps(inner)
            return f"JSON in {name!r}: {what}"
        text = line if isinstance(line, str) else json.dumps(line)
        if kind != "long":
            log[number], what = mutate_text(text, draw)
            return what
        piece = draw.choice(PIECES)
        count = draw.choice((10, 1000, _MOST)) // len(piece)
        at = draw.choice([i for i, letter in enumerate(text) if letter in " :'\""])
        repeated = piece * count
        log[number] = text[:at] + (repeated if draw.random() < 0.3 else json.dumps(repeated)[1:-1]) + text[at:]
        return f"{count:,d} times {piece!r} at {at}"

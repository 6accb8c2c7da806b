"""Traffic whose reuse is known, in the form of OpenAI's chat requests with a time: what `pic estimate` is tried on.

    python -m benchmarks.traffic rag --requests 60 --documents 12 --out fixtures/traffic/rag.jsonl.zst
    python -m benchmarks.traffic chat --requests 60 --out fixtures/traffic/chat.jsonl.zst

Kinds: `rag` (documents by Zipf's law, in any order), `chat` (growing histories), `agent` (a loop with tool outputs;
files are read again), `compaction` (the same, whose history is replaced by a summary that quotes it), `judge`
(candidates that several judges read in other orders). All text is random words, so nothing repeats by chance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import zstandard

Turns = list[tuple[str, list[str]]]  # of a request: role, and the pieces of its text
_START = 1_760_000_000.0
_VOCABULARY = 20_000


class Writer:
    """Writes random words."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        letters = string.ascii_lowercase
        self._words = ["".join(self.draw.choices(letters, k=self.draw.randrange(2, 9))) for _ in range(_VOCABULARY)]

    def text(self, size: int) -> str:
        """About so many characters, a line end now and then."""
        return " ".join(self.draw.choices(self._words, k=max(1, size // 6))) + "\n"

    def texts(self, count: int, size: int) -> list[str]:
        return [self.text(self.draw.randrange(size // 2, 3 * size // 2)) for _ in range(count)]

    def zipf(self, texts: list[str], count: int) -> list[str]:
        """Different texts, the first of all the likeliest."""
        return list(dict.fromkeys(self.draw.choices(texts, cum_weights=zipf_sums(len(texts)), k=count)))


@cache
def zipf_sums(count: int) -> list[float]:
    """The sums of the first ranks' weights."""
    return list(itertools.accumulate(1 / rank for rank in range(1, count + 1)))


def rag(writer: Writer, documents: int = 2000, size: int = 1500) -> Iterator[Turns]:
    system, texts = writer.text(600), writer.texts(documents, size)
    while True:
        shown = writer.zipf(texts, 7)
        writer.draw.shuffle(shown)
        pieces = [piece for number, text in enumerate(shown, 1) for piece in (f"\nDocument {number}:\n", text)]
        yield [("system", [system]), ("user", [*pieces[1:], f"\nQuestion: {writer.text(100)}"])]


def chat(writer: Writer) -> Iterator[Turns]:
    system, chats = writer.text(600), [list[tuple[str, list[str]]]() for _ in range(20)]
    while True:
        turns = writer.draw.choice(chats)
        turns.append(("user", [writer.text(400)]))
        yield [("system", [system]), *turns]
        turns.append(("assistant", [writer.text(900)]))
        if len(turns) > 20:
            turns.clear()


def agent(writer: Writer, compacts: bool = False) -> Iterator[Turns]:
    system, files = writer.text(3000), writer.texts(60, 2000)
    while True:
        turns: Turns = [("user", [writer.text(300)])]
        for _ in range(12):
            yield [("system", [system]), *turns]
            turns.append(("assistant", [writer.text(150)]))
            turns.append(("tool", [writer.draw.choice(files)]))
            if compacts and len(turns) > 12:
                kept = [piece for _, pieces in turns[-4:] for piece in pieces]
                turns = [("user", [writer.text(1200), *kept])]


def judge(writer: Writer) -> Iterator[Turns]:
    judges = writer.texts(4, 800)
    while True:
        task, candidates = writer.text(500), writer.texts(6, 1500)
        for system in judges:
            shown = writer.draw.sample(candidates, len(candidates))
            pieces = [piece for number, text in enumerate(shown, 1) for piece in (f"\nDocument {number}:\n", text)]
            yield [("system", [system]), ("user", [task, *pieces])]


KINDS: dict[str, Callable[[Writer], Iterator[Turns]]] = {
    "rag": rag, "chat": chat, "agent": agent, "compaction": lambda writer: agent(writer, True), "judge": judge,
}  # fmt: skip


@dataclass
class Truth:
    """Characters of all requests: in a beginning that an earlier one has, in pieces of an earlier one, and in all."""

    total: int = 0
    prefix: int = 0
    moved: int = 0
    pieces: int = 0


def requests(kind: str, count: int, seed: int = 0) -> Iterator[tuple[dict[str, Any], Truth]]:
    """Requests, and what is true of all up to each."""
    writer, truth = Writer(seed), Truth()
    starts, pieces_known = set[tuple[str, ...]](), set[str]()
    for number, turns in zip(range(count), KINDS[kind](writer), strict=False):
        pieces = [piece for _, listed in turns for piece in listed]
        keys = [tuple(pieces[:end]) for end in range(1, len(pieces) + 1)]
        held = next((i for i, key in enumerate(keys) if key not in starts), len(keys))
        truth.total += sum(map(len, pieces))
        truth.prefix += sum(map(len, pieces[:held]))
        truth.moved += sum(len(piece) for piece in pieces[held:] if piece in pieces_known)
        truth.pieces += len(pieces)
        starts.update(keys)
        pieces_known.update(pieces)
        messages = [{"role": role, "content": "".join(listed)} for role, listed in turns]
        yield {"time": _START + 30 * number, "model": "any", "messages": messages}, truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, help="of rag")
    parser.add_argument("--out", type=Path, required=True, help="compressed, if it ends in .zst")
    options = parser.parse_args()
    if options.documents is not None:
        KINDS["rag"] = lambda writer: rag(writer, options.documents)
    lines = (json.dumps(record) + "\n" for record, _ in requests(options.kind, options.requests, options.seed))
    data = "".join(lines).encode()
    options.out.write_bytes(zstandard.compress(data, 19) if options.out.suffix == ".zst" else data)


if __name__ == "__main__":
    main()

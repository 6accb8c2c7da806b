"""What one copy of a document in a server's KV blocks would save over a copy for each request: a simulation.

    python -m benchmarks.shared_pages --out benchmarks/results/shared_pages.json    # a minute

Requests of `benchmarks.traffic` run `--running` at a time. Today vLLM's blocks are shared where all before them is
equal (*own*: an equal linked beginning counts as equal). If keys were stored before their rotation, a document would
have one copy wherever it stands (*shared*), but for the k tokens that the policy computes for each request. Documents
are the pieces of text that stand after different beginnings; all else is shared as today. Counted in tokens of 4
characters: KV that the running requests hold, and document tokens that a request copies into blocks, if a pool of
blocks keeps the last used.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.output import write_results
from benchmarks.traffic import KINDS, Turns, Writer

CHARACTERS, LEAST = 4, 64  # of a token; tokens of a document that is linked
Pages = dict[tuple[str, ...], int]  # what a block's content depends on: tokens


@dataclass
class Request:
    """The pages of a request in own copies, and with shared ones; and which own ones are documents."""

    own: Pages = field(default_factory=dict)
    shared: Pages = field(default_factory=dict)
    documents: list[tuple[str, ...]] = field(default_factory=list)


def documents_of(requests: list[Turns]) -> set[str]:
    """The pieces of at least `LEAST` tokens that stand after different beginnings."""
    beginnings: dict[str, tuple[str, ...]] = {}
    found = set[str]()
    for turns in requests:
        before: tuple[str, ...] = ()
        for piece in (piece for _, pieces in turns for piece in pieces):
            if beginnings.setdefault(piece, before) != before and len(piece) >= LEAST * CHARACTERS:
                found.add(piece)
            before = (*before, piece)
    return found


def request_of(turns: Turns, known: set[str], k: int) -> Request:
    """A request's pages; `known` are the documents, of which k tokens are computed."""
    request = Request()
    before: tuple[str, ...] = ()
    for piece in (piece for _, pieces in turns for piece in pieces):
        tokens = max(1, len(piece) // CHARACTERS)
        before = (*before, piece)
        request.own[before] = request.shared[before] = tokens
        if piece in known:
            request.shared[before], request.shared[piece,] = min(k, tokens), tokens - min(k, tokens)
            request.documents.append(before)
    return request


def held(pages: Sequence[Pages], running: int) -> float:
    """Mean tokens that so many requests hold, one after another."""
    windows = (pages[i : i + running] for i in range(len(pages) - running + 1))
    return fmean(sum({page: size for each in window for page, size in each.items()}.values()) for window in windows)


class Pool:
    """Pages of at most so many tokens, the last used ones."""

    def __init__(self, tokens: int) -> None:
        self._pages, self._left = OrderedDict[tuple[str, ...], int](), tokens

    def missing(self, pages: Pages) -> Pages:
        """Bring a request's pages in; returns those that were not there."""
        lacking = {page: size for page, size in pages.items() if page not in self._pages}
        for page, size in pages.items():
            self._left -= 0 if page in self._pages else size
            self._pages[page] = size
            self._pages.move_to_end(page)
        while self._left < 0 and self._pages:
            self._left += self._pages.popitem(last=False)[1]
        return lacking


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a kind of traffic holds and copies, in both forms."""
    all_turns = [
        [(role, [*pieces]) for role, pieces in turns]
        for turns in islice(KINDS[kind](Writer(options.seed)), options.requests)
    ]
    known = documents_of(all_turns)
    requests = [request_of(turns, known, options.k) for turns in all_turns]
    steady = requests[len(requests) // 2 :]
    own = held([request.own for request in steady], options.running)
    shared = held([request.shared for request in steady], options.running)
    copied = {tokens: _copied(requests, tokens) for tokens in options.pools}
    return {"kind": kind, "own": own, "shared": shared, "times": own / shared, "copied": copied}


def _copied(requests: list[Request], tokens: int) -> dict[str, float]:
    """Mean tokens of documents that a request of the second half copies into a pool of so many."""
    own, shared, counts = Pool(tokens), Pool(tokens), list[tuple[int, int]]()
    for request in requests:
        lacking, lacking_shared = own.missing(request.own), shared.missing(request.shared)
        counts.append((
            sum(lacking.get(page, 0) for page in request.documents),
            sum(lacking_shared.get((page[-1],), 0) for page in request.documents),
        ))  # fmt: skip
    half = counts[len(counts) // 2 :]
    return {"own": fmean(each[0] for each in half), "shared": fmean(each[1] for each in half)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--running", type=int, default=16, help="requests at a time")
    parser.add_argument("--k", type=int, default=16, help="tokens of each document that the policy computes")
    parser.add_argument("--pools", type=int, nargs="*", default=[65_536, 262_144, 1_048_576], help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [measure(kind, options) for kind in KINDS]
    for row in rows:
        print(row)
    write_results(options.out, {"running": options.running, "k": options.k, "rows": rows})


if __name__ == "__main__":
    main()

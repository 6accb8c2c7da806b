"""Damaged files of queries' runs, under the command that reads them."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, ClassVar

from hostile.judge import Case, Step
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import check_json
from hostile.values import dumps, mutate_bytes, mutate_tree

PATH = Path("run/run.json")
RUN: dict[str, Any] = {
    "format": "pic query run", "version": 1, "answer": "yes", "error": None, "query": {"user": "a"},
    "optimised": {"user": "a"}, "steps": [], "shared": {},
    "nodes": [
        {"lead": "", "label": "G max_tokens=1", "path": []}, {"lead": "└─ ", "label": "+", "path": ["g", "input"]},
    ],
    "calls": [{
        "node": [], "trace": "0001.trace", "path": "the query", "shared": False, "seconds": 0.5, "spans": [[0, 1]],
        "object": None, "answer": "yes", "algo": "naive", "timing": {"ttft_s": 0.25},
        "tokens": {"context": 8, "recomputed": 2.0, "prompt": 11, "generated": 1},
    }],
}  # fmt: skip


class Runs(Surface):
    name: ClassVar[str] = "runs"
    weight: ClassVar[int] = 1

    def make(self, draw: random.Random) -> Case:
        PATH.parent.mkdir()
        kind = draw.choice(("tree", "tree", "tree", "bytes", "else"))
        data = copy.deepcopy(RUN)
        if kind == "tree":
            what = " and ".join(mutate_tree(data, draw) for _ in range(draw.choice((1, 1, 2, 3))))
            PATH.write_bytes(dumps(data).encode("utf-8", "replace"))
        elif kind == "bytes":
            changed, what = mutate_bytes(dumps(data).encode(), draw)
            PATH.write_bytes(changed)
        else:
            what = put_something_else(PATH, draw, self.scene.root / "outside")
        arguments = ("inspect", draw.choice((PATH.parent, PATH)), *draw.choice(((), ("--json",))))
        return Case(what, (Step(arguments, (str(PATH), "run"), check_json(arguments)),))

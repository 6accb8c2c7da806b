"""What the tests of many users share: small users, workloads of them, and a dataset in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pictool.bench.traffic import Traffic, Workload, make_workload
from pictool.bench.users import RandomUsers, User, make_user_sets
from pictool.linker.grid import parse_grid
from pictool.runtime.model import Model

USERS = RandomUsers(chunks=2, chunk_tokens=9, tail_tokens=4, new_tokens=3)
POLICIES = parse_grid(["legolink-2", "naive"])


def workload_of(model: Model, users: Sequence[User], counts: Sequence[int] = (2,), **traffic: Any) -> Workload:
    options = {"rates": (2.0,), "repeats": 2, "requests": 7, **traffic}
    return make_workload(POLICIES, make_user_sets(model, users, counts, memory=10**6), Traffic(**options))


def write_dataset(path: Path, answers: Sequence[str]) -> Path:
    """Two document sets, the questions of the first apart from each other."""
    harbour = [{"text": "The harbour was quiet."}, {"text": "It holds a festival."}]
    numbers = [{"text": "Numbers stand here too."}]
    lines = [
        {"documents": documents, "query": f"What is {i}?", "answers": [gold], "id": f"q{i}"}
        for i, (documents, gold) in enumerate(zip((harbour, numbers, harbour), answers, strict=True))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

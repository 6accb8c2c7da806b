"""A policy of another package, found by its entry point: every command runs with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands.conftest import TEXT
from commands.run import write

POLICY = '''
from dataclasses import dataclass
from typing import ClassVar

from pictool.linker.policies.base import Knob, Policy, Selection, no_rows


@dataclass(frozen=True)
class Strided(Policy):
    """Every n-th row, so that `share` of them are computed. `k` is a text."""

    name: ClassVar[str] = "strided"
    reference: ClassVar[str] = "no paper"
    knob: ClassVar[Knob] = Knob("share", is_share=True)
    share: float = 0.25
    k: str = "none"

    def select(self, prompt):
        rows = no_rows(prompt.layout)
        rows[:: max(1, round(1 / self.share))] = True
        return Selection(rows)
'''
RUN = """
import json, sys
from commands.run import pic
from pictool.controller import profile

profile._PREFILL_TOKENS, profile._LOADS = (64, 128), ((1, 64), (4, 8))  # measured in no time
print(json.dumps({name: vars(pic(*arguments)) for name, arguments in json.load(sys.stdin).items()}))
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What PYTHONPATH is to be for a process that has the other package installed."""
    root = tmp_path_factory.mktemp("site")
    write(root / "my_policy.py", POLICY)
    write(root / "my_policy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: my-policy\nVersion: 1.0\n")
    write(root / "my_policy-1.0.dist-info/entry_points.txt", "[pictool.policies]\nstrided = my_policy:Strided\n")
    return os.pathsep.join(map(str, (root, ROOT, ROOT / "tests")))


@dataclass(frozen=True)
class Ran:
    """What every command gave, and the directory in which they ran one after the other."""

    outcomes: dict[str, Any]
    directory: Path

    def json(self, name: str) -> Any:
        outcome = self.outcomes[name]
        assert outcome["code"] == 0, outcome["err"]
        return json.loads(outcome["out"])


@pytest.fixture(scope="module")
def ran(packages: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    root = tmp_path_factory.mktemp("ran")
    for name in "ab":
        write(root / f"{name}.txt", TEXT)
    write(root / "q.jsonl", json.dumps({"documents": ["a.txt", "b.txt"], "query": "Who?", "answers": ["nobody"]}))
    link = ("link", "a.txt", "b.txt", "-q", "Who knows why?", "--separator", "", "--max-new-tokens", 2,
            "-m", str(model), "--json")  # fmt: skip
    bench = ("--shape", "tiny", "--device", "cpu", "--repeats", 1, "--chunk-tokens", 8, "--algo",
             "strided-50", "--json")  # fmt: skip
    commands: dict[str, tuple[Any, ...]] = {
        "link": (*link, "--algo", "strided:share=0.5", "--compare", "--trace", "a.trace"),
        "other link": (*link, "--algo", "naive", "--trace", "b.trace"),
        "inspect": ("inspect", "a.trace", "--json"),
        "diff": ("inspect", "a.trace", "b.trace", "--diff", "--json"),
        "plan": ("plan", "a.txt", "--algo", "strided", "-m", str(model), "--json"),
        "eval": ("eval", "q.jsonl", "--algo", "strided:share=.5,1", "--max-new-tokens", 2,
                 "--json"),
        "bench": ("bench", *bench, "--chunks", 2, "--new-tokens", 1),
        "wrong name": (*link, "--algo", "strange"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(commands), capture_output=True, text=True, check=False, cwd=root,
        env=os.environ | {"PYTHONPATH": packages, "XDG_CACHE_HOME": str(root / "cache")}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    yield Ran(json.loads(done.stdout.splitlines()[-1]), root)


def test_link_recomputes_what_the_policy_selects(ran: Ran) -> None:
    report = ran.json("link")
    assert (report["algo"], report["params"]) == ("strided", {"share": 0.5, "k": "none"})
    assert report["tokens"]["recomputed"] == (report["tokens"]["context"] + 1) // 2
    assert report["compare"]["kl"] >= 0


def test_its_traces_are_read(ran: Ran) -> None:
    assert ran.json("inspect")["algo"] == "strided"
    assert ran.json("diff")["tokens"]["only_a"]


def test_it_is_planned_evaluated_and_measured(ran: Ran) -> None:
    assert (ran.json("plan")["algo"], ran.json("plan")["ratio"]) == ("strided", 0.25)
    assert [line["label"] for line in ran.json("eval")["lines"]] == ["full", "strided-50", "strided-100"]
    assert "strided-50" in [entry["label"] for entry in ran.json("bench")["results"]["methods"]]


def test_a_wrong_name_lists_it(ran: Ran) -> None:
    outcome = ran.outcomes["wrong name"]
    assert outcome["code"] == 2 and "'strange': must be one of" in outcome["err"] and "strided" in outcome["err"]

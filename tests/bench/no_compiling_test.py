"""Every object that a policy needs is compiled before a bench measures: no measured link compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from pictool.bench.options import PromptOptions
from pictool.bench.prompts import with_speculative
from pictool.bench.shapes import save_speculative
from pictool.bench.sync import bench_sync
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.policies import policies as all_policies
from pictool.runtime.model import Model

PROMPT = PromptOptions(chunks=3, chunk_tokens=20, tail_tokens=6, new_tokens=2, repeats=1)
REPEATABLE = [name for name, policy in all_policies().items() if not policy().needs.chain_block]


@pytest.fixture(autouse=True)
def _refuse_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled within a link")

    monkeypatch.setattr("pictool.linker.objects.compile_chunks", refuse)


@pytest.fixture
def policies(tmp_path: Path) -> list[LabelledPolicy]:
    return with_speculative(parse_grid(REPEATABLE), save_speculative("tiny", str(tmp_path / "small")))


def test_sync(model: Model, policies: list[LabelledPolicy], tmp_path: Path) -> None:
    bench_sync(model, policies, PROMPT, tmp_path)

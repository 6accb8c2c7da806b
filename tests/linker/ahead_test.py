"""Compiling what a link needs before it: the same objects, a forward of the model each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny

from pictool.compiler.compile import Compiled
from pictool.core import Text
from pictool.errors import InputError
from pictool.linker.ahead import compile_in_steps
from pictool.linker.grid import parse_policy
from pictool.linker.link import link
from pictool.linker.spec import Spec
from pictool.runtime import prefill
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store

TEXTS = ["The harbour was quiet.", "Nobody knows why.", "She asked for the tabs of the harbour, and for lines.", "No."]


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


def spec(policy: str, texts: Sequence[str] = (*TEXTS, TEXTS[0])) -> Spec:
    return Spec("Why?", [Text(text, f"{i}") for i, text in enumerate(texts)], parse_policy(policy), "Be brief.")


@pytest.mark.parametrize("tokens", [1, 24, 512])
@pytest.mark.parametrize(
    "policy", ["naive", "legolink-4", "legolink-13", "legolink-0", "cacheblend-30", "fixup-20", "full", "prefix"]
)
def test_a_link_finds_the_objects_that_it_would_have_made(
    model: Model, tmp_path: Path, policy: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_PACK_TOKENS", tokens)
    alone, stepped = Store(tmp_path / "alone"), Store(tmp_path / "stepped")
    want: list[Compiled] = []
    got: list[Compiled] = []
    later: list[Compiled] = []
    link(model, alone, spec(policy), on_compile=want.append)
    steps = sum(1 for _ in compile_in_steps(model, stepped, spec(policy), got.append))
    assert [(done.chunk.source, done.key) for done in got] == [(done.chunk.source, done.key) for done in want]
    if policy != "prefix":
        assert [path.read_bytes() for path in map(stepped.path, sorted(alone.keys()))] == [
            alone.path(key).read_bytes() for key in sorted(alone.keys())
        ]
    assert (
        steps == len(got) if tokens == 1 else steps <= (2 if tokens == 512 else len(got))
    )  # the head is of its own kind
    link(model, stepped, spec(policy), on_compile=later.append)
    assert not later and not list(compile_in_steps(model, stepped, spec(policy), later.append))


def test_what_is_wrong_with_a_document_is_told_and_a_store_that_cannot_be_written_is_left_to_the_link(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(InputError, match="has no tokens"):
        list(compile_in_steps(model, store, spec("naive", ["a", ""])))
    (tmp_path / "file").touch()
    warnings: list[str] = []
    unwritable = Store(tmp_path / "file" / "store")
    unwritable.on_warning = warnings.append
    assert list(compile_in_steps(model, unwritable, spec("naive"))) == []
    assert link(model, unwritable, spec("naive")).rows.any() and warnings

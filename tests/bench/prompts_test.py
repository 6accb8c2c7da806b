"""Random prompts have the tokens that were asked for, and their texts give these tokens again."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import subjects

from pictool.bench.prompts import (
    needs_speculative,
    random_chunks,
    random_tail,
    require_disk,
    require_positions,
    with_speculative,
)
from pictool.bench.shapes import random_model
from pictool.errors import InputError
from pictool.linker.grid import parse_grid
from pictool.runtime.model import Model, load_model

MODELS = {
    "shape": lambda: random_model("tiny"),
    "embedded-small": lambda: load_model("embedded-small"),  # another vocabulary
    "no whole words": lambda: subjects.subject("llama").model,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


@pytest.mark.parametrize("tokens", [1, 2, 31, 512])
def test_chunks_and_tails_have_exactly_these_tokens(model: Model, tokens: int) -> None:
    chunks = random_chunks(model, 3, tokens, seed=0)
    assert [len(chunk) for chunk in chunks] == [tokens] * 3
    assert len(model.encode(random_tail(model, tokens))) == tokens


def test_texts_give_their_tokens_again_and_only_known_ones(model: Model) -> None:
    for chunk in random_chunks(model, 4, 64):
        assert model.encode(chunk.text) == chunk.tokens
        assert max(chunk.tokens) < model.config.vocab_size


def test_chunks_differ_and_a_seed_gives_them_again() -> None:
    model = random_model("tiny")
    first, again, other = (random_chunks(model, 3, 50, seed) for seed in (0, 0, 1))
    assert first == again and not {*first} & {*other} and len({*first}) == 3
    assert random_chunks(model, 5, 50)[:3] == first
    assert random_tail(model, 50) not in [chunk.text for chunk in first]


def test_no_tokens_are_refused() -> None:
    with pytest.raises(InputError, match=" 0 "):
        random_tail(random_model("tiny"), 0)


def test_a_tokenizer_that_gives_no_text_its_tokens_again_is_refused() -> None:
    model = random_model("tiny")
    backwards = SimpleNamespace(name="odd", tokenizer=model.tokenizer, encode=lambda text: model.encode(text[::-1]))
    with pytest.raises(InputError, match=r"^odd: .*--shape"):
        random_chunks(backwards, 1, 8)  # type: ignore[arg-type]


def test_only_speccache_without_a_model_gets_one() -> None:
    policies = parse_grid(["full", "speccache-15", "speccache-15:spec_model=mine"])
    filled = with_speculative(policies, "dir")
    assert [labelled.label for labelled in filled] == [labelled.label for labelled in policies]
    assert [labelled.policy.params.get("spec_model") for labelled in filled] == [None, "dir", "mine"]
    assert needs_speculative(policies) and not needs_speculative(filled) and not needs_speculative(policies[:1])


def test_a_full_disk_and_a_long_prompt_are_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    require_disk(tmp_path, 10**9)
    with pytest.raises(InputError, match=rf"^{tmp_path}: 1\.5 GB .* 1\.0 GB .*--store"):
        require_disk(tmp_path, 15 * 10**8)
    model = random_model("tiny")
    require_positions(model, 131072, "less")
    with pytest.raises(InputError, match=r" 131073 .* 131072 "):
        require_positions(model, 131073, "less")

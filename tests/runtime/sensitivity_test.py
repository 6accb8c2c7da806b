"""Probes and fixup tables, against transformers' own forward on probe + chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch

from pictool.core import FixupTable
from pictool.runtime import sensitivity
from pictool.runtime.model import Model, wrap_model
from pictool.runtime.sensitivity import Probes, cut_at_lines, fixup_tables, make_probes, probes_of

COUNT, LENGTH = 4, 12
LENGTHS = [20, 23, 1, 21, 2, 22]


def make_model(architecture: str, seed: int = 0) -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS[architecture](), seed), tiny.tokenizer(), architecture)


def random_chunks(lengths: list[int] = LENGTHS) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, tiny.VOCAB, length).tolist() for length in lengths]


def tables(model: Model, probes: Probes, chunks: list[list[int]], alone: bool = False) -> list[FixupTable]:
    by_index = dict(fixup_tables(model, probes, chunks, alone))
    return [by_index[index] for index in range(len(chunks))]


def forward(module: Any, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Per layer the keys before rotation, [batch, n, kv_heads, head_dim], and the logits, by transformers."""
    keys: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _, __, out: keys.append(out))
        for layer in module.model.layers
    ]
    with torch.no_grad():
        logits = module(tokens).logits
    for hook in hooks:
        hook.remove()
    return [key.view(*key.shape[:2], -1, tiny.SIZE["head_dim"]) for key in keys], logits


@pytest.mark.parametrize(
    ("architecture", "length"), [("llama", 20), ("llama3", 20), ("mistral-window", 20), ("qwen2", 20), ("llama", 300)]
)
def test_a_table_is_what_the_formula_says_of_transformers_own_forward(architecture: str, length: int) -> None:
    model, (chunk,) = make_model(architecture), random_chunks([length])
    probes = make_probes(model, COUNT, LENGTH)
    module = reference.eager(model.module)
    own, _ = forward(module, probes.tokens)
    keys, logits = forward(module, torch.cat([probes.tokens, torch.tensor([chunk] * COUNT)], 1))
    room = model.max_positions - 1 - length  # too little for all 300
    after_itself, _ = forward(module, torch.tensor([[0, *chunk[-room:], *chunk]]))
    by_probes = by_itself = torch.zeros(length)
    for of_probes, key, again in list(zip(own, keys, after_itself, strict=True))[1:]:
        spread = of_probes[:, 1:].flatten(0, 1).var(0, correction=0).sum(-1)  # [kv_heads]
        share = key[:, LENGTH:].var(0, correction=0).sum(-1) / spread
        by_probes = torch.maximum(by_probes, share.amax(1))
        moved = (again[0, -length:] - key[:, LENGTH:].mean(0)).square().sum(-1) / spread
        by_itself = torch.maximum(by_itself, moved.amax(1))
    p = logits[:, LENGTH - 1 : -1].softmax(-1)[:, torch.arange(length), chunk].mean(0)
    (table,) = tables(model, probes, [chunk])
    assert table.dtype == np.float16 and (room < length) == (length == 300)
    wanted = (by_probes + by_itself) / 2 * (1 - p).clamp_min(0.1)
    np.testing.assert_allclose(table, wanted.numpy(), rtol=2e-3, atol=1e-4)
    assert float(by_probes.max()) > 0.01 < float(by_itself.max())


def test_a_token_that_is_expected_keeps_a_tenth_of_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score of 0 could never be chosen, however much its key depends on what precedes it."""
    model, (chunk,) = make_model("llama"), random_chunks([20])
    probes = make_probes(model, COUNT, LENGTH)
    monkeypatch.setattr(sensitivity, "_improbability", lambda *_: torch.ones(20))
    (unexpected,) = tables(model, probes, [chunk])
    monkeypatch.setattr(sensitivity, "_improbability", lambda *_: torch.zeros(20))
    (expected,) = tables(model, probes, [chunk])
    np.testing.assert_allclose(expected, 0.1 * unexpected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("architecture", [name for name in tiny.CONFIGS if name not in tiny.HYBRIDS])
def test_bit_for_bit_again_and_the_same_in_any_batch(architecture: str) -> None:
    model, chunks = make_model(architecture), random_chunks()
    probes = make_probes(model, COUNT, LENGTH)
    together, again = tables(model, probes, chunks), tables(model, probes, chunks)
    for table, repeated in zip(together, again, strict=True):
        assert table.tobytes() == repeated.tobytes()
    for table, chunk, alone in zip(together, chunks, tables(model, probes, chunks, alone=True), strict=True):
        assert len(table) == len(chunk) and np.isfinite(table).all() and (table >= 0).all()
        # half precision itself is 2^-10 apart; where a score is next to nothing, so is its error
        np.testing.assert_allclose(table.astype(float), alone.astype(float), rtol=1e-3, atol=1e-6)


def test_probes_depend_on_the_model_only() -> None:
    first, same, other = (make_probes(make_model("llama", seed), COUNT, LENGTH).tokens for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert first.shape == (COUNT, LENGTH) and (first[:, 0] == 0).all()
    assert len({tuple(row) for row in first.tolist()}) == COUNT


def test_probes_hold_no_special_token_but_the_first() -> None:
    model = make_model("llama")
    inside = make_probes(model, 8, 40).tokens[:, 1:].flatten().tolist()
    assert not set(inside) & {model.bos_id, *model.eos_ids}


def test_probes_are_sampled_from_the_model_itself() -> None:
    """The model finds its own text likelier than that of a model with other weights."""
    model, other = make_model("llama"), make_model("llama", seed=1)

    def likelihood(tokens: torch.Tensor) -> float:
        logits = reference.eager(model.module)(tokens).logits[:, :-1]
        return -float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))

    with torch.no_grad():
        assert likelihood(make_probes(model, 8, 40).tokens) > likelihood(make_probes(other, 8, 40).tokens)


def test_probes_end_where_a_line_does_if_one_does() -> None:
    model = make_model("llama")
    (line,), word = model.encode("\n"), 50
    texts = torch.tensor([[0, 7, 8, 9, line, word, word], [0, 1, 2, line, 3, 4, 5]])
    assert cut_at_lines(model, texts, 4).tolist() == [[0, 8, 9, line], [0, 1, 2, line]]
    assert cut_at_lines(model, texts, 6).tolist()[1] == [0, 2, line, 3, 4, 5]


def test_probes_are_kept_and_a_damaged_file_is_made_again(tmp_path: Any) -> None:
    made = probes_of(make_model("llama"), COUNT, LENGTH)
    (path,) = (tmp_path / "cache").rglob("*.safetensors")
    whole = path.read_bytes()
    read = probes_of(make_model("llama"), COUNT, LENGTH)
    assert torch.equal(made.tokens, read.tokens)
    assert all(
        torch.equal(a, b)
        for kv, kv_read in zip(made.layers, read.layers, strict=True)
        for a, b in zip(kv, kv_read, strict=True)
    )
    for damaged in (whole[:-3], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b""):
        path.write_bytes(damaged)
        assert torch.equal(probes_of(make_model("llama"), COUNT, LENGTH).tokens, made.tokens)
        assert path.read_bytes() == whole


def test_what_was_kept_is_what_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probes_of(make_model("llama"), COUNT, LENGTH)

    def refuse(*_: Any) -> Any:
        raise AssertionError("made again")

    monkeypatch.setattr("pictool.runtime.sensitivity.make_probes", refuse)
    probes_of(make_model("llama"), COUNT, LENGTH)
    with pytest.raises(AssertionError):
        probes_of(make_model("llama"), COUNT, LENGTH + 1)


def test_nothing_is_left_of_probes_that_cannot_be_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fails)
    made = probes_of(make_model("llama"), COUNT, LENGTH)
    assert made.tokens.shape == (COUNT, LENGTH)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]

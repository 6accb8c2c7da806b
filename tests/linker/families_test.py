"""Every supported family against `transformers`: the rules in short, and that they see one wrong detail.

exactness_test.py has the whole tables; of the long tail they run in CI only.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
import torch
from flips import NEAR, difference_but_at_ties, find_flips, routed, routers_of
from subjects import (
    FAMILIES,
    LENGTH_DEPENDENT,
    LENGTHS,
    PLACED,
    Subject,
    make_chunks,
    max_difference,
    parts_of,
    run,
    subject,
)
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from pictool.errors import ModelError
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.runtime import architectures
from pictool.runtime.architectures import ARCHITECTURES, REFUSED, WRAPPERS, decoder_of, rotary_of, text_config
from pictool.runtime.decode import generate
from pictool.runtime.model import load_model, wrap_model
from pictool.runtime.support import require_in_vllm, require_supported
from pictool.store.store import Store

EXACT = 1e-4


def model_types() -> set[str]:
    return {text_config(config()).model_type for config in tiny.CONFIGS.values()}


def test_every_family_of_the_registry_is_a_row_and_none_is_refused() -> None:
    assert model_types() == {kind for kind in ARCHITECTURES if kind in CONFIG_MAPPING}
    wrappers = {kind for kind in WRAPPERS if kind in CONFIG_MAPPING}
    assert {config().model_type for config in tiny.CONFIGS.values()} >= wrappers
    assert len(ARCHITECTURES) >= 25
    assert not set(ARCHITECTURES) & set(REFUSED)


@pytest.mark.parametrize("name", [name for name in tiny.CONFIGS if name not in FAMILIES])
def test_a_family_is_exact(name: str, store: Store) -> None:
    """Rules 2 to 5, each by one policy: of the families that exactness_test.py leaves to CI."""
    one, chunks = subject(name), make_chunks(LENGTHS)
    full = run(one, store, make_policy("full", {}), chunks)
    tokens = sum(parts_of(full), [])
    dense = reference.full(one.reference, tokens)
    assert max_difference(full, dense) <= EXACT
    is_hybrid = name in tiny.HYBRIDS
    for policy, fields in (("legolink", {"k": 1000}), ("cacheblend", {"ratio": 1}))[: 1 if is_hybrid else 2]:
        assert max_difference(run(one, store, make_policy(policy, fields), chunks), dense) <= EXACT

    linked = run(one, store, make_policy("legolink", {"k": 4}), chunks)
    for part in ("key", "value") if one.model.stack.kv_layers[0] == 0 else ():
        assert float((getattr(linked.image, part)(0) - getattr(full.image, part)(0)).abs().max()) <= 1e-5
    if name not in (*LENGTH_DEPENDENT, *PLACED, *tiny.HYBRIDS):
        rows = torch.from_numpy(linked.rows[0])
        assert max_difference(linked, reference.link(one.reference, parts_of(linked), rows)) <= EXACT

    wanted = one.reference.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0, len(tokens) :]
    assert list(generate(one.model, full.image, 8).tokens) == wanted.tolist()


# What is made wrong in our model alone, by family: the tests above would see each.


def _change_theta(module: Any) -> None:
    for name, buffer in rotary_of(decoder_of(module)).named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(1.05)


def _widen_window(module: Any) -> None:
    for layer in decoder_of(module).layers:
        if getattr(layer.self_attn, "sliding_window", None):
            layer.self_attn.sliding_window += 3
    config = decoder_of(module).config
    if getattr(config, "sliding_window", None):
        config.sliding_window += 3


def _shift(parameter: str, by: float = 0.5) -> Callable[[Any], None]:
    """Change the first element, or row, of every parameter or buffer whose name ends so."""

    def change(module: Any) -> None:
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        changed = [tensor for name, tensor in named.items() if name.endswith(parameter)]
        assert changed
        for tensor in changed:
            (tensor.data[0] if len(tensor) > 1 else tensor.data.view(-1)[:1]).add_(by)

    return change


def _set(field: str, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        assert getattr(module.config, field) != value
        setattr(module.config, field, value)

    return change


def _scale_far_queries(module: Any) -> None:
    module.config.rope_parameters.update(llama_4_scaling_beta=0.4)


WINDOWED = ("mistral-window", "gemma2", "gemma3", "olmo3", "cohere2", "exaone4", "ministral3", "starcoder2", "gpt_oss")
UNROTATED = ("olmo_hybrid-unrotated", "granitemoehybrid", "nemotron_h", "kimi_linear")
WRONG: list[tuple[str, str, Callable[[Any], None]]] = [
    *((name, "theta", _change_theta) for name in tiny.CONFIGS if name not in (*LENGTH_DEPENDENT, *UNROTATED)),
    *((name, "decay", _shift("A_log", 2.0)) for name in ("qwen3_next", "bamba", "falcon_h1", "nemotron_h")),
    *((name, "convolution", _shift("conv1d.weight")) for name in ("qwen3_5", "kimi_linear", "granitemoehybrid")),
    ("lfm2", "convolution", _shift("conv.conv.weight")),
    *((name, "window", _widen_window) for name in WINDOWED),
    ("gpt_oss", "sinks", _shift("self_attn.sinks")),
    ("gpt_oss", "expert bias", _shift("experts.down_proj_bias")),
    *((name, "expert bias", _shift("e_score_correction_bias", 5.0)) for name in ("deepseek_v3", "glm4_moe_lite")),
    ("mistral4", "router", _shift("gate.weight", 2.0)),
    ("deepseek_v2", "router", _shift("gate.weight", 2.0)),
    ("deepseek_v3", "latent norm", _shift("kv_a_layernorm.weight")),
    ("glm4_moe", "expert bias", _shift("e_score_correction_bias", 5.0)),
    ("minimax_m2", "expert bias", _shift("e_score_correction_bias", 5.0)),
    ("ernie4_5_moe", "expert bias", _shift("e_score_correction_bias", 5.0)),
    *((name, "router", _shift("gate.weight", 2.0)) for name in ("mixtral", "qwen3_moe", "olmoe")),
    ("granitemoe", "router", _shift("router.weight", 2.0)),
    ("llama4", "attention chunk", _set("attention_chunk_size", 31)),
    ("ministral3-far", "scale of far queries", _scale_far_queries),
]  # fmt: skip


def spoilt(name: str, change: Callable[[Any], None]) -> Subject:
    """Our model with one thing changed, beside the unchanged one of `transformers`."""
    module = copy.deepcopy(tiny.random_module(tiny.CONFIGS[name]()))
    with torch.no_grad():
        change(module)
    return replace(subject(name), model=wrap_model(module, tiny.tokenizer(), name))


@pytest.mark.parametrize(("name", "change"), [pytest.param(n, c, id=f"{n}-{what}") for n, what, c in WRONG])
def test_one_wrong_detail_is_seen(name: str, change: Callable[[Any], None], store: Store) -> None:
    one = spoilt(name, change)
    linked = run(one, store, make_policy("full", {}), make_chunks(LENGTHS))
    assert max_difference(linked, reference.full(one.reference, sum(parts_of(linked), []))) > EXACT


KNOWN_WRONG = [
    *((name, "halves instead of pairs") for name in ("glm4", "ernie4_5", "ernie4_5_moe", "llama4", "deepseek_v2")),
    *((name, "pairs instead of halves") for name in ("llama", "deepseek_v3", "glm4_moe_lite", "gpt_oss")),
    *((name, "RoPE at all layers") for name in ("cohere2", "exaone4", "smollm3", "llama4")),
    *((name, "no scale of embeddings") for name in ("granite", "granitemoe")),
]


def _by_halves(modeling: Any, x: torch.Tensor, table: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Half-split rotation, whatever the model has."""
    cos, sin = table if len(table) == 2 else (torch.cat([part, part], -1) for part in (table[0].real, table[0].imag))
    cos, sin = cos[:, None], sin[:, None]
    turned, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-high, low], -1) * sin, passed], -1)


def _by_pairs(modeling: Any, x: torch.Tensor, table: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rotation of neighbours, whatever the model has."""
    half = x.shape[-1] // 2
    angles = torch.complex(table[0][..., :half], table[1][..., :half])[:, None]
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], half, 2).contiguous()) * angles).flatten(
        -2
    )


@pytest.mark.parametrize(("name", "what"), KNOWN_WRONG)
def test_a_wrong_line_of_the_registry_is_seen(
    name: str, what: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = text_config(tiny.CONFIGS[name]()).model_type
    changes: dict[str, dict[str, Any]] = {
        "halves instead of pairs": {"rotation": _by_halves},
        "pairs instead of halves": {"rotation": _by_pairs},
        "RoPE at all layers": {"is_rotated": lambda attention: True},
        "no scale of embeddings": {"embedding_scale": None},
    }
    registry = {**ARCHITECTURES, kind: replace(ARCHITECTURES[kind], **changes[what])}
    monkeypatch.setattr(architectures, "ARCHITECTURES", registry)
    one = spoilt(name, lambda module: None)
    linked = run(one, store, make_policy("naive", {}), make_chunks(LENGTHS))  # full rotates in the model's own layers
    rows = torch.from_numpy(linked.rows[0])
    assert max_difference(linked, reference.link(one.reference, parts_of(linked), rows)) > EXACT


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
WITH_EXPERTS = [
    name for name, config in tiny.CONFIGS.items() if any(getattr(text_config(config()), key, 0) for key in EXPERTS)
]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_chosen_alike_but_at_near_ties(name: str, store: Store) -> None:
    one, module = subject(name), subject(name).reference
    with routed(one.model.module) as ours:
        linked = run(one, store, make_policy("full", {}), make_chunks(LENGTHS))
    with routed(module) as theirs:
        reference.full(module, sum(parts_of(linked), []))
    assert theirs.keys() == ours.keys() and theirs
    flips = find_flips(theirs, ours, torch.from_numpy(linked.rows))
    assert all(flip.gap < NEAR for flip in flips), f"choices differ at {flips}"


@pytest.mark.parametrize(("policy", "fields"), [("full", {}), ("cacheblend", {"ratio": 1})])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_flip_at_a_tie_is_reported_and_its_rows_are_not_compared(
    name: str, policy: str, fields: dict[str, Any], store: Store
) -> None:
    """Two experts that tie in all rows: a last bit in our scores chooses the other one, and numbers differ."""
    module = copy.deepcopy(tiny.random_module(tiny.CONFIGS[name]()))
    layer, router = routers_of(module)[0]
    with torch.no_grad():
        router.weight[1] = router.weight[0]
        for named in ("bias", "e_score_correction_bias"):
            if getattr(router, named, None) is not None:
                getattr(router, named)[1] = getattr(router, named)[0]
    theirs = reference.eager(module)
    with torch.no_grad():
        routers_of(theirs)[0][1].weight[1].mul_(1 + 1e-6)
    one = Subject(wrap_model(module, tiny.tokenizer(), name), theirs)

    def link() -> Linked:
        return run(one, store, make_policy(policy, fields), make_chunks(LENGTHS))

    linked = link()
    assert max_difference(linked, reference.full(theirs, sum(parts_of(linked), []))) > EXACT
    with pytest.warns(UserWarning, match="gap="):
        apart, flips = difference_but_at_ties(one, link, near=1e-4)
    assert apart <= EXACT and {flip.layer for flip in flips} == {layer}
    with pytest.raises(AssertionError, match="Flip"):
        difference_but_at_ties(one, link, near=0.0)


def test_of_a_wrapper_the_language_model_is_loaded(tmp_path: Path, store: Store) -> None:
    """From a directory, as it is saved: nothing of images stays in memory; a text with an image's place is refused."""
    config = tiny.CONFIGS["in gemma3"]()
    config.image_token_index = 300  # a token that texts have
    directory = tiny.save_model(tmp_path / "model", config)
    model = load_model(str(directory))
    assert model.target.architecture == "gemma3_text"
    assert not any("vision" in name or "projector" in name for name, _ in model.module.named_parameters())
    one = Subject(model, reference.eager(AutoModelForImageTextToText.from_pretrained(directory)))
    linked = run(one, store, make_policy("full", {}), make_chunks(LENGTHS))
    assert max_difference(linked, reference.full(one.reference, sum(parts_of(linked), []))) <= EXACT
    place = model.tokenizer.decode([300])
    with pytest.raises(ModelError, match=f"^{directory}: .*{re.escape(place)}"):
        model.encode(f"What is in {place}?" if 300 in model.tokenizer.encode(f"What is in {place}?") else place)


def test_a_wrapper_around_an_unsupported_language_model_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mistral3", text_config=AutoConfig.for_model("stablelm").to_dict())
    with pytest.raises(ModelError, match=r"^a model: .*'stablelm'"):
        require_supported(config, "a model")


@pytest.mark.parametrize("kind", ["deepseek_v4", "gemma3n", "gemma4", "never_heard_of"])
def test_a_directory_is_refused_by_its_type_before_anything_else_is_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": "wrong"}))
    with pytest.raises(ModelError, match=f"^{tmp_path}: .*'{kind}'.*{re.escape(REFUSED.get(kind, ''))}"):
        load_model(str(tmp_path))


def test_what_vllm_is_not_tested_with_is_refused_by_name() -> None:
    for name in ("llama", "gemma3", "gpt_oss", "deepseek_v3"):
        require_in_vllm(tiny.CONFIGS[name](), "a model")
    with pytest.raises(ModelError, match=r"^a model: .*'glm4_moe'.* vLLM .*--engine torch"):
        require_in_vllm(tiny.CONFIGS["glm4_moe"](), "a model")

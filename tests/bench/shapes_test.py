"""Shapes are those of the models they are named after; random models of them compute what `transformers` computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
import subjects
import torch
from alone import link
from transformers import AutoModelForCausalLM

from pictool.bench.shapes import random_model, random_module, save_speculative, shape_of, shapes
from pictool.errors import InputError
from pictool.fidelity.transformers_module import transformers_module
from pictool.linker.policies import make_policy
from pictool.runtime.model import load_model, wrap_model
from pictool.store.store import Store

# Parameters and bytes of KV per token in bfloat16, as published.
PUBLISHED = {
    "llama-3.1-8b": (8_030_261_248, 131_072),
    "llama-3.2-1b": (1_235_814_400, 32_768),
    "qwen2.5-0.5b": (494_032_768, 12_288),
    "qwen2.5-7b": (7_615_616_512, 57_344),
    "qwen3-8b": (8_190_735_360, 147_456),
    "mistral-7b-v0.3": (7_248_023_552, 131_072),
    "yi-6b": (6_061_035_520, 65_536),
    "phi-3-mini-4k": (3_821_079_552, 393_216),
    "qwen3-30b-a3b": (30_532_122_624, 98_304),
    "gpt-oss-20b": (20_914_757_184, 49_152),
    "deepseek-v2-lite": (15_706_484_224, 31_104),
    "gemma-3-12b": (11_766_034_176, 393_216),
}


NARROW = {
    "moe_intermediate_size": 16, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "query_pre_attn_scalar": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_parameters_and_kv(name: str) -> None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(shape_of(name).make_config(), dtype=torch.bfloat16)
    model = wrap_model(module, load_model("embedded").tokenizer)
    assert (sum(weight.numel() for weight in module.parameters()), model.token_bytes) == PUBLISHED[name]


@pytest.mark.parametrize("name", shapes())
def test_every_shape_made_narrow_computes_what_transformers_does(name: str, store: Store) -> None:
    config = shape_of(name).make_config()
    heads = config.num_attention_heads
    narrow = {"hidden_size": 8 * heads, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 1500}
    narrow |= {"head_dim": 8} if "head_dim" in shape_of(name).config else {}
    narrow |= {field: size for field, size in NARROW.items() if field in shape_of(name).config}
    narrow |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    module = random_module(shape_of(name).make_config(**narrow), "cpu", "float32", 0)
    model = wrap_model(module, load_model("embedded").tokenizer)
    chunks = subjects.make_chunks((9, 30))
    linked = link(model, store, chunks, "Which year?", make_policy("full", {}))
    ids = torch.from_numpy(linked.image.layout.tokens.astype("int64"))[None]
    for other in (reference.eager(module), transformers_module(model)):
        with torch.inference_mode():
            logits = other(ids).logits[0, -1]
        assert linked.image.logits is not None
        assert (linked.image.logits - logits).abs().max() <= 1e-4


def test_every_shape_names_a_smaller_one_that_reads_for_it() -> None:
    for name, shape in shapes().items():
        small = shape_of(shape.speculative)
        sizes = [each.config["hidden_size"] * each.config["num_hidden_layers"] for each in (small, shape)]
        assert sizes[0] < sizes[1] or name == small.name == "tiny-half"


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (random_model("tiny", "cpu", "float32", seed) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_random_numbers_go_on_as_if_no_model_had_been_made() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    random_model("tiny")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_random_model_is_in_its_dtype_and_finite(dtype: str, store: Store) -> None:
    model = random_model("tiny", "cpu", dtype)
    assert model.dtype == dtype and {weight.dtype for weight in model.module.parameters()} == {getattr(torch, dtype)}
    logits = link(model, store, subjects.make_chunks((40,)), "Why?", make_policy("full", {})).image.logits
    assert logits is not None and logits.isfinite().all()


def test_auto_is_float32_on_a_cpu() -> None:
    assert (random_model("tiny").device, random_model("tiny").dtype) == (load_model().device, load_model().dtype)


def test_unknown_names_are_refused_with_what_is_known() -> None:
    with pytest.raises(InputError, match=r"^--shape gpt-5: "):
        random_model("gpt-5")
    with pytest.raises(InputError, match="dtype 'int8'"):
        random_model("tiny", "cpu", "int8")


def test_a_speculative_model_is_a_directory_for_speccache(tmp_path: Path) -> None:
    directory = save_speculative("tiny", str(tmp_path / "small"))
    small = load_model(directory, "cpu", "float32")
    assert small.geometry.layers == 1 and small.max_positions == random_model("tiny").max_positions
    assert small.target.tokenizer == random_model("tiny").target.tokenizer

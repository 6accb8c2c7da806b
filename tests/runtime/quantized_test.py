"""Checkpoints of quantized weights, against numbers that are decoded here, and refusals before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from subjects import LENGTHS, Subject, make_chunks, max_difference, parts_of, run
from transformers import AutoConfig, AutoModelForCausalLM, TorchAoConfig

from pictool.errors import ModelError
from pictool.linker.policies import make_policy
from pictool.runtime import checkpoint
from pictool.runtime.model import load_model
from pictool.store.store import Store

# float4 e2m1 by its codes.
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def set_quantization(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.fixture
def mxfp4(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A gpt-oss whose experts are random blocks of 32 codes with an exponent each; and what they stand for."""
    more = {"sliding_window": 12, "layer_types": tiny.WINDOWED, "intermediate_size": 32}
    config = AutoConfig.for_model("gpt_oss", **{**tiny.SIZE, **tiny.EXPERTS, **more})
    directory = tiny.save_model(tmp_path / "model", config)
    weights, decoded = load_file(directory / "model.safetensors"), dict[str, torch.Tensor]()
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=draw)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()  # the low half first
        numbers = FP4[codes] * torch.exp2(scales.float() - 127)[..., None]
        decoded[name] = numbers.flatten(-2).transpose(1, 2)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    set_quantization(directory, quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    return directory, decoded


def test_mxfp4_is_dequantized_to_the_numbers_that_its_codes_stand_for(
    mxfp4: tuple[Path, dict[str, torch.Tensor]], store: Store
) -> None:
    directory, decoded = mxfp4
    model = load_model(str(directory), "cpu", "float32")
    weights = model.module.state_dict()
    assert len(decoded) == 6
    for name, numbers in decoded.items():
        assert torch.equal(weights[name], numbers)
    one = Subject(model, reference.eager(model.module))
    linked = run(one, store, make_policy("legolink", {"k": 1000}), make_chunks(LENGTHS))
    assert max_difference(linked, reference.full(one.reference, sum(parts_of(linked), []))) <= 1e-4


def test_the_memory_is_said_before_it_is_taken(
    mxfp4: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(mxfp4[0]), "cpu", "float32")
    assert model._loading_text().startswith(f"dequantizing the weights of {mxfp4[0]} to float32 (")
    monkeypatch.setattr("pictool.runtime.machine.memory_bytes", lambda: 1000)
    with pytest.raises(ModelError, match=f"^{mxfp4[0]}: .* float32 .* cpu .*--dtype bfloat16"):
        _ = model.module


def test_the_fingerprint_covers_quantized_weights_and_their_configuration(
    mxfp4: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    directory, _ = mxfp4
    first = load_model(str(directory)).fingerprint
    assert load_model(str(directory)).fingerprint == first
    set_quantization(directory, quant_method="mxfp4", modules_to_not_convert=["lm_head", "embed_tokens"])
    other = load_model(str(directory)).fingerprint
    weights = load_file(directory / "model.safetensors")
    weights[next(name for name in weights if name.endswith("_blocks"))][0, 0, 0, 0] ^= 1
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    assert len({first, other, load_model(str(directory)).fingerprint}) == 3


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "modelopt", None])
def test_other_quantizations_are_refused_by_name_before_weights_are_read(method: str | None, tmp_path: Path) -> None:
    directory = tiny.save_model(tmp_path / "model", tiny.CONFIGS["llama"]())
    set_quantization(directory, quant_method=method)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"^{directory}: .*'{method}'"):
        load_model(str(directory))


@pytest.mark.parametrize("kind", [{"default": {"_type": "Int4WeightOnlyConfig"}}, "int4_weight_only", None])
def test_other_kinds_of_torchao_are_refused_by_name_before_weights_are_read(kind: Any, tmp_path: Path) -> None:
    directory = tiny.save_model(tmp_path / "model", tiny.CONFIGS["llama"]())
    set_quantization(directory, quant_method="torchao", quant_type=kind)
    (directory / "model.safetensors").unlink()
    named = kind["default"]["_type"] if isinstance(kind, dict) else kind
    with pytest.raises(ModelError, match=f"^{directory}: .*torchao.*{named!r}"):
        load_model(str(directory))


def test_a_missing_package_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.runtime.checkpoint.find_spec", lambda package: None)
    directory = tiny.save_model(tmp_path / "model", tiny.CONFIGS["llama"]())
    set_quantization(directory, quant_method="compressed-tensors")
    with pytest.raises(ModelError, match=r"pip install 'pictool\[quantized\]'"):
        load_model(str(directory))


@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_tensors_are_dequantized(bits: int, tmp_path: Path) -> None:
    """Integers of one scale per output channel, packed by the library: off by half a step at most."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    module = tiny.random_module(tiny.CONFIGS["llama"]())
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"],
        quant_method="compressed-tensors", format="pack-quantized", quantization_status="frozen",
    )  # fmt: skip
    apply_quantization_config(module, config)
    for layer in module.modules():
        if hasattr(layer, "weight_scale"):
            scale = layer.weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            layer.weight_scale.data = scale.to(layer.weight_scale.dtype)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(module)
    module.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)

    loaded = load_model(str(tmp_path), "cpu", "float32").module.state_dict()
    for name, weight in before.items():
        is_linear = "proj" in name
        step = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1) if is_linear else torch.zeros(1)
        assert bool(((loaded[name] - weight).abs() <= step / 2 * 1.01).all())
        assert torch.equal(loaded[name], weight) is not is_linear


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_fp8_of_weights_and_activations_is_dequantized_to_the_numbers_that_its_codes_stand_for(
    strategy: str, scheme: str, tmp_path: Path
) -> None:
    """W8A8 as llm-compressor writes it for vLLM: one scale per output channel, or of a whole weight.

    Static schemes have a scale of the activations beside each weight, of which nothing is kept.
    """
    pytest.importorskip("compressed_tensors")
    directory = tiny.save_model(tmp_path / "model", tiny.CONFIGS["llama"]())
    weights, decoded = load_file(directory / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in weights if "proj" in name]:
        scale = weights[name].abs().amax(1, keepdim=True) / 448
        scale = scale if strategy == "channel" else scale.max().view(1)
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = scale
        decoded[name] = weights[name].float() * scale
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    if is_static := scheme == "static":
        weights |= {f"{name.removesuffix('weight')}input_scale": torch.tensor([0.02]) for name in decoded}
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
    of_activations = "tensor" if is_static or strategy == "tensor" else "token"
    activations = {**kind, "strategy": of_activations, "dynamic": not is_static}
    group = {"targets": ["Linear"], "weights": {**kind, "strategy": strategy}, "input_activations": activations}
    set_quantization(
        directory, quant_method="compressed-tensors", format="float-quantized", config_groups={"group_0": group},
        ignore=["lm_head"], quantization_status="compressed",
    )  # fmt: skip
    loaded = load_model(str(directory), "cpu", "float32").module.state_dict()
    assert decoded and all(torch.equal(loaded[name], numbers) for name, numbers in decoded.items())


def test_fp8_of_blocks_is_dequantized_to_the_numbers_that_its_codes_stand_for(tmp_path: Path) -> None:
    """One scale for up to 128 × 128 weights, as DeepSeek's checkpoints have it."""
    pytest.importorskip("accelerate")
    directory = tiny.save_model(tmp_path / "model", tiny.CONFIGS["llama"]())
    weights, decoded = load_file(directory / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in weights if "proj" in name]:
        scale = weights[name].abs().max() / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.view(1, 1)
        decoded[name] = weights[name].float() * scale
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    set_quantization(directory, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
    loaded = load_model(str(directory), "cpu", "float32").module.state_dict()
    assert decoded and all(torch.equal(loaded[name], numbers) for name, numbers in decoded.items())


def save_torchao(tmp_path: Path, kind: str, **fields: Any) -> Path:
    """A tiny model that torchao quantized, as `transformers` writes it."""
    quantization = pytest.importorskip("torchao.quantization")
    plain, directory = tiny.save_model(tmp_path / "plain", tiny.CONFIGS["llama"]()), tmp_path / "model"
    settings = TorchAoConfig(getattr(quantization, kind)(**fields))
    module = AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings, dtype=torch.float32)
    module.save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory


def decoded_torchao(path: Path) -> dict[str, torch.Tensor]:
    """What the codes of torchao's safetensors stand for: (code - zero point) * scale, each of a part of a row."""
    stored, decoded = load_file(path), dict[str, torch.Tensor]()
    for name in [name for name in stored if name.endswith("_weight_qdata")]:
        base = name.removesuffix("qdata")
        codes, scale = stored[name].float(), stored[f"{base}scale"].float()
        shift = stored.get(f"{base}zero_point", torch.zeros(1)).float()
        spread = [
            part.repeat_interleave(codes.shape[1] // part.shape[1], 1) if part.ndim == 2 else part
            for part in (shift, scale)
        ]
        decoded[name.replace("_weight_qdata", "weight")] = (codes - spread[0]) * spread[1]
    return decoded


@pytest.mark.parametrize("kind", checkpoint._OF_TORCHAO)
def test_torchao_is_dequantized_to_the_numbers_that_its_codes_stand_for(
    kind: str, tmp_path: Path, store: Store
) -> None:
    """And our forward is `transformers`' own over torchao's tensors, where these quantize no activations."""
    quantization = pytest.importorskip("torchao.quantization")
    fields = {"weight_granularity": quantization.PerGroup(16)} if kind.startswith("Int8DynamicActivationIntx") else {}
    directory = save_torchao(tmp_path, kind, **fields)
    model, numbers = load_model(str(directory), "cpu", "float32"), decoded_torchao(directory / "model.safetensors")
    weights = model.module.state_dict()
    assert len(numbers) == 21 and all(type(weight) is torch.Tensor for weight in weights.values())
    for name, wanted in numbers.items():
        torch.testing.assert_close(weights[name], wanted, rtol=1e-6, atol=1e-7)
    if "Dynamic" not in kind:
        one = Subject(model, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
        linked = run(one, store, make_policy("full", {}), make_chunks(LENGTHS))
        assert max_difference(linked, reference.full(one.pristine, sum(parts_of(linked), []))) <= 1e-4


def test_the_fingerprint_covers_how_torchao_codes_are_read(tmp_path: Path) -> None:
    """It is in the metadata of the file: the same codes are other weights if it says so."""
    directory = save_torchao(tmp_path, "Int8WeightOnlyConfig")
    first, file = load_model(str(directory)).fingerprint, directory / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    changed = {name: text.replace("float32", "bfloat16") for name, text in metadata.items()}
    assert changed != metadata
    save_file(load_file(file), file, changed)
    assert load_model(str(directory)).fingerprint != first

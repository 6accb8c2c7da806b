"""Options with which linking does not work are refused at start-up, by name."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import vllm_rig as rig
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from pictool.engines.vllm.client.setup import make_setup
from pictool.engines.vllm.request import SECRET
from pictool.errors import InputError, PicError


class _Group:
    def __init__(self, spec: Any) -> None:
        self.kv_cache_spec, self.layer_names = spec, ["model.layers.0.self_attn.attn"]


class _Caches:
    def __init__(self, *specs: Any) -> None:
        self.kv_cache_groups = [_Group(spec) for spec in specs]


def full_attention() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> rig.World:
    return rig.make_world(tmp_path_factory.mktemp("setup"), "llama")


def config_of(world: rig.World, transfer: dict[str, Any] | None = None, **options: Any) -> Any:
    fields = {
        "kv_connector": "PicConnector", "kv_connector_module_path": rig.MODULE, "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"store": str(world.store.root)},
        **(transfer or {}),
    }  # fmt: skip
    arguments = {"model": str(world.directory), "dtype": "float32", "kv_transfer_config": KVTransferConfig(**fields)}
    return EngineArgs(**{**arguments, **options}).create_engine_config()


def test_what_is_supported_opens(world: rig.World) -> None:
    setup = make_setup(config_of(world), _Caches(full_attention()))  # type: ignore[arg-type]
    assert setup.target == world.model.target


def test_weights_that_changed_while_they_were_loaded_are_refused(world: rig.World) -> None:
    for fingerprint, is_refused in ((None, False), (world.model.fingerprint, False), ("0" * 64, True)):
        extra = {"store": str(world.store.root), "fingerprint": fingerprint}
        setup = make_setup(config_of(world, {"kv_connector_extra_config": extra}), _Caches(full_attention()))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="weights changed") if is_refused else nullcontext():
            setup.require_fingerprint()


REFUSED_TRANSFER: dict[str, tuple[dict[str, Any], str]] = {
    "failure policy": ({"kv_load_failure_policy": "fail"}, 'kv_load_failure_policy other than "recompute"'),
    "role": ({"kv_role": "kv_consumer"}, "kv_role"),
    "no store": ({"kv_connector_extra_config": {}}, '"store"'),
    "unknown field": ({"kv_connector_extra_config": {"store": "x", "stroe": 1}}, "stroe"),
    "recognise": ({"kv_connector_extra_config": {"store": "x", "recognise": "yes"}}, "recognise"),
    "policy": ({"kv_connector_extra_config": {"store": "x", "policy": "magic"}}, "magic"),
    "min_tokens": ({"kv_connector_extra_config": {"store": "x", "min_tokens": 0}}, "min_tokens"),
}


@pytest.mark.parametrize("name", list(REFUSED_TRANSFER))
def test_transfer_options_that_are_refused(world: rig.World, name: str) -> None:
    transfer, message = REFUSED_TRANSFER[name]
    with pytest.raises(InputError, match=message):
        make_setup(config_of(world, transfer), _Caches(full_attention()))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dummy weights": ({"load_format": "dummy"}, "load_format dummy"),
    "overrides": ({"hf_overrides": {"rope_theta": 5.0}}, "hf_overrides"),
    "revision": ({"revision": "main"}, "revision"),
    "pipeline": ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
    "embeddings": ({"runner": "pooling", "convert": "embed"}, "pooling models"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_options_that_are_refused(world: rig.World, name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(InputError, match=message) as error:
        make_setup(config_of(world, **options), _Caches(full_attention()))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_cache_of_another_dtype_is_refused(world: rig.World) -> None:
    """By vLLM itself from 0.33 on."""
    with pytest.raises(Exception, match="kv_cache_dtype"):
        make_setup(config_of(world, kv_cache_dtype="bfloat16"), _Caches(full_attention()))  # type: ignore[arg-type]


@pytest.mark.parametrize("secret", ["", "shared"])
def test_nothing_is_compiled_from_coded_kv(world: rig.World, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not be what `pic compile` makes. A router that shares the secret compiles."""
    monkeypatch.setenv(SECRET, secret)
    extra = {"store": str(world.store.root), "compile": not secret}
    config = config_of(world, {"kv_connector_extra_config": extra}, kv_cache_dtype="fp8")
    with pytest.raises(InputError, match=r"--kv-cache-dtype fp8: .* coded KV") as error:
        make_setup(config, _Caches(full_attention()))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_drafts_of_a_model_are_refused(world: rig.World) -> None:
    drafts = {"method": "draft_model", "model": str(world.directory), "num_speculative_tokens": 2}
    with pytest.raises(InputError, match="n-grams") as error:
        make_setup(config_of(world, speculative_config=drafts), _Caches(full_attention()))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


QUANTIZED: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "format": "int-quantized", "config_groups": {"all": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }},
    },
    "fp8": {"activation_scheme": "dynamic"},
}  # fmt: skip


@pytest.mark.parametrize("method", list(QUANTIZED))
def test_quantized_weights_are_refused(method: str, tmp_path: Path) -> None:
    """vLLM computes with them, where objects are of weights that were dequantized."""
    quantized = rig.make_world(tmp_path, "llama")
    path = quantized.directory / "config.json"
    path.write_text(json.dumps({
        **json.loads(path.read_text()), "quantization_config": {"quant_method": method, **QUANTIZED[method]}
    }))  # fmt: skip
    with pytest.raises(InputError, match="quantized weights") as error:
        make_setup(config_of(quantized, dtype="bfloat16"), _Caches(full_attention()))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("beside", ["OffloadingConnector", "PicConnector"])
def test_connectors_beside_it_are_refused(world: rig.World, beside: str) -> None:
    """vLLM's own offloading, and any other connector of a `MultiConnector`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    own = {
        "kv_connector": "PicConnector", "kv_connector_module_path": rig.MODULE, "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"store": str(world.store.root)},
    }  # fmt: skip
    other = {"kv_connector": beside, "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    both = [own, other] if beside != "PicConnector" else [own, own]
    config = config_of(world, {"kv_connector": "MultiConnector", "kv_connector_module_path": None,
                               "kv_connector_extra_config": {"connectors": both}})  # fmt: skip
    with pytest.raises(InputError, match="MultiConnector ") as error:
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, _Caches(full_attention()))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_families_that_are_not_tested_are_refused(world: rig.World, tmp_path: Path) -> None:
    """Among them those that vLLM runs by the code of transformers, which has no rotary embedding in its layers."""
    config = tiny.CONFIGS["olmo2"]()
    other = tiny.save_model(tmp_path / "olmo2", config)
    with pytest.raises(PicError, match=r"'olmo2' .* vLLM") as error:
        make_setup(config_of(world, model=str(other)), _Caches(full_attention()))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


# What cannot be configured for a tiny Llama is set on the configuration that vLLM would have made.
SET: dict[str, tuple[str, str, Any, str]] = {
    "context parallel": ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
    "overlap": ("parallel_config", "enable_dbo", True, "dual-batch"),
    "torchao": ("model_config", "quantization", "torchao", "quantized weights"),
    "tokenizer": ("model_config", "tokenizer", "elsewhere", "a tokenizer of its own"),
}


@pytest.mark.parametrize("name", list(SET))
def test_configurations_that_are_refused(world: rig.World, name: str) -> None:
    part, field, value, message = SET[name]
    config = config_of(world)
    object.__setattr__(getattr(config, part), field, value)
    with pytest.raises(InputError, match=message):
        make_setup(config, _Caches(full_attention()))  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "message"), [("uses_mrope", "M-RoPE"), ("is_multimodal_model", "multimodal")])
def test_models_that_are_refused(world: rig.World, field: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(world)
    monkeypatch.setattr(type(config.model_config), field, property(lambda _: True))
    with pytest.raises(InputError, match=message):
        make_setup(config, _Caches(full_attention()))  # type: ignore[arg-type]


LATENTS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "RoPE": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, True, "unscaled RoPE"),
    "halves": ({"rope_interleave": False}, True, "vLLM rotates pairs"),
    "heads": ({}, False, "VLLM_MLA_DISABLE"),
}


@pytest.mark.parametrize("name", list(LATENTS))
def test_latents_that_are_rotated_another_way_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, is_mla, message = LATENTS[name]
    latents = rig.make_world(tmp_path, "deepseek_v3")
    path = latents.directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    monkeypatch.setattr("vllm.envs.VLLM_MLA_DISABLE", not is_mla)
    with pytest.raises(InputError, match=message) as error:
        make_setup(config_of(latents), _Caches(full_attention()))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_why_latents_with_a_rope_that_is_not_scaled_are_refused() -> None:
    """vLLM's kernel for CPUs rotates wrongly what has a dimension for heads, as queries of latents. YaRN has none."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    positions, query, key = torch.arange(5), torch.randn(5, 4, 64), torch.randn(5, 1, 64)
    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": 1e4}
        rotary = get_rope(64, 512, is_neox_style=False, rope_parameters=parameters, dtype=torch.float32)
        right = rotary.forward_native(positions, query, key)[0]
        flat = rotary.forward_cpu(positions, query.flatten(1), key.flatten(1))[0]
        wrong = rotary.forward_cpu(positions, query.clone(), key.clone())[0]
    torch.testing.assert_close(flat.view_as(right), right)
    assert float((wrong - right).abs().max()) > 0.1


def test_a_vllm_without_what_the_connector_is_made_of_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the connector imports it."""
    monkeypatch.delitem(sys.modules, rig.MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    with pytest.raises(InputError, match=r"cache_hit_source\.CacheHitSource\.DISK") as error:
        importlib.import_module(rig.MODULE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", ["native", "lmcache"])
def test_an_option_that_replaces_the_connector_is_refused(world: rig.World, backend: str) -> None:
    with pytest.raises(InputError, match=r"--kv-offloading-size .* PicConnector .*Connector"):
        config_of(world, kv_offloading_size=1.0, kv_offloading_backend=backend)


def test_kinds_of_caches_that_are_refused(world: rig.World) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=48)
    mamba = MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))
    for specs, message in (
        ((window,), "SlidingWindowSpec"),
        ((mamba,), "MambaSpec"),
        ((full_attention(), mamba), "2 KV cache groups"),
    ):
        with pytest.raises(InputError, match=message):
            make_setup(config_of(world), _Caches(*specs))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["phi3-long", "llama-dynamic"])
def test_rope_that_depends_on_the_length_is_refused(name: str, tmp_path: Path) -> None:
    world = rig.make_world(tmp_path, name)
    with pytest.raises(PicError, match="RoPE"):
        make_setup(config_of(world), _Caches(full_attention()))  # type: ignore[arg-type]


def test_an_engine_does_not_start_with_them(tmp_path: Path) -> None:
    """Refused where it matters: the sliding window of every layer, whose blocks vLLM frees."""
    with pytest.raises(Exception, match="SlidingWindowSpec"):
        rig.Engine(rig.make_world(tmp_path, "mistral-window"))


def test_latents_of_other_backends_are_refused(tmp_path: Path) -> None:
    """vLLM's reference backend computes no prompt whose first tokens are cached."""
    with pytest.raises(Exception, match="CPU_MLA"):
        rig.Engine(rig.make_world(tmp_path, "deepseek_v3"), attention_backend="CPU_MLA")


def test_the_hybrid_manager_of_kv_caches_is_off(world: rig.World) -> None:
    """So that Gemma 2 and 3 have one group of full caches, as on a CPU; where it is forced on, vLLM refuses by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    config = config_of(world)
    assert not KVConnectorFactory.supports_hma_config(config.kv_transfer_config)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, None)  # type: ignore[arg-type]

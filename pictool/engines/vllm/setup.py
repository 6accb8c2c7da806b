"""Start-up: what a vLLM configuration must be for linking to be exact where it says so. All else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from pictool.core import Target
from pictool.engines.vllm.settings import Settings, parse_settings
from pictool.errors import InputError
from pictool.runtime.model import Model, load_model
from pictool.runtime.support import depends_on_length
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.engines.vllm.scheduler import SchedulerSide
    from pictool.engines.vllm.worker import WorkerSide

VERSION = "0.32."


@dataclass(frozen=True)
class Setup:
    """A configuration that can be linked in."""

    config: VllmConfig
    kv_cache_config: KVCacheConfig
    settings: Settings

    @cached_property
    def model(self) -> Model:
        """Tokenizer, shape and fingerprint of the model; its weights are vLLM's."""
        dtype = str(self.config.model_config.dtype).removeprefix("torch.")
        return load_model(str(self.config.model_config.model), self.settings.device, dtype)

    @property
    def target(self) -> Target:
        return self.model.target

    @property
    def store(self) -> Store:
        return Store(self.settings.store)

    def scheduler_side(self) -> SchedulerSide:
        from pictool.engines.vllm.planner import Planner
        from pictool.engines.vllm.scheduler import SchedulerSide

        return SchedulerSide(Planner(self.settings, self.store, self.model), self.settings.compile)

    def worker_side(self) -> WorkerSide:
        from pictool.engines.vllm.host import Host
        from pictool.engines.vllm.kv import Heads
        from pictool.engines.vllm.ranks import rank_and_size
        from pictool.engines.vllm.worker import WorkerSide

        heads = Heads.of(self.model.geometry.kv_heads, *rank_and_size())
        return WorkerSide(Host(self.config, self.kv_cache_config, heads), self.store, self.model)


def open_setup(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
    """The set-up of a server.

    Raises:
        InputError: names every option that linking does not go with.
        ModelError: an architecture that is not supported.
    """
    if found := [*_unsupported(config), *_unsupported_kv(kv_cache_config)]:
        raise InputError(f"PicConnector: {'; '.join(found)}")
    assert config.kv_transfer_config is not None
    setup = Setup(config, kv_cache_config, parse_settings(config.kv_transfer_config.kv_connector_extra_config))
    if depends_on_length(setup.model.config):
        raise InputError(
            "PicConnector: dynamic and long RoPE rotate by the length of the prompt, vLLM by that of the server; "
            "objects cannot match"
        )
    return setup


def _unsupported(config: VllmConfig) -> Iterator[str]:
    """What of a configuration linking does not go with, and what to do."""
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    assert transfer is not None
    refused = {
        f"vLLM {vllm.__version__} (install vllm=={VERSION}*)": not vllm.__version__.startswith(VERSION),
        'kv_load_failure_policy other than "recompute"': transfer.kv_load_failure_policy != "recompute",
        'kv_role other than "kv_both"': transfer.kv_role != "kv_both",
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "dual-batch overlap": bool(parallel.enable_dbo),
        "LoRA": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "MLA": model.use_mla,
        "M-RoPE": model.uses_mrope,
        "multimodal models": model.is_multimodal_model,
        "pooling models": model.runner_type != "generate",
        "quantized weights": model.quantization is not None,
        f"kv_cache_dtype {config.cache_config.cache_dtype}": config.cache_config.cache_dtype
        not in ("auto", _dtype(config)),
        "load_format dummy (objects are made for the checkpoint's weights)": config.load_config.load_format == "dummy",
        "hf_overrides (put the change into config.json)": bool(model.hf_overrides),
        "revision (give a directory)": model.revision is not None,
        "a tokenizer of its own": str(model.tokenizer) != str(model.model),
        "KV sharing fast prefill": bool(config.cache_config.kv_sharing_fast_prefill),
    }
    return (f"{name} is not supported" for name, is_wrong in refused.items() if is_wrong)


def _dtype(config: VllmConfig) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def _unsupported_kv(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield f"{len(groups)} groups of KV caches (hybrid models) are not supported"
    elif not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        yield f"a KV cache of kind {type(groups[0].kv_cache_spec).__name__} is not supported"

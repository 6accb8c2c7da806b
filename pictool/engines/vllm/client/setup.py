"""Start-up: the server's settings, and the vLLM options with which linking is not exact. Those are refused by name."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pictool.core import Target
from pictool.engines.vllm.request import SECRET, parse_codec, parse_policy
from pictool.errors import InputError
from pictool.linker.policies.base import Policy
from pictool.runtime.model import Model, load_model
from pictool.runtime.support import depends_on_length, require_in_vllm, rope_parameters
from pictool.store.signatures import Trust
from pictool.store.store import Store

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger("vllm.pictool")
DEFAULTS: dict[str, Any] = {
    "store": None, "policy": "auto", "recognise": False, "min_tokens": 16, "refresh_s": 10.0,
    "start_s": 60.0, "plan_s": 5.0, "codec": None, "compile": False,
    "device": "cpu", "any_model": False, "policies": None,
    "step_bytes": 32 << 20, "step_rows": 0, "step_ms": 0, "memory_bytes": 0, "max_bytes": None, "remote": None,
    "fingerprint": None, "require_signed": None, "signing_key": None,
}  # fmt: skip
_LEFT = {"decline", "show_problems"}  # fields of earlier versions
_TYPES: dict[str, type | tuple[type, ...]] = {
    "store": str, "recognise": bool, "min_tokens": int, "refresh_s": (int, float),
    "start_s": (int, float), "plan_s": (int, float), "codec": (str, type(None)), "compile": bool,
    "device": str, "any_model": bool, "policies": (list, type(None)),
    "step_bytes": int, "step_rows": int, "step_ms": (int, float), "memory_bytes": int, "max_bytes": (int, type(None)),
    "remote": (str, type(None)), "fingerprint": (str, type(None)),
    "require_signed": (str, type(None)), "signing_key": (str, type(None)),
}  # fmt: skip


@dataclass(frozen=True)
class ConnectorSettings:
    """The fields of `kv_connector_extra_config`.

    Attributes:
        store: directory of the objects.
        policy: policy of requests that name none.
        recognise: look for stored documents in requests that name none.
        min_tokens: the shortest document that is recognised.
        refresh_s: seconds between scans of the store for new objects.
        start_s: seconds that start-up waits for the first scan.
        plan_s: seconds within which a request must be planned; else it is computed exactly.
        codec: codec of recognised objects; by default any, a lossless one first.
        compile: let requests write objects, after pictool's own contexts or nothing; anyone who may send requests can
            then fill the store. A router that shares PIC_ROUTER_SECRET may in any case, after any text.
        device: device of the policy's small model (`speccache`).
        any_model: let requests name the small model; else only that of `policy` is loaded.
        policies: policies that requests may choose beside `policy`; by default all.
        step_bytes: bytes of objects that a step with other work copies at most.
        step_rows: rows that a step computes for links at most, and whose hidden states are kept; 0: one prefill chunk.
        step_ms: milliseconds that a step with other work spends on links at most; 0: 60 % of an
            ordinary step, at most 100 ms.
        memory_bytes: host memory of a worker for layers that it read.
        max_bytes: size limit of the store.
        remote: URL of a remote store, from which missing objects come.
        fingerprint: the model's before vLLM loads it: a server whose weights changed meanwhile does not start.
            `pic serve` sets it.
        require_signed: the list of signers (`default`: the user's) of which one must have signed an object; all others
            are absent. Objects that a worker compiles are then used only with a `signing_key`.
        signing_key: the private key (`default`: the user's) that signs what a worker compiles.
    """

    store: str
    policy: Policy
    recognise: bool
    min_tokens: int
    refresh_s: float
    start_s: float
    plan_s: float
    codec: str | None
    compile: bool
    device: str
    any_model: bool
    policies: tuple[str, ...] | None
    step_bytes: int
    step_rows: int
    step_ms: float
    memory_bytes: int
    max_bytes: int | None
    remote: str | None
    fingerprint: str | None = None
    require_signed: str | None = None
    signing_key: str | None = None

    def open_store(self, memory_bytes: int = 0) -> Store:
        """The store, with warnings in vLLM's log. Raises InputError: signers or a key that cannot be used."""
        return Store(
            self.store, self.max_bytes, remote=self.remote, memory_bytes=memory_bytes, on_warning=_log.warning,
            trust=Trust.open(self.require_signed, self.signing_key),
        )  # fmt: skip


def parse_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Parse `kv_connector_extra_config`.

    Raises:
        InputError: no store, an unknown field, or a value that does not fit.
    """
    if "serve" in extra_config:
        raise InputError("kv_connector_extra_config: serve: vLLM has no router; use pic serve --upstream")
    if unknown := sorted(set(extra_config) - {*DEFAULTS, *_LEFT}):
        raise InputError(f"kv_connector_extra_config has no field {unknown[0]!r}; its fields are {', '.join(DEFAULTS)}")
    for name in extra_config.keys() & _LEFT:
        _log.warning("pic: kv_connector_extra_config no longer has the field %r; remove it", name)
    values = {name: extra_config.get(name, default) for name, default in DEFAULTS.items()}
    if values["store"] is None:
        raise InputError('kv_connector_extra_config: "store" must name the directory of the objects')
    for field, kind in _TYPES.items():
        if not isinstance(values[field], kind) or (isinstance(values[field], bool) and kind is not bool):
            raise InputError(f"kv_connector_extra_config: {field}={values[field]!r} has the wrong type")
    for field, least in (("step_bytes", 1), ("step_rows", 0), ("step_ms", 0), ("memory_bytes", 0), ("max_bytes", 0)):
        if values[field] is not None and values[field] < least:
            raise InputError(f"kv_connector_extra_config: {field}={values[field]} must be {least} or more")
    if values["min_tokens"] < 1:
        raise InputError("kv_connector_extra_config: min_tokens must be 1 or more")
    for field in ("refresh_s", "start_s", "plan_s"):
        if not 0 < values[field] <= threading.TIMEOUT_MAX:
            raise InputError(f"kv_connector_extra_config: {field}={values[field]} must be above 0")
    parse_codec(values["codec"])
    if values["policies"] is not None:
        for name in values["policies"]:
            parse_policy({"algo": name})
        values["policies"] = tuple(values["policies"])
    return ConnectorSettings(**{**values, "policy": parse_policy(values["policy"])})


@dataclass(frozen=True)
class Setup:
    """A vLLM configuration that linking supports, with the connector's settings."""

    config: VllmConfig
    kv_cache_config: KVCacheConfig
    settings: ConnectorSettings

    @cached_property
    def model(self) -> Model:
        """Tokenizer, geometry and fingerprint of the model. Its weights are not loaded: vLLM has them."""
        return load_model(str(self.config.model_config.model), self.settings.device, _dtype_of(self.config))

    @property
    def target(self) -> Target:
        return self.model.target

    def require_fingerprint(self) -> None:
        """Take the fingerprint, after vLLM has loaded the weights, and compare it with that of before.

        Raises:
            InputError: they differ. ModelError: a weight file that cannot be read.
        """
        if self.settings.fingerprint not in (None, self.target.model):
            raise InputError(f"{self.model.name}: its weights changed while vLLM was loading them; start it again")

    @cached_property
    def store(self) -> Store:
        return self.settings.open_store(self.settings.memory_bytes)


def make_setup(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
    """Check a vLLM configuration.

    Raises:
        InputError: names every option that linking does not support.
        ModelError: an architecture that is not supported.
    """
    if problems := [*_unsupported_options(config), *_unsupported_caches(kv_cache_config)]:
        raise InputError(f"PicConnector: {'; '.join(problems)}")
    assert config.kv_transfer_config is not None
    setup = Setup(config, kv_cache_config, parse_settings(config.kv_transfer_config.kv_connector_extra_config))
    if setup.settings.compile or os.environ.get(SECRET):
        _require_uncoded(config)
    require_in_vllm(setup.model.config, setup.model.name)
    if setup.model.geometry.others:
        _require_latents(setup.model.config, config.model_config.use_mla)
    if depends_on_length(setup.model.config):
        raise InputError(
            "PicConnector: dynamic and long RoPE depend on the prompt's length, in vLLM on the server's; "
            "objects cannot match, so use another model"
        )
    return setup


def _require_uncoded(config: VllmConfig) -> None:
    """Refuse to compile over a KV cache that is coded: the objects would not be those of `pic compile`.

    Raises:
        InputError: names the option.
    """
    if _is_fp8_on_cpu(config):
        raise InputError(
            f"--kv-cache-dtype {config.cache_config.cache_dtype}: vLLM would compile objects from coded KV; "
            "compile with pic compile, and unset the connector's field compile and PIC_ROUTER_SECRET"
        )


def _is_fp8_on_cpu(config: VllmConfig) -> bool:
    """Whether the KV cache is fp8 where links were compared; latents' is not, nor that of a GPU."""
    is_cpu = config.device_config.device_type == "cpu" and not config.model_config.use_mla
    return is_cpu and config.cache_config.cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")


def _unsupported_options(config: VllmConfig) -> Iterator[str]:
    """The options with which linking does not work, and what to do."""
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    cache_dtype = config.cache_config.cache_dtype
    assert transfer is not None
    is_right = cache_dtype in ("auto", _dtype_of(config)) or _is_fp8_on_cpu(config)
    refused = {
        'kv_load_failure_policy other than "recompute"': transfer.kv_load_failure_policy != "recompute",
        'kv_role other than "kv_both"': transfer.kv_role != "kv_both",
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "dual-batch overlap": bool(parallel.enable_dbo),
        "speculative decoding other than by n-grams": (
            config.speculative_config is not None and config.speculative_config.method != "ngram"
        ),
        "M-RoPE": model.uses_mrope,
        "multimodal models": model.is_multimodal_model,
        "pooling models": model.runner_type != "generate",
        "quantized weights": model.quantization is not None,
        f"kv_cache_dtype {cache_dtype}": not is_right,
        "load_format dummy (objects are made for the checkpoint's weights)": config.load_config.load_format == "dummy",
        "hf_overrides (put the change into config.json)": bool(model.hf_overrides),
        "revision (give a directory)": model.revision is not None,
        "a tokenizer of its own": str(model.tokenizer) != str(model.model),
        "KV sharing fast prefill": bool(config.cache_config.kv_sharing_fast_prefill),
        "MultiConnector (a connector beside this one keeps blocks without its salts)": _is_one_of_several(),
    }
    return (f"{option} is not supported" for option, is_set in refused.items() if is_set)


def _is_one_of_several() -> bool:
    """Whether a `MultiConnector` makes this connector. The configuration hides it; the call stack does not."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), MultiConnector):
            return True
        frame = frame.f_back
    return False


def _require_latents(config: PretrainedConfig, is_mla: bool) -> None:
    """Refuse a model of latents (MLA) whose KV vLLM keeps, or whose keys it rotates, another way.

    Raises:
        InputError: says which.
    """
    if not is_mla:
        raise InputError("PicConnector: latents cached as keys and values (VLLM_MLA_DISABLE) are not supported")
    if any(parameters["rope_type"] == "default" for parameters in rope_parameters(config)):
        raise InputError(
            "PicConnector: latents (MLA) with an unscaled RoPE are not supported: on a CPU vLLM rotates "
            "them wrongly, even in ordinary requests"
        )
    if not getattr(config, "rope_interleave", True):
        raise InputError("PicConnector: latents (MLA) with rope_interleave=false are not supported: vLLM rotates pairs")


def _unsupported_caches(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield f"{len(groups)} KV cache groups (hybrid models; --disable-hybrid-kv-cache-manager) are not supported"
    elif not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        yield f"a KV cache of kind {type(groups[0].kv_cache_spec).__name__} is not supported"


def _dtype_of(config: VllmConfig) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")

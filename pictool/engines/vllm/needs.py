"""What `PicConnector` needs of vLLM. Any version that has it is tried, and compared at start-up (`worker/check.py`)."""

from __future__ import annotations

import json
from importlib.util import find_spec

from pictool.errors import InputError
from pictool.needs import Needs, missing

INSTALL = "pip install 'vllm>=0.32'"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
# What it is made of, in both processes; without it no connector can be loaded.
CONNECTOR: Needs = {
    f"{_BASE}.base:KVConnectorBase_V1": ("vllm_config", "role", "kv_cache_config"),
    f"{_BASE}.base:KVConnectorMetadata": (),
    f"{_BASE}.base:KVConnectorRole.SCHEDULER": (),
    f"{_BASE}.base:KVConnectorTransferResults": ("finished_recving", "failed_recving"),
    f"{_BASE}.base:KVConnectorWorkerMetadata.aggregate": (),
    f"{_BASE}.metrics:KVConnectorPromMetrics": (),
    f"{_BASE}.metrics:KVConnectorStats": ("data",),
    f"{_BASE}.multi_connector:MultiConnector": (),
    "vllm.v1.kv_cache_interface:FullAttentionSpec.copy_with_new_block_size": (),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource.DISK": (),
    "vllm.v1.request:Request.update_block_hashes": (),
}
# What a worker computes links with; without it none is made.
WORKER: Needs = {
    "vllm.distributed:get_tp_group": (),
    "vllm.forward_context:set_forward_context": (
        "attn_metadata", "vllm_config", "num_tokens", "slot_mapping", "skip_compiled",
    ),
    "vllm.lora.layers:LoRAMapping": ("index_mapping", "prompt_mapping", "is_prefill"),
    "vllm.model_executor.models.utils:extract_layer_index": (),
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs",
        "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping", "causal",
        "positions", "is_prefilling",
    ),
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": ("fast_build",),
    "vllm.v1.worker.utils:select_common_block_size": (),
    "vllm.v1.worker.worker_base:WorkerBase": (),
}  # fmt: skip


def report() -> str:
    """What this environment's vLLM has of it, as a line of JSON."""
    import vllm

    needs = {**CONNECTOR, **WORKER}
    return json.dumps({"version": vllm.__version__, "needs": list(needs), "lacks": missing(needs)})


def require_vllm() -> None:
    """Raise InputError, with the remedy, where there is no vLLM."""
    if find_spec("vllm") is None:
        raise InputError(f"--engine vllm: vLLM is not installed; {INSTALL} (docs/guides/vllm.md)")


def require_connector() -> None:
    """Refuse a vLLM that lacks what the connector is made of.

    Raises:
        InputError: says what it lacks.
    """
    import vllm

    if lacks := missing(CONNECTOR):
        raise InputError(f"vLLM {vllm.__version__} lacks {', '.join(lacks)}, which PicConnector needs; {INSTALL}")


if __name__ == "__main__":
    print(report())

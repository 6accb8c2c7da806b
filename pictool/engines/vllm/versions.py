"""The versions of vLLM that the connector works with, and all that it does otherwise between them.

What differs and needs nothing here: 0.31 zeroes no block that an asynchronous load will write, 0.32 asks the connector
for those (`get_loaded_kv_cache_group_ids`); both zero only KV caches of several kinds, which are refused at start-up.
The grammars of 0.31 (xgrammar 0.2.7) follow one schema of an `allOf` alone, in ordinary requests, too.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pictool.errors import InputError

SUPPORTED = ("0.31.", "0.32.")
VERSIONS = " and ".join(f"{version}*" for version in SUPPORTED)
INSTALL = f"pip install 'vllm=={SUPPORTED[-1]}*'"


def is_supported(version: str) -> bool:
    """Whether the connector works with this version of vLLM."""
    return version.startswith(SUPPORTED)


def require_vllm() -> None:
    """Raise InputError, with the remedy, where there is no vLLM."""
    if find_spec("vllm") is None:
        raise InputError(f"--engine vllm: vLLM is not installed; {INSTALL} (docs/guides/vllm.md)")


def require_version() -> None:
    """Refuse a vLLM of another version: its connectors are not those of this one.

    Raises:
        InputError: says which one to install.
    """
    import vllm

    if not is_supported(vllm.__version__):
        raise InputError(f"vLLM {vllm.__version__} is not supported: PicConnector supports {VERSIONS}; {INSTALL}")


def has_compared_kv() -> bool:
    """Whether links over latents (MLA) and over KV caches of fp8 were compared with the torch engine's.

    In 0.31 nobody did, so both are refused.
    """
    return not _is("0.31.")


def cache_hit_source() -> Any:
    """What vLLM's metrics call the source of a link's tokens; None in 0.31, which counts no sources."""
    if _is("0.31."):
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.DISK


def kernel_block_size(block_size: int, backend: Any, spec: Any) -> int:
    """The tokens of a block as an attention backend's kernels take them; 0.31's backends do not ask for the spec.

    Raises:
        ValueError: the backend cannot split blocks of `block_size` tokens.
    """
    from vllm.v1.worker.utils import select_common_block_size

    specs = () if _is("0.31.") else ([spec],)
    return int(select_common_block_size(block_size, [backend], *specs))


def _is(version: str) -> bool:
    import vllm

    return bool(vllm.__version__.startswith(version))

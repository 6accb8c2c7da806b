"""Fingerprints of models and tokenizers: by content, never by path or date.

A model's is sha256 over its architecture's configuration and the BLAKE3 of every weight tensor, so it does not depend
on how the weights are split into files. Hashing tens of gigabytes takes a while: the result for a file is kept in the
user's cache directory under the file's inode, size and change times.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from pictool.errors import ModelError
from pictool.reading import read_file
from pictool.runtime.checkpoint import COPY, read_header, weight_files
from pictool.runtime.user_cache import cache_dir, write_cache_file

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Configuration fields that do not change the numbers that a model computes.
_IRRELEVANT = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "_attn_implementation",
    "output_attentions", "output_hidden_states", "return_dict", "architectures", "bos_token_id", "eos_token_id",
    "pad_token_id", "attn_implementation", "id2label", "label2id", "problem_type", "transformers_weights",
}  # fmt: skip

_HASH = re.compile("[0-9a-f]{64}")
_MAX_KEPT_BYTES = 64 << 20  # 100,000 tensors have 15 MB


def _digest(config: PretrainedConfig, weights: Mapping[str, str]) -> str:
    relevant = {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}
    text = json.dumps([relevant, dict(weights)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_safetensors(path: Path) -> dict[str, str]:
    """BLAKE3 of every tensor with its dtype and shape: name → hex."""
    base, header = read_header(path)
    with path.open("rb") as file:
        return {name: _hash_tensor(file, base, entry) for name, entry in header.items()}


def _hash_tensor(file: Any, base: int, entry: Mapping[str, Any]) -> str:
    digest = blake3(f"{entry['dtype']}{entry['shape']}".encode(), max_threads=blake3.AUTO)
    start, end = entry["data_offsets"]
    file.seek(base + start)
    left = end - start
    while left:
        block = file.read(min(left, 1 << 26))
        if not block:
            raise ModelError(f"{file.name}: truncated; {COPY}")
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def _hash_file(path: Path) -> dict[str, str]:
    """Hashes of a weight file, from the cache if the file has not changed since."""
    stat = path.stat()
    name = f"{path.resolve()} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    entry = cache_dir() / "fingerprints" / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
    if (kept := _read_kept(entry)) is not None:
        return kept
    if path.suffix == ".safetensors":
        hashes = _hash_safetensors(path)
    else:
        digest = blake3(max_threads=blake3.AUTO)
        digest.update_mmap(path)
        hashes = {path.name: digest.hexdigest()}
    write_cache_file(entry, json.dumps(hashes).encode())
    return hashes


def _read_kept(entry: Path) -> dict[str, str] | None:
    """Hashes that were kept; None if there are none, or they are damaged: they are computed again."""
    try:
        hashes = json.loads(read_file(entry, _MAX_KEPT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    is_whole = isinstance(hashes, dict) and all(
        isinstance(hash, str) and _HASH.fullmatch(hash) for hash in hashes.values()
    )
    return hashes if is_whole else None


def directory_fingerprint(directory: Path, config: PretrainedConfig) -> str:
    """Fingerprint of a model directory (hex).

    Raises:
        ModelError: as `weight_files`; or a tensor that is in two files.
    """
    hashes: dict[str, str] = {}
    for path in weight_files(directory):
        tensors = _hash_file(path)
        if twice := sorted(hashes.keys() & tensors.keys()):
            raise ModelError(f"{path}: holds {twice[0]}, which another file of the model holds too; {COPY}")
        hashes |= tensors
    return _digest(config, hashes)


def module_fingerprint(config: PretrainedConfig, state: Mapping[str, torch.Tensor]) -> str:
    """Fingerprint of a model in memory (hex)."""
    from pictool.runtime.tensors import to_bytes

    hashes = {}
    for name, tensor in state.items():
        digest = blake3(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashes[name] = digest.update(to_bytes(tensor)).hexdigest()
    return _digest(config, hashes)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Fingerprint of a tokenizer (hex): its whole pipeline if it is a `tokenizers` one, else class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = (
        backend.to_str() if backend else json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    )
    return hashlib.sha256(text.encode()).hexdigest()

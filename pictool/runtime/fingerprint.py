"""Fingerprints of models and tokenizers: by content, never by path or date.

A model's is sha256 over its architecture's configuration and the BLAKE3 of every weight tensor, so it does not depend
on how the weights are split into files. Hashing tens of gigabytes takes a while: the result for a file is kept in the
user's cache directory under the file's inode, size and change times.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from pictool.errors import ModelError
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
# What `transformers` looks for in a directory, in this order.
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


def _digest(config: PretrainedConfig, weights: Mapping[str, str]) -> str:
    relevant = {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}
    text = json.dumps([relevant, dict(weights)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_safetensors(path: Path) -> dict[str, str]:
    """BLAKE3 of every tensor with its dtype and shape: name → hex."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ModelError(f"{path}: not a safetensors file, or truncated; copy the model again")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise ModelError(f"{path}: its header is damaged; copy the model again") from error
        hashes = {}
        for name, entry in header.items():
            if name != "__metadata__":
                hashes[name] = _hash_tensor(file, 8 + length, entry)
    return hashes


def _hash_tensor(file: Any, base: int, entry: Mapping[str, Any]) -> str:
    digest = blake3(f"{entry['dtype']}{entry['shape']}".encode(), max_threads=blake3.AUTO)
    start, end = entry["data_offsets"]
    file.seek(base + start)
    left = end - start
    while left:
        block = file.read(min(left, 1 << 26))
        if not block:
            raise ModelError(f"{file.name}: truncated; copy the model again")
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def _hash_file(path: Path) -> dict[str, str]:
    """Hashes of a weight file, from the cache if the file has not changed since."""
    stat = path.stat()
    name = f"{path.resolve()} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    entry = cache_dir() / "fingerprints" / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
    try:
        return dict(json.loads(entry.read_text()))
    except (OSError, ValueError):
        pass  # missing or truncated: computed again
    if path.suffix == ".safetensors":
        hashes = _hash_safetensors(path)
    else:
        digest = blake3(max_threads=blake3.AUTO)
        digest.update_mmap(path)
        hashes = {path.name: digest.hexdigest()}
    write_cache_file(entry, json.dumps(hashes).encode())
    return hashes


def weight_files(directory: Path) -> list[Path]:
    """The files that `transformers` loads a model's weights from, and no other: a backup beside them is none.

    Those are the file that config.json names as `transformers_weights`, or the first of `_WEIGHTS` that is there; of an
    index the files that it lists.

    Raises:
        ModelError: a damaged index or config.json, a file outside the directory or missing, or an adapter.
    """
    if (directory / "adapter_config.json").exists():
        raise ModelError(f"{directory}: holds an adapter, which changes the model; merge it into the weights first")
    explicit = _read_json(directory / "config.json").get("transformers_weights")
    names = _WEIGHTS if explicit is None else (str(explicit),)
    name = next((name for name in names if (directory / name).is_file()), None)
    if name is None:
        raise ModelError(f"{directory}: holds no weights (*.safetensors or *.bin, of these names: {', '.join(names)})")
    if not name.endswith(".index.json"):
        return [_within(directory, name)]
    listed = _read_json(directory / name).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{directory / name}: lists no weights; copy the model again")
    return [_within(directory, str(shard)) for shard in sorted(set(map(str, listed.values())))]


def _within(directory: Path, name: str) -> Path:
    path = directory / name
    if Path(name).name != name or not path.is_file():
        raise ModelError(f"{path}: is no file of weights in the model's directory; copy the model again")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON; copy the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is no JSON object; copy the model again")
    return content


def directory_fingerprint(directory: Path, config: PretrainedConfig) -> str:
    """Fingerprint of a model directory (hex).

    Raises:
        ModelError: as `weight_files`; or a tensor that is in two files.
    """
    hashes: dict[str, str] = {}
    for path in weight_files(directory):
        tensors = _hash_file(path)
        if twice := sorted(hashes.keys() & tensors.keys()):
            raise ModelError(f"{path}: holds {twice[0]}, which another file of the model holds too; copy it again")
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

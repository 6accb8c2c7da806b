"""Fingerprints of models and tokenizers: by content, never by path or date.

A model's is sha256 over its architecture's configuration and the BLAKE3 of every weight tensor, so it does not depend
on how the weights are split into files. Hashing tens of gigabytes takes a while: the result for a file is kept in the
user's cache directory under the file's inode, size and change times.

A fingerprint is of no use once the weights are others. So the files are held open from before they are hashed, and
compared by inode, size and times when the weights have been loaded, before every link and before every object that is
stored (`WeightFiles`): loaded weights are mapped, so that a file which is written changes them. What only the times of
its inode changed is hashed again, and so is what changed in the last two seconds, where a clock may be too coarse.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from pictool.errors import ChangedModelError, ModelError
from pictool.reading import FileState, open_regular, read_file
from pictool.runtime.architectures import decoder_of, rotary_of, text_config
from pictool.runtime.checkpoint import COPY, read_header, weight_files
from pictool.runtime.memory.user_cache import cache_dir, write_cache_file
from pictool.runtime.support import depends_on_length

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
_HOMES_OF_LAYERS = ("torch", "transformers", "pictool")  # packages whose layers compute what their weights say
_SAMPLED = 16  # numbers of each tensor
_PROCESS = os.getpid()  # that imported this
LOAD_AGAIN = "load the model again (restart a server)"


def _digest(config: PretrainedConfig, weights: Mapping[str, str]) -> str:
    relevant = {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}
    text = json.dumps([relevant, dict(weights)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_safetensors(path: Path, name: str) -> dict[str, str]:
    """BLAKE3 of every tensor with its dtype and shape: name → hex; of the file if metadata says how to read them."""
    base, header, metadata = read_header(path)
    if "tensor_names" in metadata:  # torchao's
        return _hash_whole(path, name)
    with path.open("rb") as file:
        return {tensor: _hash_tensor(file, base, entry) for tensor, entry in header.items()}


def _hasher(data: bytes = b"") -> blake3:
    """BLAKE3 by a thread per core; by one in a fork, which waits forever for those that stayed with its parent."""
    return blake3(data, max_threads=blake3.AUTO if os.getpid() == _PROCESS else 1)


def _hash_tensor(file: Any, base: int, entry: Mapping[str, Any]) -> str:
    digest = _hasher(f"{entry['dtype']}{entry['shape']}".encode())
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


def _hash_file(path: Path, name: str) -> dict[str, str]:
    """Hashes of the weight file that is called `name`: of every tensor, or of a pickle as a whole."""
    return _hash_safetensors(path, name) if name.endswith(".safetensors") else _hash_whole(path, name)


def _hash_whole(path: Path, name: str) -> dict[str, str]:
    digest = _hasher()
    digest.update_mmap(path)
    return {name: digest.hexdigest()}


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


class _WeightFile:
    """A weight file that is held open, so that it stays the same one, whatever is moved to its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}); {COPY}") from error
        weakref.finalize(self, os.close, self._fd)
        self._state = self._now()
        self._is_sure = False  # whether `hashes` are of this state for certain
        self.hashes: dict[str, str] = {}

    def hash(self) -> None:
        """Compute the hashes, or take those that are kept of this state. Raises ModelError."""
        name = f"{self.path.resolve()} {' '.join(map(str, self._state))}"
        entry = cache_dir() / "fingerprints" / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
        self._is_sure = self._state.is_settled
        kept = _read_kept(entry) if self._is_sure else None
        self.hashes = _hash_file(self.path, self.path.name) if kept is None else kept
        self.require_in_place()
        if self._is_sure and kept is None:
            write_cache_file(entry, json.dumps(self.hashes).encode())

    def require_in_place(self) -> None:
        """Refuse another file under the name, and any change of this one. Raises ModelError."""
        try:
            if FileState.of(self.path.stat()) == self._state == self._now():
                return
        except OSError:
            pass
        raise self._changed()

    def require_unchanged(self) -> None:
        """Refuse if the contents of the open file have changed, or may have. Raises ModelError."""
        now = self._now()
        if now == self._state and self._is_sure:
            return
        is_settled, was_written = now.is_settled, now[:-1] != self._state[:-1]  # else its mode, owner or names changed
        if was_written or not self._is_as_hashed():
            raise self._changed()
        self._state, self._is_sure = now, is_settled

    def _now(self) -> FileState:
        return FileState.of(os.fstat(self._fd))

    def _is_as_hashed(self) -> bool:
        """Whether the open file, whatever its name is now, has the contents that were hashed."""
        try:
            return _hash_file(Path(f"/dev/fd/{self._fd}"), self.path.name) == self.hashes
        except (OSError, ModelError):
            return False

    def _changed(self) -> ModelError:
        return ChangedModelError(f"{self.path}: was changed or replaced after its fingerprint was taken; {LOAD_AGAIN}")


class WeightFiles:
    """The weight files of a model directory, open from before they are hashed."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError as `weight_files`."""
        self._list: Callable[[], list[Path]] = lambda: weight_files(directory)
        self._place = directory
        self._files = [_WeightFile(path) for path in self._list()]

    @classmethod
    def of_paths(cls, paths: Sequence[Path]) -> WeightFiles:
        """Files that are named, and hashed as wholes. Raises ModelError: one cannot be read."""
        files = cls.__new__(cls)
        files._list, files._place = lambda: list(paths), paths[0].parent
        files._files = [_WeightFile(path) for path in paths]
        return files

    def hashes(self) -> list[dict[str, str]]:
        """The hashes of each file, in their order. Raises ModelError: one that is being changed."""
        for file in self._files:
            file.hash()
        return [file.hashes for file in self._files]

    def fingerprint(self, config: PretrainedConfig) -> str:
        """The fingerprint of a model with these weights (hex).

        Raises:
            ModelError: a damaged file, one that is being changed, or a tensor that is in two files.
        """
        hashes: dict[str, str] = {}
        for file in self._files:
            file.hash()
            if twice := sorted(hashes.keys() & file.hashes.keys()):
                raise ModelError(
                    f"{file.path}: contains {twice[0]}, which another file of the model contains too; {COPY}"
                )
            hashes |= file.hashes
        return _digest(config, hashes)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """What is loaded by name within is what was hashed. Raises ModelError if it is not, before or after."""
        self.require_unchanged()
        self._require_in_place()
        yield
        self._require_in_place()
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Refuse weights whose files were written since they were hashed; their names do not matter.

        Raises:
            ModelError: names the file, and the remedy.
        """
        for file in self._files:
            file.require_unchanged()

    def _require_in_place(self) -> None:
        for file in self._files:
            file.require_in_place()
        if self._list() != [file.path for file in self._files]:
            raise ChangedModelError(
                f"{self._place}: its weight files are not those that were fingerprinted; {LOAD_AGAIN}"
            )


def module_fingerprint(module: Any) -> str:
    """Fingerprint of a model in memory (hex): its configuration, weights, and frequencies that are not its own."""
    from pictool.runtime.tensors import to_bytes

    hashes = {}
    for name, tensor in (module.state_dict() | _set_frequencies(module)).items():
        digest = _hasher(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashes[name] = digest.update(to_bytes(tensor)).hexdigest()
    return _digest(module.config, hashes)


def _set_frequencies(module: Any) -> dict[str, torch.Tensor]:
    """RoPE's frequencies that are not those of the configuration, by name: no checkpoint holds them."""
    import torch

    from pictool.runtime.rope import Rope

    decoder = decoder_of(module)
    rotary, position = rotary_of(decoder), torch.zeros(1, dtype=torch.int64)
    if rotary is None:
        return {}
    like = next(rotary.buffers())
    Rope(decoder).tables(position.to(like.device), like)  # dynamic and long ones are those of a short prompt again
    own = dict(type(rotary)(config=decoder.config).named_buffers())

    def is_own(tensor: torch.Tensor, own: torch.Tensor) -> bool:
        """Last bits differ between devices."""
        return tensor.dtype == own.dtype and torch.allclose(tensor.cpu(), own, rtol=1e-6, atol=0)

    held = {name: tensor for name, tensor in rotary.named_buffers() if name in own}
    return {f"model.rotary_emb.{name}": held[name] for name in held if not is_own(held[name], own[name])}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Fingerprint of a tokenizer (hex): its whole pipeline if it is a `tokenizers` one, else class and vocabulary.

    One that has a `fingerprint` of its content says it itself.
    """
    if isinstance(own := getattr(tokenizer, "fingerprint", None), str):
        return own
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = (
        backend.to_str() if backend else json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    )
    return hashlib.sha256(text.encode()).hexdigest()


def require_plain(layers: Mapping[str, Any], name: str) -> None:
    """Refuse a model in memory whose layers compute something else than its configuration and weights say.

    Args:
        layers: all of its modules, by name; its own is empty. name: what messages call it.

    Raises:
        ModelError: names the layer that has a hook, a `forward` of its own, or is an adapter.
    """
    for path, layer in layers.items():
        hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
        home = str(getattr(type(layer), "__module__", None)).partition(".")[0]
        if any(str(getattr(hook, "__module__", "")).partition(".")[0] != "transformers" for hook in hooks):
            raise ModelError(f"{name}: {path or 'the model'} has a forward hook, which may change its KV; remove it")
        if "forward" in vars(layer):
            raise ModelError(f"{name}: {path or 'the model'} has a forward that was set on it; remove it")
        if path and home not in _HOMES_OF_LAYERS:
            raise ModelError(
                f"{name}: {path} is a {type(layer).__module__}.{type(layer).__qualname__}, an adapter, or a layer "
                "foreign to the architecture; merge it into the weights first"
            )


class ModuleState:
    """What a model in memory computes with, as far as that can be told without reading all weights.

    Noticed are tensors that are written (by their addresses and versions; a write through `.data` has no version, and
    shows in a sample of each tensor), layers and tensors that are replaced, hooks, adapters (`require_plain`), and
    another attention function. Not noticed are single numbers that are written through `.data` or by other code than
    torch's, and what is no tensor: the configuration, attributes of layers, the code of their classes.
    """

    def __init__(self, module: Any, name: str) -> None:
        """`name` is what messages call it."""
        self._module, self._name = module, name
        self._layers = dict(module.named_modules())
        self._tensors = self._read_tensors()
        self._samples = [_sample(tensor) for tensor in self._tensors if tensor.numel()]
        self._attention, self._parts = module.config._attn_implementation, self._read_parts()
        self._versions, self._numbers = self._read_versions(), self._read_numbers()

    def require_unchanged(self) -> None:
        """Refuse tensors that were written, with few exceptions, in little time. Raises ModelError."""
        if self._read_versions() != self._versions:
            raise self._changed("its weights have")

    def require_storable(self) -> None:
        """Refuse all that is noticed. Raises ModelError."""
        self.require_unchanged()
        require_plain(self._layers, self._name)
        if self._module.config._attn_implementation != self._attention:
            raise self._changed("its attention function has")
        if self._read_parts() != self._parts or not self._read_numbers().equal(self._numbers):
            raise self._changed("its weights have")

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in self._tensors]

    def _read_parts(self) -> list[int]:
        """The identities of all layers and tensors."""
        layers = [id(part) for layer in self._layers.values() for part in layer._modules.values()]
        return layers + [id(tensor) for tensor in self._read_tensors()]

    def _read_numbers(self) -> torch.Tensor:
        """Some numbers of every tensor, as bytes."""
        import torch

        return torch.cat(self._samples).view(torch.uint8)

    def _read_tensors(self) -> list[torch.Tensor]:
        """Weights and buffers, but for the frequencies that dynamic and long RoPE change by themselves."""
        is_fixed = not depends_on_length(text_config(self._module.config))
        return [
            tensor
            for layer in self._layers.values()
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items())
            if tensor is not None and (is_fixed or not name.endswith("inv_freq"))
        ]

    def _changed(self, what: str) -> ModelError:
        return ChangedModelError(
            f"{self._name}: {what} changed since its fingerprint was taken; {LOAD_AGAIN}, or wrap it"
        )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of some numbers of a tensor."""
    flat = tensor.detach().flatten()
    return flat[:: -(-len(flat) // _SAMPLED)]

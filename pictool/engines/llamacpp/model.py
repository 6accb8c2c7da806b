"""A GGUF file as a model: its tokenizer, its fingerprint, and contexts of llama.cpp over its weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pictool.core import Geometry, PromptText, Target
from pictool.engines.llamacpp.contexts import Contexts
from pictool.engines.llamacpp.library import KV_TYPES, LlamaContextOptions, Weights, api
from pictool.engines.llamacpp.link import compute
from pictool.engines.llamacpp.state import StateFormat, read_rows
from pictool.engines.llamacpp.tokenizer import GgufEncoder, GgufTokenizer
from pictool.engines.llamacpp.trial import Facts, try_file
from pictool.errors import InputError, ModelError
from pictool.linker.policies.base import Policy
from pictool.reading import whole
from pictool.runtime.encoder import Encoder
from pictool.runtime.fingerprint import WeightFiles
from pictool.runtime.gguf import find_files
from pictool.runtime.memory.user_cache import cache_dir
from pictool.runtime.model import SEPARATOR, Model

if TYPE_CHECKING:
    from pictool.linker.link import Linked, PreparedLink
    from pictool.runtime.prefill import ChunkKV

GPU_LAYERS = "PIC_GPU_LAYERS"


@dataclass(frozen=True)
class GgufConfig:
    """What other packages read of a model's configuration."""

    model_type: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Rotation that depends on the length of a prompt is excluded by the trial."""
        return {"rope_type": "default"}


class GgufModel(Model):
    """A GGUF file that llama.cpp runs. Its `dtype` is that of KV."""

    engine: ClassVar[str] = "llamacpp"

    def __init__(self, name: str, files: Sequence[Path], dtype: str, gpu_layers: int, salt: str = "") -> None:
        """Raises ModelError: a file that is damaged, or cannot be linked; names it."""
        self.name, self._paths, self.dtype, self.salt = name, tuple(files), dtype, salt
        self.device, self.directory, self._module, self._state = "cpu", None, None, None
        self.on_wait, self.on_note, self.separator = Model.no_wait, Model.no_note, SEPARATOR
        self._gpu_layers = gpu_layers
        self.options = LlamaContextOptions(dtype, gpu_layers != 0)

    @property
    def files(self) -> tuple[Path, ...]:
        return self._paths

    def open(self) -> GgufModel:
        """Try the file and read its tokenizer. Raises ModelError."""
        num_bytes = sum(path.stat().st_size for path in self.files)
        with self._loading(f"trying {self.name}"):
            self.facts: Facts = try_file(
                self.name, self.files[0], num_bytes, self.fingerprint, cache_dir() / "gguf", self.options
            )
            vocabulary = Weights(str(self.files[0]), vocab_only=True)
        if vocabulary.num_tokens != self.facts.num_tokens:
            raise ModelError(f"{self.name}: was replaced while being opened; run the command again")
        self.tokenizer: Any = GgufTokenizer(vocabulary, self.fingerprint)
        self.config: Any = GgufConfig(
            f"gguf.{self.facts.architecture}", vocabulary.num_tokens, self.tokenizer.bos_id, self.tokenizer.eos_token_id
        )
        self.format = StateFormat.of_json(self.facts.format)
        return self

    @contextmanager
    def _loading(self, what: str) -> Iterator[None]:
        """What is loaded within is what was hashed. Raises ModelError if it is not."""
        _ = self.fingerprint
        with self.on_wait(what), self._files.loading():
            yield

    @cached_property
    def _files(self) -> WeightFiles:
        return WeightFiles.of_paths(self.files)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint (hex) of the file's content and of how its KV is computed. llama.cpp's build is not in it."""
        with self.on_wait(f"hashing {self.name}"):
            hashes = self._files.hashes()
        return hashlib.sha256(json.dumps([hashes, asdict(self.options)], sort_keys=True).encode()).hexdigest()

    @cached_property
    def target(self) -> Target:
        return Target(self.config.model_type, self.fingerprint, self.fingerprint, self.dtype, self.geometry)

    @property
    def geometry(self) -> Geometry:
        return self.format.geometry

    @property
    def max_positions(self) -> int:
        return self.facts.positions

    @property
    def bos_id(self) -> int | None:
        token: int | None = self.tokenizer.bos_id
        return token

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        ends: frozenset[int] = self.tokenizer.end_ids
        return ends

    @property
    def module(self) -> Any:
        raise ModelError(f"{self.name}: is a GGUF file, which llama.cpp runs; this needs a transformers model")

    @cached_property
    def stack(self) -> Contexts:  # type: ignore[override]
        """The contexts that compute."""
        with self._loading(f"loading {self.name}"):
            weights = Weights(str(self.files[0]), gpu_layers=self._gpu_layers)
        return Contexts(weights, self.options, self.format, self.facts)

    def _require_rows(self, policy: Policy) -> None:
        """Refuse a policy whose rows llama.cpp cannot compute. Raises InputError: says why."""
        needs, name = policy.needs, f"--algo {policy.name}"
        if policy.check_layers(self.geometry.layers):
            raise InputError(f"{name}: compares KV between two layers, which llama.cpp does not expose; use legolink")
        if needs.runs_model:
            raise InputError(f"{name}: reads hidden states, which llama.cpp does not expose; use legolink")
        if needs.attention:
            raise InputError(f"{name}: reads attention, which llama.cpp does not expose; use legolink")

    def prefill(
        self, chunks: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = (), alone: bool = False
    ) -> Iterator[tuple[int, ChunkKV]]:
        """See `Model.prefill`. Each chunk is computed alone; its keys are rotated, from the tokens before it on."""
        for index, chunk in enumerate(chunks):
            start = len(before[index]) if before else 0
            tokens = [*(before[index] if before else ()), *chunk]
            context = self.stack.take(len(tokens), 2)
            try:
                context.decode(tokens, 0)
                layers = read_rows(context, self.format, self.facts.window, start, len(tokens))
            finally:
                self.stack.give_back(context)
            packed = map(self.format.pack, layers)
            yield index, [(torch.from_numpy(key), torch.from_numpy(value)) for key, value in packed]

    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `Model.next_logits`."""
        context, logits = self.stack.take(len(tokens), 1), []
        try:
            for position, token in enumerate(tokens):
                context.decode([token], position, wants_logits=True)
                logits.append(torch.from_numpy(context.logits()))
        finally:
            self.stack.give_back(context)
        return torch.stack(logits)

    @property
    def own_link(self) -> Callable[[PreparedLink], Linked]:
        """See `Model.own_link`."""
        return compute

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None:
            self._encoder = GgufEncoder(self.tokenizer)
        return self._encoder

    def encode(self, text: str | PromptText) -> tuple[int, ...]:
        return self.encoder.encode(text, self.salt)


def open_gguf(name: str, device: str = "auto", dtype: str = "auto", salt: str = "", on_wait: Any = None) -> GgufModel:
    """Open a GGUF file: a path (of a split file the first part), `ollama:NAME`, or `lmstudio:NAME`.

    Args:
        device: ``cpu``; else all layers, or so many as PIC_GPU_LAYERS says, are on what llama.cpp was built for.
        dtype: of KV: ``float16`` (also ``auto``) or ``float32``.

    Raises:
        InputError: llama.cpp is not installed, or another dtype. ModelError: a file that cannot be used; says why.
    """
    if dtype not in ("auto", *KV_TYPES):
        raise InputError(
            f"--dtype {dtype}: the KV of a GGUF file is {' or '.join(KV_TYPES)}; llama.cpp rotates no other type "
            "exactly"
        )
    files, layers = find_files(name), 0
    api()
    if device != "cpu" and api().llama_supports_gpu_offload():
        layers = _gpu_layers()
    model = GgufModel(name, files, "float16" if dtype == "auto" else dtype, layers, salt)
    if on_wait is not None:
        model.on_wait = on_wait
    return model.open()


def _gpu_layers() -> int:
    """The layers on an accelerator; -1: all. Raises InputError."""
    value = os.environ.get(GPU_LAYERS)
    if not value:
        return -1
    try:
        count = whole(value if not value.isdigit() else int(value))
    except ValueError as error:
        raise InputError(f"{GPU_LAYERS}={value}: {error}") from error
    return count

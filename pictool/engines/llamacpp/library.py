"""llama.cpp, by the public C API that llama-cpp-python binds: weights, contexts, sequences of a context's KV.

A context here is for one prompt: sequence 0 is the prompt, the others hold chunks that are relocated into it. Its KV is
unified, so that a cell belongs to several sequences without a copy, and as long for layers with a window as for others.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError, ModelError
from pictool.runtime import turns

INSTALL = "llama.cpp is not installed; pip install 'pictool[llamacpp]' (docs/guides/laptop-gguf.md)"
KV_TYPES = {"float32": 0, "float16": 1}  # the ggml types of KV whose keys llama.cpp rotates in place, exactly
MAX_SEQUENCES = 256  # of a context (LLAMA_MAX_SEQ)
_BATCH, _STEP = 512, 256  # tokens of one call; cells of a context are a multiple of the step
_MAX_METADATA = 1 << 20
_FLASH_OFF, _FLASH_AUTO, _LOG_ERROR = 0, -1, 4
_messages: list[str] = []  # the last errors of the library


@cache
def api() -> Any:
    """The functions of the C API. Raises InputError where the package is not installed."""
    if find_spec("llama_cpp") is None:
        raise InputError(INSTALL)
    from llama_cpp import llama_cpp

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def log(level: int, text: bytes, _: object) -> None:
        if level == _LOG_ERROR:
            _messages[:] = [*_messages[-3:], " ".join(text.decode(errors="replace").split())]

    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    llama_cpp.pictool_log = log  # kept as long as the library is
    llama_cpp.llama_backend_init()
    return llama_cpp


def last_error() -> str:
    """What the library logged as its last error."""
    return _messages[-1][:200] if _messages else "it gives no reason"


class Weights:
    """A loaded GGUF file. `vocab_only`: its tokenizer and metadata alone.

    Raises:
        ModelError: llama.cpp does not load it.
    """

    def __init__(self, path: str, vocab_only: bool = False, gpu_layers: int = 0) -> None:
        lib = api()
        params = lib.llama_model_default_params()
        params.vocab_only, params.n_gpu_layers = vocab_only, gpu_layers
        _messages.clear()
        self.handle = lib.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            raise ModelError(f"{path}: llama.cpp cannot load it ({last_error()})")
        self._free = weakref.finalize(self, lib.llama_model_free, self.handle)
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.num_tokens = int(lib.llama_vocab_n_tokens(self.vocab))

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata as text; None if there is none."""
        lib, size = api(), 4096
        while size <= _MAX_METADATA:
            buffer = ctypes.create_string_buffer(size)
            length = int(lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, size))
            if length < 0:
                return None
            if length < size:
                return buffer.raw[:length].decode(errors="replace")
            size = length + 1
        return None


@dataclass(frozen=True)
class LlamaContextOptions:
    """How contexts compute.

    Fields:
        dtype: of KV. uses_flash: lets llama.cpp choose flash attention; on a CPU its kernel rounds to float16.
    """

    dtype: str
    uses_flash: bool = False


class LlamaContext:
    """KV of at least `num_cells` tokens in `num_sequences` sequences, and what computes into it.

    Raises:
        ModelError: llama.cpp cannot make it (memory).
    """

    def __init__(
        self, weights: Weights, options: LlamaContextOptions, num_cells: int, num_sequences: int, threads: int
    ) -> None:
        lib = api()
        params = lib.llama_context_default_params()
        params.n_ctx = -(-num_cells // _STEP) * _STEP
        params.n_batch = params.n_ubatch = min(_BATCH, params.n_ctx)
        params.n_seq_max, params.kv_unified, params.swa_full = num_sequences, True, True
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[options.dtype]
        params.flash_attn_type = _FLASH_AUTO if options.uses_flash else _FLASH_OFF
        params.no_perf = True
        _messages.clear()
        self._weights = weights  # as long as the context
        self.handle = lib.llama_init_from_model(weights.handle, params)
        if not self.handle:
            raise ModelError(
                f"llama.cpp cannot create a context of {num_cells} tokens ({last_error()}); link fewer documents"
            )
        self.num_cells, self.num_sequences, self.threads = int(params.n_ctx), num_sequences, threads
        self._memory = lib.llama_get_memory(self.handle)
        self._num_batch = int(params.n_batch)
        self._batch = lib.llama_batch_init(self._num_batch, 0, 1)
        for index in range(self._num_batch):
            self._batch.n_seq_id[index], self._batch.seq_id[index][0] = 1, 0
        self._tokens, self._positions, self._outputs = (
            np.ctypeslib.as_array(field, (self._num_batch,))
            for field in (self._batch.token, self._batch.pos, self._batch.logits)
        )
        self._close = weakref.finalize(self, _free, self.handle, self._batch, weights)

    def close(self) -> None:
        self._close()

    @property
    def can_shift(self) -> bool:
        return bool(self._memory) and bool(api().llama_memory_can_shift(self._memory))

    def set_threads(self, threads: int) -> None:
        if threads != self.threads:
            api().llama_set_n_threads(self.handle, threads, threads)
            self.threads = threads

    def clear(self) -> None:
        """Forget all sequences."""
        api().llama_memory_clear(self._memory, False)

    def decode(self, tokens: Sequence[int] | NDArray[np.integer[Any]], start: int, wants_logits: bool = False) -> None:
        """Compute tokens at positions from `start` on, which follow what sequence 0 has.

        Raises:
            ModelError: the library refuses.
        """
        for first in range(0, len(tokens), self._num_batch):
            turns.checkpoint()
            part = tokens[first : first + self._num_batch]
            count, is_last = len(part), first + self._num_batch >= len(tokens)
            self._batch.n_tokens = count
            self._tokens[:count] = part
            self._positions[:count] = np.arange(start + first, start + first + count)
            self._outputs[:count] = 0
            self._outputs[count - 1] = wants_logits and is_last
            if code := api().llama_decode(self.handle, self._batch):
                raise ModelError(f"llama.cpp failed at position {start + first} ({code}: {last_error()})")

    def logits(self) -> NDArray[np.float32]:
        """A copy of those of the last token that was computed, float32 [vocab]."""
        pointer = api().llama_get_logits_ith(self.handle, -1)
        return np.ctypeslib.as_array(pointer, (self._weights.num_tokens,)).copy()

    def state(self, sequence: int) -> bytearray:
        """The KV of a sequence as the library writes it (`state.py`)."""
        size = int(api().llama_state_seq_get_size(self.handle, sequence))
        data = bytearray(size)
        buffer = (ctypes.c_uint8 * size).from_buffer(data)
        if int(api().llama_state_seq_get_data(self.handle, buffer, size, sequence)) != size:
            raise ModelError(f"llama.cpp cannot return the KV of a sequence ({last_error()})")
        return data

    def set_state(self, sequence: int, data: bytearray) -> None:
        """The inverse of `state`: what the sequence had is dropped."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer(data)
        if int(api().llama_state_seq_set_data(self.handle, buffer, len(data), sequence)) != len(data):
            raise ModelError(f"llama.cpp cannot load the KV of a chunk ({last_error()})")

    def shift(self, sequence: int, distance: int) -> None:
        """Move a sequence's positions. Its keys are rotated when something is computed next."""
        if distance:
            api().llama_memory_seq_add(self._memory, sequence, -1, -1, distance)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Positions [start, end) of a sequence are also those of another; nothing is copied in memory."""
        api().llama_memory_seq_cp(self._memory, source, target, start, end)

    def remove(self, sequence: int, start: int = -1, end: int = -1) -> None:
        api().llama_memory_seq_rm(self._memory, sequence, start, end)


def _free(handle: Any, batch: Any, _: Weights) -> None:
    api().llama_batch_free(batch)
    api().llama_free(handle)

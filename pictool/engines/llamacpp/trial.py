"""Trying a GGUF file in a process of its own, before this one loads it: llama.cpp aborts on some damaged files.

What is tried is all that linking does: load, compute, write the KV of a sequence, take it again, move it. What was
found is kept in the user's cache directory under the file's content and llama.cpp's build. Objects need no trial: the
states that the library gets are made by `state.py` from checked numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pictool.engines.llamacpp.library import INSTALL, LlamaContext, LlamaContextOptions, Weights, api
from pictool.engines.llamacpp.state import StateFormat, format_of
from pictool.errors import InputError, ModelError, PicError

_CELLS, _TOKENS, _DISTANCE = 256, 8, 5
_LEAST_S, _BYTES_PER_S = 120.0, 20e6  # how long it may take, with the file's size
_ROUNDING = 0.01  # of a ratio of keys
_PLAIN_SCALING = ("yarn", "linear")  # RoPE scaling that does not depend on a context's size


@dataclass(frozen=True)
class Facts:
    """What is known of a file that can be linked.

    Fields:
        architecture: of the metadata. num_tokens: of the vocabulary. positions: that it takes.
        window: of layers that have one; 0: none has.
        format: of its states (`StateFormat.json`).
        scales: by layer and channel, what moving multiplies keys by, beside rotating them (YaRN; elsewhere all are 1,
            and the list is empty).
    """

    architecture: str
    num_tokens: int
    positions: int
    window: int
    format: Any
    scales: list[list[float]]


def try_file(name: str, path: Path, num_bytes: int, content: str, kept: Path, options: LlamaContextOptions) -> Facts:
    """What a trial finds, now or earlier.

    Args:
        content: fingerprint of the file. kept: the directory where results are kept.

    Raises:
        ModelError: a file that llama.cpp cannot use, or that cannot be linked; names it. InputError: no llama.cpp.
    """
    from pictool.runtime.memory.user_cache import write_cache_file

    build = hashlib.sha256(f"{content} {api().llama_version()!r} {asdict(options)}".encode()).hexdigest()
    entry = kept / f"{build}.json"
    try:
        return Facts(**json.loads(entry.read_bytes()))
    except (OSError, ValueError, TypeError):
        pass
    reply = _ask(path, options, _LEAST_S + num_bytes / _BYTES_PER_S)
    if "facts" not in reply:
        raise ModelError(f"{name}: {reply['problem']}")
    write_cache_file(entry, json.dumps(reply["facts"]).encode())
    return Facts(**reply["facts"])


def _ask(path: Path, options: LlamaContextOptions, limit_s: float) -> dict[str, Any]:
    request = json.dumps([str(path), options.dtype, options.uses_flash])
    root = str(Path(__file__).parents[3])
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", __name__, request], capture_output=True, timeout=limit_s, check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"problem": f"llama.cpp needs more than {limit_s:.0f} s to load it; it may be damaged"}
    try:
        reply: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return reply
    except (ValueError, IndexError):
        return {"problem": f"llama.cpp crashes when loading it (exit {process.returncode}); download it again"}


def examine(path: str, options: LlamaContextOptions) -> Facts:
    """Try a file in this process. Raises ModelError: it cannot be linked."""
    weights = Weights(path)
    lib, handle = api(), weights.handle
    architecture = weights.metadata("general.architecture") or "unknown"
    if lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle):
        raise ModelError(
            f"{architecture} keeps a recurrent state, which cannot be moved; use a model with attention layers only"
        )
    if lib.llama_model_has_encoder(handle) or not lib.llama_model_has_decoder(handle):
        raise ModelError(f"{architecture} is not a causal decoder; use a model that is")
    context = LlamaContext(weights, options, _CELLS, 4, 1)
    if not context.can_shift:
        raise ModelError(
            f"llama.cpp cannot move the keys of {architecture} (M-RoPE, or layers that differ); use another model"
        )
    window = max(0, int(lib.llama_model_n_swa(handle)))
    count = min(_TOKENS, max(1, window // 2)) if window else _TOKENS
    tokens, positions = np.arange(count) % weights.num_tokens, np.arange(count, dtype=np.int32)
    context.decode(tokens, 0, wants_logits=True)
    if not np.isfinite(context.logits()).all():
        raise ModelError("its results are not finite; the file is damaged: download it again")
    state = context.state(0)
    form = format_of(state, max(1, int(lib.llama_model_n_head_kv(handle))))
    scales = _scales(context, form, state, positions)
    trained = int(lib.llama_model_n_ctx_train(handle))
    if trained < 1:
        raise ModelError(
            f"its context_length is not a number of positions ({trained}); the file is damaged: download it again"
        )
    return Facts(
        architecture, weights.num_tokens, _positions(weights, architecture, trained), window, form.json(), scales
    )  # fmt: skip


def _scales(context: LlamaContext, form: StateFormat, state: bytearray, positions: Any) -> list[list[float]]:
    """What a pass that moves keys multiplies those by that stay where they are."""
    rows = form.read(state, positions)
    again = form.write(rows, positions)
    context.clear()
    context.set_state(1, again)
    context.set_state(2, again)
    context.shift(2, _DISTANCE)
    context.decode([0], 0)
    scales = list[list[float]]()
    for (before, _), (after, _) in zip(rows, form.read(context.state(1), positions), strict=True):
        size = np.abs(before.astype(np.float64)).sum(0)
        ratio = np.abs(after.astype(np.float64)).sum(0) / np.where(size > 0, size, 1)
        changed = (size > 0) & (np.abs(ratio - 1) > _ROUNDING)
        factor = float(np.median(ratio[changed])) if changed.any() else 1.0
        scales.append(np.where(changed, factor, 1.0).tolist())
    return scales if any(scale != 1 for layer in scales for scale in layer) else []


def _positions(weights: Weights, architecture: str, trained: int) -> int:
    """How many positions there are before RoPE changes its frequencies with the size of a context (LongRoPE)."""
    scaling = weights.metadata(f"{architecture}.rope.scaling.type")
    original = weights.metadata(f"{architecture}.rope.scaling.original_context_length")
    if original is None or scaling in _PLAIN_SCALING:
        return trained
    return min(trained, int(original))


def main(arguments: Sequence[str]) -> None:
    path, dtype, uses_flash = json.loads(arguments[0])
    try:
        reply: dict[str, Any] = {"facts": asdict(examine(path, LlamaContextOptions(dtype, uses_flash)))}
    except InputError:
        reply = {"problem": INSTALL}
    except PicError as error:
        reply = {"problem": str(error).removeprefix(f"{path}: ")}
    sys.stdout.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

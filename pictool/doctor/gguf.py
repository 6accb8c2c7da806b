"""Whether a GGUF file can be linked: what is moved, removed and shared in llama.cpp against what is computed there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from pictool.core import Chunk
from pictool.doctor.answers import Policies, examine_answers
from pictool.doctor.verdict import Verdict, VerdictStatus, facts_of, guarded, within
from pictool.engines import engine_of
from pictool.engines.llamacpp.model import GgufModel, open_gguf
from pictool.engines.llamacpp.state import read_rows
from pictool.linker.link import link
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime.tensors import to_bytes
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.engines.llamacpp.link import LlamaImage
    from pictool.engines.llamacpp.state import LayerRows

SECTION = "exactness of llama.cpp"
_LENGTH, _DISTANCE, _CHUNKS = 24, 100, 3
_LIMITS = {"float32": 5e-4, "float16": 2e-2}  # of a difference, as a share of the L2 norm
_NOISE_FACTOR, _MOST = 3.0, 0.5  # how far the engine's own noise raises a limit
Layers = Sequence["LayerRows"]


def examine_gguf(name: str, device: str, dtype: str, objects: Path, policies: Policies) -> Iterator[Verdict]:
    """Examine a GGUF file; objects of the checks go below `objects`."""
    opened: list[GgufModel] = []
    yield from guarded("model", "model", lambda: _open(name, device, dtype, opened))
    if not opened:
        return
    (model,) = opened
    yield from guarded(SECTION, "relocated keys are those computed there", lambda: check_moved(model))
    yield from guarded(SECTION, "recomputing everything is full", lambda: check_everything(model, objects))
    yield from guarded(SECTION, "what was appended can be removed", lambda: check_removed(model, objects))
    engine = engine_of(model)(model, Store(objects / "answers"))
    linked = [labelled for labelled in policies if model.links(labelled.policy)]
    yield from guarded("answers of the llamacpp engine", "answers", lambda: examine_answers(engine, linked))


def check_moved(model: GgufModel) -> Verdict:
    """K and V of a chunk that was computed at 0 and moved, and of one that was computed where it went."""
    tokens = _tokens(model, _LENGTH)
    at_0, there = (_computed(model, tokens, start) for start in (0, _DISTANCE))
    return judge_moved(_moved(model, tokens), at_0, there, _LIMITS[model.dtype])


def judge_moved(moved: Layers, at_0: Layers, there: Layers, least: float) -> Verdict:
    """A verdict on the layer in which a chunk that was moved differs most from what is computed there, for its limit.

    Values have no position, so what differs in those that were computed at two places, where nothing was moved, is the
    engine's own noise: 0 in the first layer, and more after each that rounds to a few bits. K and V are products of the
    same activations; a key that was rotated wrongly differs by far more, as do all of the first layer.

    Args:
        least: the limit without noise, as a share of the L2 norm.
    """
    compared = [(0.0, least)]
    for ours, alone, theirs in zip(moved, at_0, there, strict=True):
        limit = min(_MOST, max(least, _NOISE_FACTOR * _difference(alone[1], theirs[1])))
        compared += [(_difference(a, b), limit) for a, b in zip(ours, theirs, strict=True) if b.size]
    apart, limit = max(compared, key=lambda pair: pair[0] / pair[1])
    noise = max(_difference(alone[1], theirs[1]) for alone, theirs in zip(at_0, there, strict=True))
    what = f"llama.cpp's own values at two places are up to {noise:.1e} apart; K and V of the worst layer are"
    return within(SECTION, "relocated keys are those computed there", apart, limit, what)


def _computed(model: GgufModel, tokens: Sequence[int], start: int) -> Layers:
    """K and V of tokens that are computed at a place."""
    context = model.stack.take(start + 2 * len(tokens), 4)
    context.decode(tokens, start)
    rows = read_rows(context, model.format, model.facts.window, start, start + len(tokens))
    model.stack.give_back(context)
    return rows


def _moved(model: GgufModel, tokens: Sequence[int]) -> Layers:
    """K and V of tokens that are computed at 0 and moved by `_DISTANCE`."""
    end, places = _DISTANCE + len(tokens), np.arange(len(tokens), dtype=np.int32)
    context = model.stack.take(end + len(tokens), 4)
    ((_, packed),) = model.prefill([tokens])
    rows = [model.format.unpack(i, *map(to_bytes, pair)) for i, pair in enumerate(packed)]
    if model.facts.scales:
        scaled = zip(rows, model.facts.scales, strict=True)
        rows = [((key / np.asarray(scale, np.float32)).astype(key.dtype), value) for (key, value), scale in scaled]
    context.set_state(1, model.format.write(rows, places))
    context.shift(1, _DISTANCE)
    context.decode([0], 0)
    context.remove(0)
    context.copy(1, 0, _DISTANCE, end)
    found = read_rows(context, model.format, model.facts.window, _DISTANCE, end)
    model.stack.give_back(context)
    return found


def check_everything(model: GgufModel, objects: Path) -> Verdict:
    """Rule 4: legolink with k of whole chunks is full recompute."""
    store = Store(objects / "exactness")
    lego, full = (_link(model, store, make_policy(*policy)) for policy in (("legolink", {"k": 1 << 20}), (BASELINE,)))
    apart = _difference(lego.logits.numpy(), full.logits.numpy())
    return within(SECTION, "recomputing everything is full", apart, _LIMITS[model.dtype], "logits are")


def check_removed(model: GgufModel, objects: Path) -> Verdict:
    """A prompt that is continued, rewound and continued again gives the same."""
    image = _link(model, Store(objects / "exactness"), make_policy("legolink", {"k": 4}))
    token = int(image.logits.argmax())
    first = image.append(token)
    image.append(token)
    image.rewind()
    apart = _difference(image.append(token).numpy(), first.numpy())
    return within(SECTION, "what was appended can be removed", apart, _LIMITS[model.dtype], "logits are")


def _open(name: str, device: str, dtype: str, opened: list[GgufModel]) -> Verdict:
    started = time.perf_counter()
    model = open_gguf(name, device, dtype)
    _ = model.stack
    opened.append(model)
    seconds = time.perf_counter() - started
    moved = ", whose keys llama.cpp scales as it moves them (YaRN), which pic undoes" if model.facts.scales else ""
    window = f", a window of {model.facts.window}" if model.facts.window else ""
    text = (
        f"{model.name}: {model.facts.architecture}, {model.geometry.layers} layers{window}, {model.max_positions} "
        f"positions, KV in {model.dtype}{moved}; loaded in {seconds:.1f} s"
    )
    values = {"architecture": model.facts.architecture, "load_s": seconds, **facts_of(model)}
    return Verdict("model", "model", VerdictStatus.OK, text, values)


def _link(model: GgufModel, store: Store, policy: object) -> LlamaImage:
    tokens = _tokens(model, _LENGTH * _CHUNKS)
    chunks = [Chunk(f"part {at}", tuple(tokens[at : at + _LENGTH]), "doctor") for at in range(0, len(tokens), _LENGTH)]
    spec = Spec.raw(chunks, "Why?", policy)  # type: ignore[arg-type]
    return cast("LlamaImage", link(model, store, spec).image)


def _tokens(model: GgufModel, count: int) -> list[int]:
    drawn = np.random.default_rng(7).integers(0, model.config.vocab_size, count)
    return [int(token) for token in drawn]


def _difference(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    exact = theirs.astype(np.float64)
    apart = float(np.linalg.norm(ours.astype(np.float64) - exact) / max(1e-12, float(np.linalg.norm(exact))))
    return apart if np.isfinite(apart) else float("inf")

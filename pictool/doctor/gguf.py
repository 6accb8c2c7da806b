"""Whether a GGUF file can be linked: what is moved, removed and shared in llama.cpp against what is computed there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from pictool.core import Chunk
from pictool.doctor.answers import AnswerCheck, examine_answers
from pictool.doctor.verdict import Verdict, VerdictStatus, facts_of, guarded, within
from pictool.engines import engine_of
from pictool.engines.llamacpp.model import GgufModel, open_gguf
from pictool.engines.llamacpp.state import read_rows
from pictool.linker.grid import LabelledPolicy
from pictool.linker.link import link
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime.tensors import to_bytes
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.engines.llamacpp.link import LlamaImage

SECTION = "exactness of llama.cpp"
_LENGTH, _DISTANCE, _CHUNKS = 24, 100, 3
_LIMITS = {"float32": 5e-4, "float16": 2e-2}  # of a difference, as a share of the L2 norm


def examine_gguf(name: str, device: str, dtype: str, objects: Path, question: AnswerCheck) -> Iterator[Verdict]:
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
    check = AnswerCheck(_possible(model, question.policies), question.judged)
    yield from guarded("answers of the llamacpp engine", "answers", lambda: examine_answers(engine, check, []))


def check_moved(model: GgufModel) -> Verdict:
    """K and V of a chunk that was computed at 0 and moved, and of one that was computed where it went."""
    tokens, window = _tokens(model, _LENGTH), model.facts.window
    end, places = _DISTANCE + _LENGTH, np.arange(_LENGTH, dtype=np.int32)
    there, moved = (model.stack.take(end + _LENGTH, 4) for _ in range(2))
    there.decode(tokens, _DISTANCE)
    expected = read_rows(there, model.format, window, _DISTANCE, end)
    model.stack.give_back(there)
    ((_, packed),) = model.prefill([tokens])
    rows = [model.format.unpack(i, *map(to_bytes, pair)) for i, pair in enumerate(packed)]
    if model.facts.scales:
        scaled = zip(rows, model.facts.scales, strict=True)
        rows = [((key / np.asarray(scale, np.float32)).astype(key.dtype), value) for (key, value), scale in scaled]
    moved.set_state(1, model.format.write(rows, places))
    moved.shift(1, _DISTANCE)
    moved.decode([0], 0)
    moved.remove(0)
    moved.copy(1, 0, _DISTANCE, end)
    found = read_rows(moved, model.format, window, _DISTANCE, end)
    model.stack.give_back(moved)
    pairs = [(a, b) for own, other in zip(found, expected, strict=True) for a, b in zip(own, other, strict=True)]
    apart = max(_difference(a, b) for a, b in pairs if b.size)
    return within(SECTION, "relocated keys are those computed there", apart, _LIMITS[model.dtype], "K and V are")


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


def _possible(model: GgufModel, policies: Sequence[LabelledPolicy]) -> tuple[LabelledPolicy, ...]:
    """The policies that llama.cpp can run."""
    return tuple(labelled for labelled in policies if model.links(labelled.policy))


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

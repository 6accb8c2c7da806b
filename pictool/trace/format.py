"""The trace file: what one link did, in safetensors, for `pic inspect`, the TUI and tests. Needs no torch.

tokens int32 [n] · starts int32 [chunks + 2] · rows bool [layers, n] · logits float32 [vocab] · [scores float32 [n]]

__metadata__ (strings; JSON unless said otherwise)
format      "pictool.trace" (plain)            version     "2" (plain)
answer      the answer's text (plain)          report      what `pic link --json` prints
target      what the objects were compiled for: architecture, model, tokenizer, dtype, geometry
texts       of the head, each chunk and the tail
chunks      for each: its source (for people), and its object's key, codec ("none" if absent) and what it was
            compiled after, as headers of objects have it
pieces      the text of each token [n]
generated   for each generated token: id, text, log-probability
top         candidates for the first token, the likeliest first: id and text
checksum    BLAKE3 (plain) over everything else

A trace is read only if its checksum holds, its parts have their types and are consistent: anybody can compute a
checksum. Everything is checked here, once, so that no reader of a `Trace` has to.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.core import Contexts, Geometry, Layout, RowMask, Target, contexts_fields, parse_contexts
from pictool.errors import TraceError
from pictool.linker.policies import policies
from pictool.linker.policies.base import Knob
from pictool.reading import parse_json, read_file
from pictool.store.objects.header import DTYPES

FORMAT, VERSION = "pictool.trace", "2"
_AGAIN = "link again with --trace"
_DAMAGED = f"the trace is damaged; {_AGAIN}"
_MAX_HEADER = 32 << 20  # a prompt of 1,000,000 tokens has 20 MB
_MAX_BYTES = 256 << 20
_REPORT = {"answer", "algo", "params", "model", "engine", "tokens", "timing", "compare"}
_COUNTS = ("head", "context", "tail", "prompt", "recomputed", "generated")
_TIMES = ("load_s", "select_s", "recompute_s", "ttft_s", "decode_s")
_TENSORS = {"tokens": "int32", "starts": "int32", "rows": "bool", "logits": "float32", "scores": "float32"}


@dataclass(frozen=True)
class TracedChunk:
    """A chunk of the prompt: its source (for people), and the object that it is, or would be, compiled to.

    A separator between two documents has the key "".
    """

    source: str
    key: str
    codec: str = "none"
    after: Contexts = ()


@dataclass(frozen=True)
class GeneratedToken:
    """A generated token; `logprob` is in nats, under the model's own distribution."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Candidate:
    """A candidate for the first token of the answer."""

    id: int
    text: str


@dataclass(frozen=True)
class Trace:
    """What one link did.

    Attributes:
        rows: bool [layers, n], the tokens whose K and V were computed at each layer.
        logits: float32 [vocab], at the last prompt token.
        scores: float32 [n], the scores that the policy selected rows by, or None.
        texts: of the head, each chunk and the tail. pieces: the text of each token [n].
        top: candidates for the first token, the likeliest first.
        report: what `pic link --json` prints.
    """

    target: Target
    layout: Layout
    rows: RowMask
    logits: NDArray[np.float32]
    scores: NDArray[np.float32] | None
    texts: tuple[str, ...]
    chunks: tuple[TracedChunk, ...]
    pieces: tuple[str, ...]
    generated: tuple[GeneratedToken, ...]
    top: tuple[Candidate, ...]
    report: Mapping[str, Any]

    @property
    def answer(self) -> str:
        return str(self.report["answer"])

    @property
    def policy(self) -> str:
        """The policy with all its fields, in one line."""
        params = " ".join(f"{name}={value}" for name, value in self.report["params"].items() if value != "")
        return f"{self.report['algo']} {params}".strip()

    @property
    def label(self) -> str:
        """The policy with the field that sets its cost, for titles; of a policy that is not installed its name."""
        algo, knob = self.report["algo"], knob_of(self.report)
        return algo if knob is None else f"{algo} {knob.field}={self.report['params'][knob.field]:g}"

    @property
    def num_documents(self) -> int:
        """The chunks but separators."""
        return sum(bool(chunk.key) for chunk in self.chunks)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of head, chunks and tail."""
        return "head", *(chunk.source for chunk in self.chunks), "tail"

    def require(self, target: Target, name: str) -> None:
        """Check that a model is the one of the link; `name` is the trace's in messages.

        Raises:
            TraceError: another model; the message names both.
        """
        for field in fields(Target):
            traced, actual = getattr(self.target, field.name), getattr(target, field.name)
            if traced != actual:
                raise TraceError(
                    f"{name}: traced with {field.name} {str(traced)[:48]}, but this model has {field.name} "
                    f"{str(actual)[:48]}; choose the model of the link with -m (it was {self.report['model']})"
                )


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace; the file appears only when it is complete."""
    from safetensors.numpy import save

    from pictool.store.store import atomic_write

    tensors, metadata = _tensors(trace), _metadata(trace)
    with atomic_write(path) as file:
        file.write(save(tensors, metadata | {"checksum": _checksum(tensors, metadata)}))


def is_trace(path: Path) -> bool:
    """Whether a file has the header of a trace, whole or damaged. Raises TraceError if it cannot be read."""
    from pictool.reading import open_regular

    try:
        with open(open_regular(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return f'"{FORMAT}"'.encode() in file.read(min(length, _MAX_HEADER))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def read_trace(path: Path) -> Trace:
    """Read a trace and check it.

    Raises:
        TraceError: no trace, another version, or a truncated or damaged file.
    """
    try:
        tensors, metadata = _read(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error}); specify a trace") from error
    except Exception as error:  # SafetensorError, and what numpy makes of unusual types
        raise TraceError(f"{path}: not a trace, or a truncated one ({_first_line(error)}); {_AGAIN}") from error
    if metadata.get("format") != FORMAT:
        raise TraceError(f"{path}: not a trace; create one with pic link --trace")
    if metadata.get("version") != VERSION:
        version = metadata.get("version")
        raise TraceError(f"{path}: trace version {version}, but this pic reads version {VERSION}; link again")
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise TraceError(f"{path}: does not match its checksum; {_DAMAGED}")
    try:
        if problem := _find_tensor_problem(tensors):
            raise ValueError(problem)
        trace = _to_trace(tensors, metadata)
        problem = _find_problem(trace)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(f"{path}: does not have the form of a trace ({_first_line(error)}); {_DAMAGED}") from error
    if problem:
        raise TraceError(f"{path}: {problem}; {_DAMAGED}")
    return trace


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors.numpy import load

    data = read_file(path, _MAX_BYTES)
    length = int.from_bytes(data[:8], "little")
    if length > _MAX_HEADER:
        raise ValueError("its header is too long")
    tensors = load(data)
    return tensors, dict(json.loads(data[8 : 8 + length]).get("__metadata__") or {})


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).split("\n")[0][:100]


def _tensors(trace: Trace) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        "tokens": trace.layout.tokens.astype(np.int32),
        "starts": np.asarray(trace.layout.starts, dtype=np.int32),
        "rows": trace.rows,
        "logits": trace.logits.astype(np.float32),
    }
    return tensors if trace.scores is None else tensors | {"scores": trace.scores.astype(np.float32)}


def _metadata(trace: Trace) -> dict[str, str]:
    values = {
        "report": trace.report, "target": trace.target.fields, "texts": trace.texts, "pieces": trace.pieces,
        "chunks": list(map(_chunk_fields, trace.chunks)), "generated": [asdict(token) for token in trace.generated],
        "top": [asdict(token) for token in trace.top],
    }  # fmt: skip
    coded = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    return {"format": FORMAT, "version": VERSION, "answer": trace.answer, **coded}


def _chunk_fields(chunk: TracedChunk) -> dict[str, Any]:
    return {"source": chunk.source, "key": chunk.key, "codec": chunk.codec, **contexts_fields(chunk.after)}


def _checksum(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    from blake3 import blake3

    shapes = {name: [str(tensor.dtype), tensor.shape] for name, tensor in tensors.items()}
    digest = blake3(json.dumps([dict(metadata), shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _find_tensor_problem(tensors: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the tensors alone; None if nothing is."""
    if not tensors.keys() <= _TENSORS.keys() or not _TENSORS.keys() - {"scores"} <= tensors.keys():
        return f"it has the tensors {', '.join(sorted(tensors))[:80]}"
    for name, dtype in _TENSORS.items():
        tensor = tensors.get(name)
        if tensor is not None and (str(tensor.dtype), tensor.ndim) != (dtype, 2 if name == "rows" else 1):
            return "its tensors have other types"
        if dtype == "float32" and tensor is not None and not np.isfinite(tensor).all():
            return f"its {name} are not finite"
    if (tensors["rows"].view(np.uint8) > 1).any():  # neither true nor false
        return "its rows are not those of a link"
    return None


def _to_trace(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Trace:
    names = ("report", "target", "texts", "chunks", "pieces", "generated", "top")
    values = {name: parse_json(metadata[name]) for name in names}
    for name in ("texts", "pieces", "generated", "top"):
        json.dumps(values[name], ensure_ascii=False).encode()  # half of a surrogate pair is no text
    if problem := _find_report_problem(values["report"], metadata["answer"]):
        raise ValueError(problem)
    return Trace(
        target=_record(Target, values["target"]),
        layout=Layout(tensors["tokens"], tuple(int(start) for start in tensors["starts"])),
        rows=tensors["rows"],
        logits=tensors["logits"],
        scores=tensors.get("scores"),
        texts=_texts(values["texts"]),
        chunks=tuple(map(_chunk, _list(values["chunks"]))),
        pieces=_texts(values["pieces"]),
        generated=tuple(_record(GeneratedToken, token) for token in _list(values["generated"])),
        top=tuple(_record(Candidate, token) for token in _list(values["top"])),
        report=values["report"],
    )


def _chunk(values: Any) -> TracedChunk:
    if not isinstance(values, dict):
        raise ValueError("no TracedChunk")
    names = [name for name in ("sinks", "dummy", "after") if name in values]
    chunk: TracedChunk = _record(TracedChunk, {name: value for name, value in values.items() if name not in names})
    return replace(chunk, after=parse_contexts({name: values[name] for name in names}))


def _record(cls: Any, values: Any) -> Any:
    """A dataclass of an object with its fields, each of its type.

    Raises:
        ValueError: anything else.
    """
    needed = {field.name for field in fields(cls) if field.default is MISSING}
    kinds = typing.get_type_hints(cls)
    if not isinstance(values, dict) or not needed <= values.keys() <= kinds.keys():
        raise ValueError(f"no {cls.__name__}")
    made = dict(values)
    for name, kind in kinds.items():
        value = values.get(name)
        if kind is Geometry:
            made[name] = Geometry.from_fields(value or {})
        elif name in values and not (_is_number(value) if kind is float else type(value) is kind):
            raise ValueError(f"{cls.__name__}.{name} is not a {kind.__name__}")
    return cls(**made)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is missing")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not all(isinstance(text, str) for text in _list(value)):
        raise ValueError("a text is missing")
    return tuple(value)


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float holds."""
    return type(value) in (int, float) and math.isfinite(float(value))


def _find_problem(trace: Trace) -> str | None:
    """Say what is inconsistent in a trace; None if nothing is."""
    layout, num_chunks = trace.layout, len(trace.chunks)
    n = len(layout.tokens)
    shapes = {
        "starts": (len(layout.starts), num_chunks + 2), "texts": (len(trace.texts), num_chunks + 2),
        "pieces": (len(trace.pieces), n), "rows": (trace.rows.shape, (trace.target.geometry.layers, n)),
        "scores": (n if trace.scores is None else len(trace.scores), n),
    }  # fmt: skip
    for name, (actual, expected) in shapes.items():
        if actual != expected:
            return f"its {name} are {actual}, not {expected}"
    geometry = trace.target.geometry
    if min(geometry.layers, *(size for part in geometry.parts for size in (part.heads, part.width))) < 1:
        return "its model has no layers"
    if trace.target.dtype not in DTYPES:
        return "its dtype is not one that models compute in"
    if layout.starts[0] != 0 or any(np.diff([*layout.starts, n]) < 0) or layout.starts[-1] >= n:
        return "its parts do not follow each other"
    if not trace.rows[:, layout.starts[-1] :].all() or (trace.rows[1:] & ~trace.rows[:-1]).any():
        return "its rows are not those of a link"
    if not trace.generated or not trace.top or not len(trace.logits):
        return "its logits or generated tokens are missing"
    ids = [layout.tokens.min(), layout.tokens.max(), *(token.id for token in trace.generated)]
    ids += [token.id for token in trace.top]
    if not all(0 <= token_id < len(trace.logits) for token_id in ids):
        return "its tokens or its generated tokens are outside the vocabulary"
    return _find_count_problem(trace)


def _find_count_problem(trace: Trace) -> str | None:
    """Say whether the report counts other tokens than there are; None if it does not."""
    layout = trace.layout
    counts = {
        "head": layout.starts[1], "context": layout.num_context, "tail": layout.num_tokens - layout.num_context,
        "prompt": layout.num_tokens, "generated": len(trace.generated),
    }  # fmt: skip
    wrong = [name for name, count in counts.items() if trace.report["tokens"][name] != count]
    return f"its report counts other tokens of {wrong[0]}" if wrong else None


def knob_of(report: Mapping[str, Any]) -> Knob | None:
    """The knob of a report's policy, if it is installed and has one among the report's fields."""
    known = policies()
    knob = known[report["algo"]].knob if report["algo"] in known else None
    return knob if knob is not None and knob.field in report["params"] else None


def _find_report_problem(report: Any, answer: str) -> str | None:
    """Say what of a report is not that of a link; None if nothing is."""
    if not isinstance(report, dict) or report.keys() - {"finish_reason"} != _REPORT:  # traces of 0.3 have none
        return "its report is not that of a link"
    tokens, timing, params, compare = (report[name] for name in ("tokens", "timing", "params", "compare"))
    if not (isinstance(params, dict) and isinstance(tokens, dict) and isinstance(timing, dict)):
        return "its report is not that of a link"
    numbers = [tokens.get(name) for name in _COUNTS] + [timing.get(name) for name in _TIMES]
    numbers += [params[knob.field]] if (knob := knob_of(report)) else []
    scalars = [*(compare or {}).values()] if isinstance(compare, dict | None) else [[]]
    for value in params.values():
        scalars += value if isinstance(value, list) else [value]
    is_sound = all(map(_is_number, numbers)) and not any(isinstance(value, list | dict) for value in scalars)
    is_sound &= all(
        isinstance(report.get(name, ""), str) for name in ("answer", "finish_reason", "algo", "model", "engine")
    )
    return None if is_sound and report["answer"] == answer else "its report is not that of a link"

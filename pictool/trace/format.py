"""Traces: what a link did, as a safetensors file for `pic inspect`, the TUI and tests. Reading one needs no torch.

tokens int32 [n] · starts int32 [chunks + 2] · rows bool [layers, n] · logits float32 [vocab] · [scores float32 [n]]

__metadata__ (strings; JSON unless said otherwise)
format      "pictool.trace" (plain)            version     "2" (plain)
answer      the answer's text (plain)          report      what `pic link --json` prints
target      what its objects are compiled for: architecture, model, tokenizer, dtype, geometry
texts       of the head, each chunk and the tail
chunks      for each: its source (for people), and its object's key, sinks and codec ("none" if it is not said)
pieces      the text of each token [n]
generated   for each generated token: id, text, log-probability
top         of the first token's candidates, the likeliest first: id and text
checksum    BLAKE3 (plain) over everything else

A trace is accepted only if the checksum holds and all of it fits together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.core import Geometry, Layout, RowMask, Target
from pictool.errors import TraceError

FORMAT, VERSION = "pictool.trace", "2"
_DAMAGED = "the trace is damaged; link again with --trace"
_MAX_HEADER = 100_000_000  # what safetensors itself allows


@dataclass(frozen=True)
class TracedChunk:
    """A chunk of the prompt: where it came from (for people), and the object that it was, or would be, compiled to."""

    source: str
    key: str
    sinks: int
    codec: str = "none"


@dataclass(frozen=True)
class TracedToken:
    """A generated token; `logprob` in nats, under the model's own distribution."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Candidate:
    """A token that might have been the first of the answer."""

    id: int
    text: str


@dataclass(frozen=True)
class Trace:
    """What one link did. `report` is what `pic link --json` prints.

    Attributes:
        rows: bool [layers, n], whose K and V were computed at each layer.
        logits: float32 [vocab], at the last prompt token. scores: float32 [n], what the policy chose by, or None.
        texts: of the head, each chunk and the tail. pieces: the text of each token [n].
        top: candidates for the first token, the likeliest first.
    """

    target: Target
    layout: Layout
    rows: RowMask
    logits: NDArray[np.float32]
    scores: NDArray[np.float32] | None
    texts: tuple[str, ...]
    chunks: tuple[TracedChunk, ...]
    pieces: tuple[str, ...]
    generated: tuple[TracedToken, ...]
    top: tuple[Candidate, ...]
    report: Mapping[str, Any]

    @property
    def answer(self) -> str:
        return str(self.report["answer"])

    @property
    def policy(self) -> str:
        """The policy with its fields, in one line."""
        params = " ".join(f"{name}={value}" for name, value in self.report["params"].items() if value != "")
        return f"{self.report['algo']} {params}".strip()

    @property
    def label(self) -> str:
        """The policy with the one field that everyone sets, for titles."""
        params = self.report["params"]
        return " ".join(
            [self.report["algo"], *(f"{name}={params[name]:g}" for name in ("k", "ratio", "s") if name in params)]
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """What head, chunks and tail are called."""
        return "head", *(chunk.source for chunk in self.chunks), "tail"

    def require(self, target: Target, name: str) -> None:
        """Refuse a model that is not the one of the link, with a message that names both sides."""
        for field in (one.name for one in fields(Target)):
            mine, wanted = getattr(self.target, field), getattr(target, field)
            if mine != wanted:
                raise TraceError(
                    f"{name}: traced with {field} {str(mine)[:48]}, but this model has {field} {str(wanted)[:48]}; "
                    f"name the model of the link with -m (it was {self.report['model']})"
                )


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace; it becomes visible only when complete."""
    from safetensors.numpy import save

    from pictool.store.store import atomic_write

    tensors, metadata = _tensors(trace), _metadata(trace)
    with atomic_write(path) as file:
        file.write(save(tensors, metadata | {"checksum": _checksum(tensors, metadata)}))


def is_trace(path: Path) -> bool:
    """Whether a file says that it is a trace, whole or damaged; reads its header only."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return f'"{FORMAT}"'.encode() in file.read(min(length, _MAX_HEADER))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def read_trace(path: Path) -> Trace:
    """Read a trace, and check all of it.

    Raises:
        TraceError: no trace, of another version, truncated or damaged.
    """
    from safetensors import SafetensorError

    try:
        tensors, metadata = _read(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a trace, or a truncated one ({_first_line(error)})") from error
    if metadata.get("format") != FORMAT:
        raise TraceError(f"{path}: not a trace; make one with pic link --trace")
    if metadata.get("version") != VERSION:
        theirs = metadata.get("version")
        raise TraceError(f"{path}: trace version {theirs}, but this pic reads version {VERSION}; link again")
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise TraceError(f"{path}: does not match its checksum; {_DAMAGED}")
    try:
        trace = _trace_of(tensors, metadata)
        problem = _problem(trace)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise TraceError(f"{path}: is not as pic writes traces ({_first_line(error)}); {_DAMAGED}") from error
    if problem:
        raise TraceError(f"{path}: {problem}; {_DAMAGED}")
    return trace


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})


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
        "report": trace.report, "target": asdict(trace.target), "texts": trace.texts, "pieces": trace.pieces,
        "chunks": [asdict(chunk) for chunk in trace.chunks], "generated": [asdict(one) for one in trace.generated],
        "top": [asdict(one) for one in trace.top],
    }  # fmt: skip
    coded = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    return {"format": FORMAT, "version": VERSION, "answer": trace.answer, **coded}


def _checksum(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    from blake3 import blake3

    shapes = {name: [str(tensor.dtype), tensor.shape] for name, tensor in tensors.items()}
    digest = blake3(json.dumps([dict(metadata), shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _trace_of(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Trace:
    read = {
        name: json.loads(metadata[name])
        for name in ("report", "target", "texts", "chunks", "pieces", "generated", "top")
    }
    target = Target(**read["target"] | {"geometry": Geometry(**read["target"]["geometry"])})
    return Trace(
        target=target,
        layout=Layout(tensors["tokens"], tuple(int(start) for start in tensors["starts"])),
        rows=tensors["rows"],
        logits=tensors["logits"],
        scores=tensors.get("scores"),
        texts=tuple(read["texts"]),
        chunks=tuple(TracedChunk(**chunk) for chunk in read["chunks"]),
        pieces=tuple(read["pieces"]),
        generated=tuple(TracedToken(**one) for one in read["generated"]),
        top=tuple(Candidate(**one) for one in read["top"]),
        report=read["report"],
    )


def _problem(trace: Trace) -> str | None:
    """What does not fit together, or None."""
    layout, num_chunks = trace.layout, len(trace.chunks)
    n = len(layout.tokens)
    shapes = {
        "starts": (len(layout.starts), num_chunks + 2), "texts": (len(trace.texts), num_chunks + 2),
        "pieces": (len(trace.pieces), n), "rows": (trace.rows.shape, (trace.target.geometry.layers, n)),
        "logits": (trace.logits.ndim, 1), "scores": (n if trace.scores is None else trace.scores.shape[0], n),
    }  # fmt: skip
    for name, (found, wanted) in shapes.items():
        if found != wanted:
            return f"its {name} are {found}, not {wanted}"
    dtypes = (layout.tokens.dtype, trace.rows.dtype, trace.logits.dtype)
    if [str(one) for one in dtypes] != ["int32", "bool", "float32"]:
        return "its tensors have other types"
    if layout.starts[0] != 0 or any(np.diff([*layout.starts, n]) < 0) or layout.starts[-1] >= n:
        return "its parts do not follow each other"
    if not trace.rows[:, layout.starts[-1] :].all() or (trace.rows[1:] & ~trace.rows[:-1]).any():
        return "its rows are not those of a link"
    if not trace.generated or not np.isfinite(trace.logits).all():
        return "its logits or generated tokens are missing"
    ids = [token.id for token in trace.generated] + [token.id for token in trace.top]
    if not all(0 <= one < len(trace.logits) for one in ids):
        return "its generated tokens are outside the vocabulary"
    return _problem_of_report(trace.report)


def _problem_of_report(report: Mapping[str, Any]) -> str | None:
    """What the report lacks of what is shown, or None."""
    numbers = [report["tokens"][name] for name in ("head", "context", "tail", "prompt", "recomputed", "generated")]
    numbers += [report["timing"][name] for name in ("load_s", "select_s", "recompute_s", "ttft_s", "decode_s")]
    texts = [report[name] for name in ("answer", "algo", "model", "engine")]
    is_whole = all(isinstance(one, int | float) for one in numbers) and all(isinstance(one, str) for one in texts)
    return None if is_whole and isinstance(report["params"], dict) else "its report is not that of a link"

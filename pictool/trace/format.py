"""The trace file: what one link did, in safetensors, for `pic inspect`, the TUI and tests. Needs no torch.

tokens int32 [n] · starts int32 [chunks + 2] · rows bool [layers, n] · logits float32 [vocab] · [scores float32 [n]]

__metadata__ (strings; JSON unless said otherwise)
format      "pictool.trace" (plain)            version     "2" (plain)
answer      the answer's text (plain)          report      what `pic link --json` prints
target      what the objects were compiled for: architecture, model, tokenizer, dtype, geometry
texts       of the head, each chunk and the tail
chunks      for each: its source (for people), and its object's key, sinks and codec ("none" if absent)
pieces      the text of each token [n]
generated   for each generated token: id, text, log-probability
top         candidates for the first token, the likeliest first: id and text
checksum    BLAKE3 (plain) over everything else

A trace is read only if its checksum holds and its parts are consistent.
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
    """A chunk of the prompt: its source (for people), and the object that it is, or would be, compiled to."""

    source: str
    key: str
    sinks: int
    codec: str = "none"


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
        """The policy with the field that sets its cost, for titles."""
        params = self.report["params"]
        return " ".join(
            [self.report["algo"], *(f"{name}={params[name]:g}" for name in ("k", "ratio", "s") if name in params)]
        )

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
                    f"{str(actual)[:48]}; name the model of the link with -m (it was {self.report['model']})"
                )


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace; the file appears only when it is complete."""
    from safetensors.numpy import save

    from pictool.store.store import atomic_write

    tensors, metadata = _tensors(trace), _metadata(trace)
    with atomic_write(path) as file:
        file.write(save(tensors, metadata | {"checksum": _checksum(tensors, metadata)}))


def is_trace(path: Path) -> bool:
    """Whether a file has the header of a trace, whole or damaged."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return f'"{FORMAT}"'.encode() in file.read(min(length, _MAX_HEADER))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def read_trace(path: Path) -> Trace:
    """Read a trace and check it.

    Raises:
        TraceError: no trace, another version, or a truncated or damaged file.
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
        version = metadata.get("version")
        raise TraceError(f"{path}: trace version {version}, but this pic reads version {VERSION}; link again")
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise TraceError(f"{path}: does not match its checksum; {_DAMAGED}")
    try:
        trace = _to_trace(tensors, metadata)
        problem = _find_problem(trace)
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
        "chunks": [asdict(chunk) for chunk in trace.chunks], "generated": [asdict(token) for token in trace.generated],
        "top": [asdict(token) for token in trace.top],
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


def _to_trace(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Trace:
    names = ("report", "target", "texts", "chunks", "pieces", "generated", "top")
    values = {name: json.loads(metadata[name]) for name in names}
    target = Target(**values["target"] | {"geometry": Geometry(**values["target"]["geometry"])})
    return Trace(
        target=target,
        layout=Layout(tensors["tokens"], tuple(int(start) for start in tensors["starts"])),
        rows=tensors["rows"],
        logits=tensors["logits"],
        scores=tensors.get("scores"),
        texts=tuple(values["texts"]),
        chunks=tuple(TracedChunk(**chunk) for chunk in values["chunks"]),
        pieces=tuple(values["pieces"]),
        generated=tuple(GeneratedToken(**token) for token in values["generated"]),
        top=tuple(Candidate(**token) for token in values["top"]),
        report=values["report"],
    )


def _find_problem(trace: Trace) -> str | None:
    """Say what is inconsistent in a trace; None if nothing is."""
    layout, num_chunks = trace.layout, len(trace.chunks)
    n = len(layout.tokens)
    shapes = {
        "starts": (len(layout.starts), num_chunks + 2), "texts": (len(trace.texts), num_chunks + 2),
        "pieces": (len(trace.pieces), n), "rows": (trace.rows.shape, (trace.target.geometry.layers, n)),
        "logits": (trace.logits.ndim, 1), "scores": (n if trace.scores is None else trace.scores.shape[0], n),
    }  # fmt: skip
    for name, (actual, expected) in shapes.items():
        if actual != expected:
            return f"its {name} are {actual}, not {expected}"
    dtypes = (layout.tokens.dtype, trace.rows.dtype, trace.logits.dtype)
    if [str(dtype) for dtype in dtypes] != ["int32", "bool", "float32"]:
        return "its tensors have other types"
    if layout.starts[0] != 0 or any(np.diff([*layout.starts, n]) < 0) or layout.starts[-1] >= n:
        return "its parts do not follow each other"
    if not trace.rows[:, layout.starts[-1] :].all() or (trace.rows[1:] & ~trace.rows[:-1]).any():
        return "its rows are not those of a link"
    if not trace.generated or not np.isfinite(trace.logits).all():
        return "its logits or generated tokens are missing"
    ids = [token.id for token in trace.generated] + [token.id for token in trace.top]
    if not all(0 <= token_id < len(trace.logits) for token_id in ids):
        return "its generated tokens are outside the vocabulary"
    return _find_report_problem(trace.report)


def _find_report_problem(report: Mapping[str, Any]) -> str | None:
    """Say whether the report lacks anything that is displayed; None if it does not."""
    numbers = [report["tokens"][name] for name in ("head", "context", "tail", "prompt", "recomputed", "generated")]
    numbers += [report["timing"][name] for name in ("load_s", "select_s", "recompute_s", "ttft_s", "decode_s")]
    texts = [report[name] for name in ("answer", "algo", "model", "engine")]
    has_values = all(isinstance(value, int | float) for value in numbers)
    has_values &= all(isinstance(text, str) for text in texts)
    return None if has_values and isinstance(report["params"], dict) else "its report is not that of a link"

"""The file of a query's run, `run.json`: the tree that ran, and what every call did; made by `pic query --trace`.

{"format": "pic query run", "version": 1, "answer": TEXT|null, "error": TEXT|null, "query": …, "optimised": …,
 "steps": […], "shared": {…}, "nodes": [{"lead": TEXT, "label": TEXT, "path": [STEP, …]}, …],
 "calls": [{"node": [STEP, …], "trace": FILE|null, … as `pic query --json`}, …]}

`nodes` is the tree in the order in which it is drawn, one a line; the outputs of a repeat or a map have lines of their
own. Traces are files beside it. Who reads it trusts nothing: types, sizes and the names of traces are checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.errors import InputError
from pictool.reading import parse_json, read_file, shown
from pictool.spans.optimise import TreeLine, tree_lines
from pictool.spans.query import Path as NodePath
from pictool.spans.query import Query
from pictool.store.files import atomic_write

if TYPE_CHECKING:
    from pictool.spans.running import CallRecord

FORMAT, VERSION, FILE = "pic query run", 1, "run.json"
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class CallRun:
    """What a call did. `trace` is the file of its link; None if none was written.

    Fields:
        recomputed: mean rows of the context per layer. reused: tokens of the context less these.
        is_shared: an equal call had been run, whose answer and trace these are.
        is_exact: whether its answer is that of full recompute of its prompt; None: an earlier release did not say.
    """

    path: NodePath
    answer: str
    algo: str
    context: int
    recomputed: float
    prompt: int
    generated: int
    ttft_s: float
    is_shared: bool
    trace: Path | None
    is_exact: bool | None

    @property
    def reused(self) -> float:
        return self.context - self.recomputed

    @property
    def share(self) -> float:
        """Of the context that was reused."""
        return self.reused / self.context if self.context else 0.0


@dataclass(frozen=True)
class QueryRun:
    """A run that was read. `calls` by path; `data` is the whole file."""

    path: Path
    answer: str | None
    error: str | None
    nodes: tuple[TreeLine, ...]
    calls: Mapping[NodePath, CallRun]
    data: Mapping[str, Any]

    @property
    def num_run(self) -> int:
        """Calls that were run, and share no other's answer."""
        return sum(not call.is_shared for call in self.calls.values())


def write_run(
    folder: Path, query: Query, done: Sequence[CallRecord], traces: Mapping[NodePath, str], more: Mapping[str, Any]
) -> Path:
    """Write the file of a run.

    Args:
        query: the tree that ran. done: its calls; those that were shared have the `own` of the one that ran.
        traces: names of files in the folder, by path.
        more: what else the file has: answer, error, and the optimizer's report.

    Returns:
        its path.
    """
    trace_of = {id(each.own): traces[each.path] for each in done if each.path in traces}
    calls = [{"node": list(each.path), "trace": trace_of.get(id(each.own)), **each.report()} for each in done]
    lines = [
        {"lead": node.lead, "label": node.label, "path": list(node.path)}
        for node in tree_lines(query, has_outputs=True)
    ]
    data = {"format": FORMAT, "version": VERSION, **more, "nodes": lines, "calls": calls}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / FILE) as file:
        file.write(json.dumps(data, ensure_ascii=False, indent=1).encode(errors="replace"))
    return folder / FILE


def read_run(path: Path) -> QueryRun:
    """Read a run's file, or that of a folder.

    Raises:
        InputError: it cannot be read, or is no run's file; names what is wrong in it.
    """
    path = path / FILE if path.is_dir() else path
    try:
        data = parse_json(read_file(path, MAX_BYTES))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error}); run pic query --trace again") from error
    try:
        return _parse(path, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: is not a query run ({problem}); run pic query --trace again") from error


def _parse(path: Path, data: Any) -> QueryRun:
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {shown(data['format'])} of version {shown(data['version'])}")
    nodes = tuple(
        TreeLine(_text(line["lead"]), _text(line["label"]), _path(line["path"])) for line in _list(data["nodes"])
    )
    calls = [_call(path.parent, entry) for entry in _list(data["calls"])]
    answer, error = data["answer"], data["error"]
    if not all(value is None or isinstance(value, str) for value in (answer, error)):
        raise TypeError("answer and error must be strings or null")
    return QueryRun(path, answer, error, nodes, {call.path: call for call in calls}, data)


def _call(folder: Path, entry: Any) -> CallRun:
    tokens, timing, trace = entry["tokens"], entry["timing"], entry["trace"]
    if trace is not None and Path(_text(trace)).name != trace:
        raise ValueError(f"the trace {shown(trace)} is not the name of a file beside it")
    return CallRun(
        _path(entry["node"]), _text(entry["answer"]), _text(entry["algo"]), _number(tokens["context"]),
        _number(tokens["recomputed"]), _number(tokens["prompt"]), _number(tokens["generated"]),
        float(_number(timing["ttft_s"])), entry["shared"] is True, None if trace is None else folder / trace,
        None if "exact" not in entry else entry["exact"] is True,
    )  # fmt: skip


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not a string")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise TypeError(f"{shown(value)} is not a number of tokens or seconds")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{shown(value)} is not a list")
    return value


def _path(value: Any) -> NodePath:
    if not all(isinstance(step, int | str) for step in _list(value)):
        raise TypeError(f"{shown(value)} is not a path")
    return tuple(value)

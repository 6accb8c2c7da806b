"""`pic inspect`: what an object or a trace is. Needs no torch unless attention is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictool.commands.common import UsageError, open_store, print_json
from pictool.commands.inspect_object import inspect_object
from pictool.commands.inspect_trace import inspect_traces
from pictool.commands.outputs import output_path
from pictool.errors import InputError
from pictool.store.bundles import is_object_list, read_object_list
from pictool.trace.format import is_trace

PLOT_SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class InspectOptions:
    """What to show beside the plain facts; and where a model and the objects are found."""

    text: bool = False
    layers: bool = False
    sinks: bool = False
    first: int | None = None
    attention: bool = False
    against: str | None = None
    layer: int | None = None
    head: int | None = None
    scale: str = "minmax"
    plot: str | None = None
    model: str | None = None
    store: str | None = None
    device: str | None = None
    dtype: str | None = None


def run_inspect(names: Sequence[str], options: InspectOptions, *, as_json: bool) -> None:
    paths = [find(name, options.store) for name in names]
    check_plot(options.plot, paths)
    traces = [path for path in paths if is_trace(path)]
    if traces and len(traces) < len(paths):
        raise UsageError("objects and traces cannot be inspected together; name one kind")
    _require_sense(options, bool(traces))
    if traces:
        found = inspect_traces(traces, options, as_json=as_json)
    else:
        found = [_inspect_file(path, options, as_json) for path in paths]
    if as_json:
        print_json(found[0] if len(found) == 1 else found)


def find(name: str, store: str | None) -> Path:
    """The file, or the object in the store that has this key."""
    path = Path(name)
    if path.is_file():
        return path
    if path.suffix == ".kvo" or path.is_dir():
        raise InputError(f"{name}: no such object file")
    keys = open_store(store)
    return keys.path(keys.resolve(name))


def check_plot(plot: str | None, inputs: Sequence[Path]) -> None:
    """Refuse a picture that could not be drawn or written, before the long run."""
    if plot is None:
        return
    if Path(plot).suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {plot}: must end in {' or '.join(PLOT_SUFFIXES)}")
    output_path("--plot", plot, inputs)
    from pictool.trace.plots import require_matplotlib

    require_matplotlib()


def _require_sense(options: InspectOptions, of_traces: bool) -> None:
    """Refuse options of the other kind, and of what is not shown."""
    if options.against not in (None, "full"):
        raise UsageError(f"--against {options.against}: only full is known; pic diff compares two traces")
    if not of_traces and (options.attention or options.against):
        raise UsageError("--attention and --against are for traces; make one with pic link --trace")
    if of_traces and options.layers:
        raise UsageError("--layers is for objects")
    if not options.attention and (options.layer is not None or options.head is not None):
        raise UsageError("--layer and --head say whose --attention is shown")
    if options.first is not None and not options.sinks:
        raise UsageError("--first says what --sinks counts")
    if options.plot and not of_traces and not options.sinks:
        raise UsageError("--plot: of an object, it draws --sinks")
    if options.scale not in ("minmax", "share"):
        raise UsageError(f"--scale {options.scale}: must be minmax or share")


def _inspect_file(path: Path, options: InspectOptions, as_json: bool) -> dict[str, Any]:
    if not is_object_list(path):
        return inspect_object(path, options, as_json=as_json)
    found = {"path": str(path), "objects": [str(member) for member in read_object_list(path)]}
    if not as_json:
        for field, value in found.items():
            print(f"{field:<13}{value}")
    return found

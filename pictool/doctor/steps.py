"""How links run on an accelerator: which layers are replayed, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pictool.doctor.verdict import Verdict, VerdictStatus
from pictool.runtime.graphs.recorder import VARIABLE
from pictool.runtime.graphs.rows import MOST_ROWS
from pictool.runtime.graphs.stack import GraphedStack, graphs_of

if TYPE_CHECKING:
    from pictool.runtime.model import Model

SECTION = "launches"


def examine_steps(model: Model) -> Iterator[Verdict]:
    """Say how links were computed; to be asked after some."""
    graphs = graphs_of(model.stack)
    if graphs is None:
        why = f"{VARIABLE} is off" if model.geometry.states is None else "a hybrid"
        yield Verdict(
            SECTION, "links", VerdictStatus.NOTE, f"{why}: every operation is launched separately for each chunk"
        )
        return
    yield _steps(graphs)
    text = (
        "full recompute, scores and traces, keys that are kept (prefix, outputs of calls, a pool whose prefixes are "
        f"stored), more than {MOST_ROWS} rows, and links beside another that is under way; objects of quantized codecs "
        "but float8, and those that a pool loads, are placed one by one"
    )
    yield Verdict(SECTION, "launched anew", VerdictStatus.NOTE, text)


def _steps(graphs: GraphedStack) -> Verdict:
    if graphs.problem is not None:
        text = f"no CUDA graphs, since a step cannot be replayed: {graphs.problem}"
        return Verdict(SECTION, "links", VerdictStatus.NOTE, text, {"recorded": 0})
    text = "static tensors, without graphs: only CUDA has them"
    if graphs.recorder is not None:
        text = f"{graphs.num_recorded} steps are CUDA graphs; each was replayed once, with the same result as without"
    return Verdict(SECTION, "links", VerdictStatus.OK, text, {"recorded": graphs.num_recorded})

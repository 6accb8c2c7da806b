"""What `pic inspect` shows of objects and traces, as its command line says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Optional

from pictool.commands.settings.options import ANALYSIS, SECTIONS, JsonOption, option

_SECTIONS = ("header", "candidates", "times", "parts", "layers", "text")
_NAMED = ("layers", "text")  # those that an option names


@dataclass(frozen=True)
class InspectOptions:
    """What to show. Without a section: all that needs no model, of an object its header."""

    layers: Annotated[
        bool,
        option(
            "--layers",
            None,
            "Traces: tokens computed at each layer.",
            SECTIONS,
        ),
    ] = False
    text: Annotated[
        bool, option("--text", None, "Print the whole text; traces mark the computed tokens.", SECTIONS)
    ] = False
    attention: Annotated[
        bool, option("--attention", None, "Traces: attention of the question and answer over the prompt.", ANALYSIS)
    ] = False
    layer: Annotated[
        Optional[int], option("--layer", "N", "With --attention: one layer instead of the mean.", ANALYSIS, min=0)
    ] = None
    head: Annotated[
        Optional[int], option("--head", "N", "With --attention: one head instead of the mean.", ANALYSIS, min=0)
    ] = None
    against: Annotated[
        Optional[str],
        option(
            "--against",
            "full",
            "Traces: how far KV and attention are from full recompute, by token and layer; KL of each generated token.",
            ANALYSIS,
        ),
    ] = None
    diff: Annotated[bool, option("--diff", None, "Compare two traces of the same prompt.", ANALYSIS)] = False
    as_json: JsonOption = False

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that are asked for, without those that need a model; all if none at all is asked for."""
        asked = tuple(name for name in _NAMED if getattr(self, name))
        return asked if asked or self.attention or self.against else _SECTIONS

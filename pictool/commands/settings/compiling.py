"""How texts are compiled, as a command line says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.settings.options import COMPILING, ChunkOption, argument, option
from pictool.commands.settings.types import parse_splitter

if TYPE_CHECKING:
    from pictool.core import Chunk, CompileOptions
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Compilation:
    """What a command line says of how texts are compiled."""

    files: Annotated[list[str], argument("FILE", "UTF-8 text files, or folders of them; - is stdin.")]
    force: Annotated[bool, option("--force", None, "Compile again what the store has.")] = False
    chunk_tokens: ChunkOption = None
    overlap: Annotated[
        int, option("--overlap", "N", "Begin each chunk with about N tokens of the one before it.", COMPILING, min=0)
    ] = 0
    splitter: Annotated[
        Any,
        option(
            "--splitter",
            "NAME",
            "Cut with a splitter, NAME[:FIELD=N,...]. A wrong name lists all.",
            COMPILING,
            type=parse_splitter,
        ),
    ] = None
    sinks: Annotated[
        int, option("--sinks", "N", "Compile each chunk after N dummy tokens, whose KV is dropped.", COMPILING, min=0)
    ] = 0
    cut: Annotated[
        Optional[int],
        option(
            "--cut",
            "N",
            "Of a hybrid: store states after the first N tokens; legolink-N computes these, naive needs 0. Default 16.",
            COMPILING,
            min=0,
        ),
    ] = None
    probes: Annotated[
        Optional[int],
        option(
            "--probes",
            "N",
            "Measure a table of fixups with N probes (usually 8). Costs about N + 2 forward passes per chunk.",
            COMPILING,
            min=0,
        ),
    ] = None
    probe_model: Annotated[
        Optional[str],
        option("--probe-model", "NAME", "Small model that measures the table; implies 8 probes.", COMPILING),
    ] = None

    def options(self, model: Model, codec: str, probes: int = 0) -> CompileOptions:
        """How chunks are compiled. Raises UsageError: a cut, and the model is no hybrid."""
        from pictool.core import CompileOptions

        if self.cut is not None and model.geometry.states is None:
            raise UsageError(f"--cut {self.cut}: {model.name} is no hybrid; its objects have no states")
        return CompileOptions(self.sinks, codec, probes, self.cut)

    def check(self) -> None:
        """Refuse what makes no sense together."""
        if self.probe_model and self.probes == 0:
            raise UsageError(f"--probe-model {self.probe_model}: has no effect with --probes 0")
        if self.splitter is not None and self.chunk_tokens is not None:
            raise UsageError(f"--splitter {self.splitter.name}: has fields of its own; leave --chunk-tokens out")
        if self.overlap and self.chunk_tokens is None:
            raise UsageError(f"--overlap {self.overlap}: needs --chunk-tokens")
        if self.chunk_tokens is not None and self.overlap >= self.chunk_tokens:
            raise UsageError(f"--overlap {self.overlap}: must be less than --chunk-tokens {self.chunk_tokens}")

    def chunks(self, model: Model, text: str, source: str) -> list[Chunk]:
        """The chunks of a text. Raises InputError."""
        from pictool.compiler.chunking import make_chunks
        from pictool.compiler.splitters import split

        if self.splitter is not None:
            return split(model, text, source, self.splitter)
        return make_chunks(model, text, source, self.chunk_tokens, self.overlap)

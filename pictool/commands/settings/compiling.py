"""How texts are compiled, as a command line says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.settings.options import COMPILING, ChunkOption, argument, option
from pictool.commands.settings.types import parse_splitter

if TYPE_CHECKING:
    from pictool.commands.settings.settings import Settings
    from pictool.core import Chunk, CompileOptions
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Compilation:
    """What a command line says of how texts are compiled."""

    files: Annotated[list[str], argument("FILE", "Text, PDF, HTML or Office files, or folders of them; - is stdin.")]
    force: Annotated[bool, option("--force", None, "Compile again even if the store has the object.")] = False
    chunk_tokens: ChunkOption = None
    overlap: Annotated[
        int, option("--overlap", "N", "Start each chunk with about N tokens of the previous one.", COMPILING, min=0)
    ] = 0
    splitter: Annotated[
        Any,
        option(
            "--splitter",
            "NAME",
            "Cut with this splitter, NAME[:FIELD=N,...]. An unknown name lists all.",
            COMPILING,
            type=parse_splitter,
        ),
    ] = None
    cut: Annotated[
        Optional[int],
        option(
            "--cut",
            "N",
            "Hybrid models only: where in each chunk to store the state, in tokens (16); legolink-N needs N, naive 0.",
            COMPILING,
            min=0,
        ),
    ] = None

    def options(self, model: Model, settings: Settings) -> CompileOptions:
        """How chunks are compiled. Raises UsageError: a cut, and the model is no hybrid."""
        from pictool.core import CompileOptions

        if self.cut is not None and model.geometry.states is None:
            raise UsageError(f"--cut {self.cut}: {model.name} is not a hybrid, so its objects have no states")
        return CompileOptions(settings.codec, self.cut, settings.after)

    def check(self) -> None:
        """Refuse what makes no sense together."""
        if self.splitter is not None and self.chunk_tokens is not None:
            raise UsageError(f"--splitter {self.splitter.name}: has its own fields; omit --chunk-tokens")
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

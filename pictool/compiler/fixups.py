"""Whether chunks get a table of fixups, behind how many probes, by which model. Imports no torch before one is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pictool.core import Chunk
from pictool.errors import InputError
from pictool.runtime.align import Tokenized, map_scores, tokenize
from pictool.runtime.speculative import open_speculative, speculative_name

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.runtime.sensitivity import Table

PROBES = 8  # where a table is wanted and nothing else is said
PROBE_TOKENS = 60
_DIGITS = 12  # of a fingerprint


def probe_tokens(model: Model) -> int:
    """Tokens of a probe: `PROBE_TOKENS`, or half of the model's positions if it has few."""
    return min(PROBE_TOKENS, model.max_positions // 2)


@dataclass(frozen=True)
class Measurer:
    """Makes the tables of `target`'s chunks: `by` runs the chunks' text behind `probes` prefixes that it wrote itself.

    `by` is the target, or a smaller model with any tokenizer, whose scores the target's tokens get by characters.
    """

    target: Model
    by: Model
    probes: int

    @classmethod
    def of(cls, target: Model, probes: int, by: Model | None = None) -> Measurer:
        """By default the target's speculative model measures, if it is known, and else the target itself.

        Raises:
            InputError: one probe, or fewer than none.
        """
        if probes < 0 or probes == 1:
            raise InputError(f"probes {probes}: must be 0, or 2 or more; a table tells what differs between them")
        if by is None:
            name = speculative_name(target)
            by = open_speculative(name, target) if probes and name else target
        return cls(target, by, probes)

    @property
    def is_target(self) -> bool:
        return self.by is self.target or _identity(self.by) == _identity(self.target)

    @property
    def recipe(self) -> str | None:
        """How tables are made, as objects tell it: by whom (fingerprints of weights, tokenizer); None for no table."""
        if not self.probes:
            return None
        weights, tokenizer = ("self", "") if self.is_target else _identity(self.by)
        name = f"{weights[:_DIGITS]}.{tokenizer[:_DIGITS]}".rstrip(".")
        return f"{name}-{self.probes}x{probe_tokens(self.by)}"

    def tables(self, chunks: Mapping[str, Chunk], alone: bool) -> Mapping[str, Table]:
        """The tables of chunks, by their keys. They are small: all are made before the first object is written.

        Raises:
            InputError: a chunk that does not fit behind a probe, or whose text is not that of its tokens.
        """
        if not self.probes or not chunks:
            return {}
        texts = {key: self._tokenize(chunk) for key, chunk in chunks.items()}
        from pictool.runtime.sensitivity import fixup_tables, probes_of

        behind, keys = probes_of(self.by, self.probes, probe_tokens(self.by)), list(chunks)
        found = fixup_tables(self.by, behind, [texts[key][0] for key in keys], alone)
        return {keys[index]: _mapped(table, texts[keys[index]][1]) for index, table in found}

    def _tokenize(self, chunk: Chunk) -> tuple[list[int], tuple[Tokenized, Tokenized] | None]:
        """The chunk's tokens for `by`, and where both models' tokens stand in its text, unless they are the same."""
        if self.by.target.tokenizer == self.target.target.tokenizer:
            sides, tokens = None, list(chunk.tokens)
        else:
            sides = tokenize(self.by.tokenizer, [chunk.text]), tokenize(self.target.tokenizer, [chunk.text])
            tokens = sides[0].tokens.tolist()
            if not tokens or tuple(sides[1].tokens.tolist()) != chunk.tokens:
                raise InputError(
                    f"{chunk.source}: its text is not that of its tokens, so {self.by.name} cannot measure it; "
                    f"take --probe-model {self.target.name}"
                )
        self._require_room(chunk, len(tokens))
        return tokens, sides

    def _require_room(self, chunk: Chunk, num_tokens: int) -> None:
        length = probe_tokens(self.by)
        if num_tokens + length > self.by.max_positions:
            who = "the model" if self.is_target else f"the probe model {self.by.name}"
            raise InputError(
                f"{chunk.source}: {num_tokens} tokens behind a probe of {length}, but {who} takes "
                f"{self.by.max_positions} positions; cut it with --chunk-tokens, or compile it without --probes"
            )


def _identity(model: Model) -> tuple[str, str]:
    return model.target.model, model.target.tokenizer


def _mapped(table: Table, sides: tuple[Tokenized, Tokenized] | None) -> Table:
    """The highest score of the tokens that share a character with each of the target's."""
    return table if sides is None else map_scores(table.astype(np.float32), *sides).astype("<f2")

"""Fixup tables at compile time: whether chunks get one, which model measures them, and after how many probes.

Imports no torch before a table is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pictool.compiler.align import TokenizedParts, map_scores, tokenize
from pictool.core import Chunk, FixupTable
from pictool.errors import InputError
from pictool.runtime.model import open_speculative, speculative_name

if TYPE_CHECKING:
    from pictool.runtime.model import Model

PROBES = 8  # the default, where tables are needed
PROBE_TOKENS = 60
_FINGERPRINT_DIGITS = 12
_SCORE = 3  # which formula tables are made by; raised when it changes. That of tables which tell none is 1


def probe_tokens(model: Model) -> int:
    """Tokens of a probe: `PROBE_TOKENS`, or half of the model's positions if it has few."""
    return min(PROBE_TOKENS, model.max_positions // 2)


@dataclass(frozen=True)
class TableMaker:
    """Makes the fixup tables of chunks that are compiled for `target`.

    `measurer` runs a chunk's text after `probes` prefixes that it wrote itself, and after a copy of the text
    (`runtime/sensitivity.py`). It is the target, or a smaller model with any tokenizer, whose scores are mapped to the
    target's tokens by characters.
    """

    target: Model
    measurer: Model
    probes: int  # 0: no tables

    @classmethod
    def of(cls, target: Model, probes: int, measurer: Model | None = None) -> TableMaker:
        """By default the target's speculative model measures, if it is known, and else the target itself.

        Raises:
            InputError: one probe, or fewer than none.
        """
        if probes < 0 or probes == 1:
            raise InputError(f"probes {probes}: must be 0, or 2 or more; a table compares at least two")
        if measurer is None:
            name = speculative_name(target)
            measurer = open_speculative(name, target) if probes and name else target
        return cls(target, measurer, probes)

    @property
    def is_target(self) -> bool:
        """Whether the target measures its own chunks."""
        return self.measurer is self.target or _fingerprints(self.measurer) == _fingerprints(self.target)

    @property
    def recipe(self) -> str | None:
        """How tables are made, as objects record it: fingerprints of the measurer, probes, score; None: no tables."""
        if not self.probes:
            return None
        weights, tokenizer = ("self", "") if self.is_target else _fingerprints(self.measurer)
        name = f"{weights[:_FINGERPRINT_DIGITS]}.{tokenizer[:_FINGERPRINT_DIGITS]}".rstrip(".")
        return f"{name}-{self.probes}x{probe_tokens(self.measurer)}-{_SCORE}"

    def tables(self, chunks: Mapping[str, Chunk], alone: bool) -> Mapping[str, FixupTable]:
        """The tables of chunks, by their keys. They are small: all are made before the first object is written.

        Raises:
            InputError: a chunk that has no room after a probe, or whose text is not that of its tokens.
        """
        if not self.probes or not chunks:
            return {}
        texts = {key: self._tokenize(chunk) for key, chunk in chunks.items()}
        from pictool.runtime.sensitivity import fixup_tables, probes_of

        probes, keys = probes_of(self.measurer, self.probes, probe_tokens(self.measurer)), list(chunks)
        tables = fixup_tables(self.measurer, probes, [texts[key][0] for key in keys], alone)
        return {keys[index]: _mapped(table, texts[keys[index]][1]) for index, table in tables}

    def _tokenize(self, chunk: Chunk) -> tuple[list[int], tuple[TokenizedParts, TokenizedParts] | None]:
        """The chunk's tokens for the measurer, and how both models tokenize its text, unless they do so alike."""
        if self.measurer.target.tokenizer == self.target.target.tokenizer:
            sides, tokens = None, list(chunk.tokens)
        else:
            sides = tokenize(self.measurer.tokenizer, [chunk.text]), tokenize(self.target.tokenizer, [chunk.text])
            tokens = sides[0].tokens.tolist()
            if not tokens or tuple(sides[1].tokens.tolist()) != chunk.tokens:
                raise InputError(
                    f"{chunk.source}: its text is not that of its tokens, so {self.measurer.name} cannot measure it; "
                    f"take --probe-model {self.target.name}"
                )
        self._require_room(chunk, len(tokens))
        return tokens, sides

    def _require_room(self, chunk: Chunk, num_tokens: int) -> None:
        length = probe_tokens(self.measurer)
        if num_tokens + length > self.measurer.max_positions:
            who = "the model" if self.is_target else f"the probe model {self.measurer.name}"
            raise InputError(
                f"{chunk.source}: {num_tokens} tokens after a probe of {length}, but {who} takes "
                f"{self.measurer.max_positions} positions; cut it with --chunk-tokens, or compile it without --probes"
            )


def _fingerprints(model: Model) -> tuple[str, str]:
    return model.target.model, model.target.tokenizer


def _mapped(table: FixupTable, sides: tuple[TokenizedParts, TokenizedParts] | None) -> FixupTable:
    """For every token of the target the highest score of the measurer's tokens that share a character with it."""
    return table if sides is None else map_scores(table.astype(np.float32), *sides).astype("<f2")

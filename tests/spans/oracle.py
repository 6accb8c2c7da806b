"""spnl's wheel as an oracle: a hub cache that holds the embedded tokenizer under names of spnl's templates."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pictool.spans.query import Query
from pictool.spans.reading import to_json
from pictool.spans.serialise import Markers

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("spnl has wheels for Linux on x86-64 only", allow_module_level=True)
import spnl

TOKENIZER = Path(__file__).parents[2] / "pictool" / "models" / "small" / "tokenizer.json"
_COMMIT = "0" * 40


def make_hub(home: Path, names: Sequence[str]) -> None:
    """A hub cache as `HF_HOME` names it, with models `local/NAME`."""
    for name in names:
        model = home / "hub" / f"models--local--{name}"
        snapshot = model / "snapshots" / _COMMIT
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(_COMMIT)
        shutil.copy(TOKENIZER, snapshot / "tokenizer.json")


@cache
def _tokenizer() -> Any:
    return Tokenizer.from_file(str(TOKENIZER))


def encode(text: str) -> list[int]:
    """As `encode_fast(text, false)` of spnl."""
    ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
    return ids


class Oracle:
    """spnl's tokenizer. It keeps one state per block size and markers: a state remembers its first ones."""

    def __init__(self) -> None:
        self._states: dict[Markers, Any] = {}

    def tokenize(self, query: Query | str, markers: Markers) -> Any:
        """What it makes of a query: an object with `messages`, or of a map, with `inputs`."""
        if markers not in self._states:
            self._states[markers] = spnl.init(64)
        text = query if isinstance(query, str) else to_json(query)
        tokenized = spnl.tokenize_query(
            self._states[markers], text, markers.pad, markers.cross, markers.plus, markers.block
        )
        return tokenized._0


async def execute(query: Query) -> str:
    """The text of a query that calls no model, as spnl executes it."""
    response = await spnl.execute(json.dumps(json.loads(to_json(query))))
    text: str = response.data
    return text

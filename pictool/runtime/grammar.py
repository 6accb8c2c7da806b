"""Answers that are JSON values of a schema: which tokens may come next, by llguidance (the extra `structured`)."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.model import Model

MAX_SCHEMA = 1 << 18  # characters
# White space is at most a blank after `,` and `:`: a small model prints it for ever. A schema cannot say otherwise.
_OPTIONS: Any = {
    "whitespace_flexible": False, "whitespace_pattern": None, "item_separator": ", ?", "key_separator": ": ?",
    "lenient": False, "coerce_one_of": False,
}  # fmt: skip
# Beside these, properties that an object's schema does not name may be those of another schema.
_OPEN = {*"additionalProperties patternProperties unevaluatedProperties minProperties anyOf oneOf $ref".split()}


class Grammar:
    """The tokens that an answer may go on with, so that it is a JSON value of a schema.

    Args:
        schema: of JSON, as JSON.

    Raises:
        InputError: see `require_schema`; or the tokenizer is not one of `tokenizers`.
    """

    def __init__(self, model: Model, schema: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(_tokenizer(model.tokenizer, model.config.vocab_size, model.eos_ids), _grammar(schema))
        self._require()

    def masked(self, logits: Tensor) -> Tensor:
        """The logits [vocabulary] with minus infinity where a token may not come next."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        self._require()
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        known = min(len(bits), len(logits))
        allowed[:known] = torch.from_numpy(bits[:known].astype(bool))
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))

    def push(self, token: int) -> None:
        """Go on with a token, one that may come next."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._require()

    def _require(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())


def require_schema(schema: str) -> None:
    """Refuse a schema that cannot be followed, or is not followed here.

    Raises:
        InputError: it is invalid, too large, or has what llguidance does not know; or that is not installed.
    """
    if len(schema) > MAX_SCHEMA:
        raise InputError(f"the schema has {len(schema)} characters; {MAX_SCHEMA} at most")
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise InputError("no llguidance is installed here; pip install 'pictool[structured]'") from error
    if problem := LLMatcher.validate_grammar(_grammar(schema)):
        raise _refused(problem)


def _grammar(schema: str) -> str:
    from llguidance import LLMatcher

    try:
        read = json.loads(schema)
        closed = read if '"allOf"' in schema else _closed(read)
        return str(LLMatcher.grammar_from_json_schema(json.dumps(closed), overrides=_OPTIONS))
    except (ValueError, RecursionError) as error:
        raise _refused(str(error)) from error


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name: a model may add some for ever. vLLM's default does so."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    named, required = schema.get("properties"), schema.get("required", [])
    inner = ("items", "prefixItems", "additionalProperties", *(() if named else ("anyOf", "oneOf")))
    closed = schema | {key: _closed(schema[key]) for key in inner if key in schema}
    for key in ("properties", "$defs", "definitions"):
        if isinstance(parts := schema.get(key), dict):
            closed[key] = {name: _closed(part) for name, part in parts.items()}
    if isinstance(named, dict) and isinstance(required, list) and not _OPEN & schema.keys():
        closed |= {} if {*map(str, required)} - named.keys() else {"additionalProperties": False}
    return closed


def _refused(problem: str) -> InputError:
    return InputError(f"the schema is not followed: {' '.join(problem.split())[:300]}")


@lru_cache(4)
def _tokenizer(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """The tokenizer as llguidance has it, which takes a second for a large one."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except ValueError as error:
        raise InputError(f"the schema is not followed: {error}") from error

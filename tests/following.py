"""What `pic serve` does with a schema of a client, in this process: `follow`, a command beside those of `pic`.

    follow SCHEMA [--seed N] [--tokens N]

Its output is an answer whose tokens are drawn at random from those that the schema allows; it ends with 3 if the answer
ended and is not of the schema. A refused schema is an error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import regex  # type: ignore[import-untyped]
import torch

from pictool.commands.console.errors import reports_errors
from pictool.core import AnswerFormat
from pictool.runtime.chat.grammar import Grammar
from pictool.runtime.chat.schemas import require_schema
from pictool.runtime.model import load_model

INVALID = 3  # exit code
_MAX_STEPS = 20_000  # keywords
_CLOSING = ('"', "}", "]", '"}', "0", "1", '",', "],", "},")  # tokens that an answer ends by


@reports_errors
def follow() -> None:
    """Answer by the schema of `sys.argv`, and print the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("schema", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=120)
    options = parser.parse_args()
    schema = options.schema.read_text()
    require_schema(schema)
    text, is_complete = answer(schema, random.Random(options.seed), options.tokens)
    print(repr(text))
    if is_complete and not is_valid(text, schema):
        sys.exit(INVALID)


def answer(schema: str, draw: random.Random, num_tokens: int) -> tuple[str, bool]:
    """An answer of a schema, of so many tokens at most, and whether it ended. It leans towards its end."""
    model = load_model("embedded")
    grammar, tokens = Grammar(model, AnswerFormat(schema=schema)), list[int]()
    closing = {token for text in _CLOSING for token in model.tokenizer.encode(text, add_special_tokens=False)}
    while len(tokens) < num_tokens:
        allowed = grammar.masked(torch.zeros(model.config.vocab_size)).isfinite().nonzero().flatten().tolist()
        ends = [token for token in allowed if token in model.eos_ids]
        if ends and draw.random() < 0.7:
            return model.tokenizer.decode(tokens), True
        near = [token for token in allowed if token in closing]
        tokens.append(draw.choice(near if near and draw.random() < 0.5 else [*{*allowed} - {*ends}] or ends))
        grammar.push(tokens[-1])
        if tokens[-1] in model.eos_ids:
            return model.tokenizer.decode(tokens[:-1]), True
    return model.tokenizer.decode(tokens), False


def is_valid(text: str, schema: str) -> bool:
    """Whether a text is JSON of a schema; fractions are compared exactly, as floats are not (0.14 is 14 times 0.01).

    Nothing is known where the validator knows nothing of the schema, or is not done in some steps (`allOf` of `$ref`).
    """
    value: Any = json.loads(text, parse_float=Decimal)
    read = json.loads(schema, parse_float=Decimal)
    kind, steps = jsonschema.validators.validator_for(read), itertools.count()

    def counted(check: Any) -> Any:
        def step(*arguments: Any) -> Any:
            if next(steps) > _MAX_STEPS:
                raise RecursionError
            return check(*arguments)

        return step

    keywords = {name: counted(check) for name, check in (kind.VALIDATORS | {"pattern": _pattern}).items()}
    with suppress(RecursionError, AttributeError, jsonschema.SchemaError):
        kind.check_schema(read)
        return bool(jsonschema.validators.extend(kind, keywords)(read).is_valid(value))
    return True


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """As the validator's own, with Unicode's classes, and given up after a while."""
    with suppress(TimeoutError, regex.error):
        if isinstance(value, str) and regex.search(pattern, value, timeout=0.5) is None:
            yield jsonschema.ValidationError(pattern)

"""The accept sets of schemas, ours and vLLM's: xgrammar as vLLM calls it, and what vLLM leaves to llguidance."""

from __future__ import annotations

import json

import pytest
import xgrammar
from accept_sets import CASES, REFUSED, Case, Schema
from llguidance import LLMatcher, LLTokenizer
from vllm.v1.structured_output.backend_guidance import (
    has_guidance_unsupported_json_features,
    serialize_guidance_grammar,
)
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from xgrammar.testing import _is_grammar_accept_string

from pictool.errors import InputError
from pictool.runtime.chat.schemas import grammar_of

BYTES = LLTokenizer("byte")


def followed_by_llguidance(grammar: str, text: str) -> bool:
    matcher, tokens = LLMatcher(BYTES, grammar), list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def accepted_by_vllm(schema: Schema, text: str) -> bool:
    """By its backend `auto`."""
    if has_xgrammar_unsupported_json_features(schema) and not has_guidance_unsupported_json_features(schema):
        grammar = serialize_guidance_grammar(StructuredOutputOptions.JSON, json.dumps(schema))
        return LLMatcher.validate_grammar(grammar) == "" and followed_by_llguidance(grammar, text)
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=True)
    return bool(_is_grammar_accept_string(grammar, text))


def accepted_by_ours(schema: Schema, text: str) -> bool:
    return followed_by_llguidance(grammar_of(json.dumps(schema)), text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case.schema)[:60])
def test_the_accept_sets_are_those_of_the_table(case: Case) -> None:
    columns = {(True, True): case.both, (False, False): case.none, (True, False): case.ours, (False, True): case.theirs}
    for expected, texts in columns.items():
        for text in texts:
            assert (accepted_by_ours(case.schema, text), accepted_by_vllm(case.schema, text)) == expected, text


@pytest.mark.parametrize(("schema", "text"), REFUSED, ids=lambda part: json.dumps(part)[:60])
def test_what_ours_refuses_vllm_follows_in_part_or_not_at_all(schema: Schema, text: str | None) -> None:
    with pytest.raises(InputError):
        grammar = grammar_of(json.dumps(schema))
        if problem := LLMatcher.validate_grammar(grammar):
            raise InputError(problem)
    if text is None:
        assert not accepted_by_vllm(schema, "[]") and not accepted_by_vllm(schema, '""')
    else:
        assert accepted_by_vllm(schema, text)

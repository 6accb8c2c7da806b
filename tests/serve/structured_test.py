"""Answers that are JSON of a schema, and calls that are forced: validated by `jsonschema`, through each dialect."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import hypothesis.strategies as st
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
import torch
from accept_sets import CASES, REFUSED, Case, Schema
from hypothesis import HealthCheck, given, settings

import pictool.runtime.chat.grammar as grammar_module
import pictool.serve.service as service_module
from pictool.core import AnswerFormat
from pictool.errors import InputError
from pictool.runtime.chat.grammar import Grammar
from pictool.runtime.chat.schemas import (
    MAX_DEPTH,
    MAX_PATTERN_CHARS,
    MAX_PATTERNS,
    MAX_PROPERTIES,
    grammar_of,
    require_schema,
)
from pictool.runtime.model import Model
from pictool.serve.errors import ApiError
from pictool.serve.parts import splitter_of
from pictool.serve.service import Service
from pictool.serve.tenants import Keys, Tenant
from pictool.serve.work import AnswerRequest, DeltaEvent, FinishEvent, RawPrompt
from pictool.store.store import Store
from serve.live import NAME, RESPONSES, TEMPLATE, Live, serving, tiny_model

CITY: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["name", "size", "kind"],
    "properties": {"name": {"type": "string", "maxLength": 8},
                   "size": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["harbour", "town"]}},
}  # fmt: skip
MESSAGES: list[Any] = [{"role": "user", "content": "Really?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": CITY | {"required": ["kind"]}}}
    for name in ("look", "go")
]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tiny_model(TEMPLATE, responses=RESPONSES), Store(tmp_path_factory.mktemp("said") / "store")) as live:
        yield live


@pytest.fixture
def client(speaking: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def schema_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1, "seed": 5, "n": 4, "logprobs": True}])
def test_a_chats_answers_are_of_the_schema(client: openai.OpenAI, more: dict[str, Any]) -> None:
    ask: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 200, "response_format": schema_format(CITY)} | more
    choices = client.chat.completions.create(**ask).choices
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), CITY)
    chunks = client.chat.completions.create(stream=True, **ask)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == 0)
    assert streamed == choices[0].message.content


def test_any_object(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=400, response_format={"type": "json_object"}, seed=1
    )
    choice = done.choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


def test_the_other_dialects(client: openai.OpenAI, speaking: Live) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    got = client.responses.create(model=NAME, input="Really?", temperature=0, text=text)
    jsonschema.validate(json.loads(got.output_text), CITY)
    with anthropic.Anthropic(base_url=speaking.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model=NAME, max_tokens=200, messages=MESSAGES, extra_body={"temperature": 0},
            output_config={"format": {"type": "json_schema", "schema": CITY}},
        )  # fmt: skip
        assert message.content[0].text == got.output_text  # type: ignore[union-attr]
        tools: Any = [{"name": "look", "input_schema": CITY}]
        choices: Any = ({"type": "any"}, {"type": "tool", "name": "look"})
        for choice in choices:
            forced = other.messages.create(
                model=NAME, max_tokens=200, messages=MESSAGES, tools=tools, tool_choice=choice
            )  # fmt: skip
            (use,) = forced.content
            assert use.type == "tool_use" and use.name == "look" and forced.stop_reason == "tool_use"
            jsonschema.validate(use.input, CITY)
    function: Any = {"type": "function", "name": "look", "parameters": CITY}
    called = client.responses.create(model=NAME, input="Really?", tools=[function], tool_choice="required")
    (call,) = called.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), CITY)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
def test_a_forced_call_is_one(client: openai.OpenAI, choice: Any) -> None:
    ask: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 3}
    done = client.chat.completions.create(max_tokens=200, **ask).choices[0]
    assert done.message.tool_calls is not None
    (call,) = done.message.tool_calls
    assert call.type == "function" and call.function.name in ("go", "look")[: 1 if isinstance(choice, dict) else 2]
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
    cut = client.chat.completions.create(max_tokens=4, **ask).choices[0]
    assert cut.finish_reason == "length" and not cut.message.tool_calls and cut.message.content


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {}}, 'keys: ["not"]'), ({"type": "foo"}, "foo"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"$ref": "http://x/y"}, "http://x/y"), ({"uniqueItems": True}, "uniqueItems"),
        ({"x-guidance": {"lenient": True}, "not": {}}, 'keys: ["not"]'), ({"enum": ["x" * 300_000]}, "characters"),
        ({"$ref": "#"}, "no value"), ({"type": "string", "pattern": "("}, "unclosed"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused_with_its_reason(
    client: openai.OpenAI, schema: dict[str, Any], word: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=schema_format(schema))
    assert word in caught.value.message and "response_format" in caught.value.message
    assert "<state>" not in caught.value.message and "\n" not in caught.value.message
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, tools=TOOLS, response_format={"type": "json_object"}
        )


# Schemas that hypothesis makes

TEXTS = st.sampled_from(["a", "b", "naïve", "x y"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}), st.just({"type": "null"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
    st.builds(lambda n: {"type": "integer", "minimum": 0, "maximum": n}, st.integers(0, 99)),
    st.builds(lambda texts: {"enum": texts}, st.lists(TEXTS, min_size=1, max_size=3, unique=True)),
)  # fmt: skip


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def an_object(fields: dict[str, Any], count: int) -> dict[str, Any]:
        required = sorted(fields)[:count]
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}

    return st.one_of(
        st.builds(an_object, st.dictionaries(TEXTS, inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
    )


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=6)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 20))
def test_every_answer_that_ends_is_of_its_schema_and_all_end(schema: dict[str, Any], seed: int, model: Model) -> None:
    """Tokens are chosen at random: no white space can go on for ever."""
    generator = torch.Generator().manual_seed(seed)
    grammar, tokens = Grammar(model, AnswerFormat(schema=json.dumps(schema))), list[int]()
    while not tokens or tokens[-1] not in model.eos_ids:
        assert len(tokens) < 600, model.tokenizer.decode(tokens)
        weights = grammar.masked(torch.zeros(model.config.vocab_size)).softmax(-1)
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
        grammar.push(tokens[-1])
    jsonschema.validate(json.loads(model.tokenizer.decode(tokens[:-1])), schema)


# The accept sets of vLLM's default, which `tests/in_vllm/structured_test.py` compares


def accepts(model: Model, schema: Schema, text: str) -> bool:
    """Whether an answer may be this text, token by token, and then end."""
    grammar = Grammar(model, AnswerFormat(schema=json.dumps(schema)))
    tokens = [*model.tokenizer.encode(text, add_special_tokens=False), min(model.eos_ids)]
    assert model.tokenizer.decode(tokens[:-1]) == text
    for token in tokens:
        if grammar.masked(torch.zeros(model.config.vocab_size))[token].isinf():
            return False
        grammar.push(token)
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case.schema)[:60])
def test_the_accept_set_is_that_of_the_table(case: Case, model: Model) -> None:
    accepted = [*case.both, *case.ours]
    assert [text for text in accepted if not accepts(model, case.schema, text)] == []
    assert [text for text in (*case.none, *case.theirs) if accepts(model, case.schema, text)] == []
    for text in accepted:
        jsonschema.validate(json.loads(text), case.schema)


@pytest.mark.parametrize("schema", [schema for schema, _ in REFUSED], ids=json.dumps)
def test_a_schema_that_is_not_followed_whole_is_refused(schema: Schema) -> None:
    with pytest.raises(InputError, match="schema"):
        require_schema(json.dumps(schema))


def test_what_else_a_schema_allows_stays_allowed(model: Model) -> None:
    """Where its parts belong together, an object is not closed: it would be none at all."""
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
    for schema in ({"allOf": [base, more]}, base | {"anyOf": [more]}):
        assert accepts(model, schema, '{"a": 1, "b": 2}')
    named = {"type": "object", "properties": {"properties": base, "items": {"enum": [{"properties": {}}]}}}
    assert accepts(model, named, '{"properties": {"a": 1}, "items": {"properties":{}}}')


def test_a_schema_cannot_ask_for_white_space(model: Model) -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": "\\s*", "item_separator": " *,"}}
    assert accepts(model, schema, "[1, 2]") and not accepts(model, schema, "[1 , 2]")
    assert not accepts(model, schema, "[\n1]")


def test_a_schema_that_is_none() -> None:
    for wrong in ("false", "[]", "5", "{"):
        with pytest.raises(InputError, match="schema"):
            require_schema(wrong)


# Bounds


def chain(link: Callable[[Schema], Schema], size: int) -> Schema:
    """Definitions that each refer to the next."""
    defs = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(size)}
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{size}": {"type": "integer"}}}


LINKS: list[Callable[[Schema], Schema]] = [
    lambda ref: {"type": "array", "items": ref, "minItems": 1}, lambda ref: {"allOf": [ref]}, lambda ref: ref,
    lambda ref: {"anyOf": [ref, {"type": "null"}]}, lambda ref: {"type": "object", "properties": {"a": ref}},
]  # fmt: skip


@pytest.mark.parametrize("link", LINKS)
def test_a_chain_of_references_is_followed_up_to_a_bound(link: Callable[[Schema], Schema]) -> None:
    require_schema(json.dumps(chain(link, 100)))
    for size in (MAX_DEPTH + 1, 3000):
        with pytest.raises(InputError, match=r"\$ref.* 256 "):
            require_schema(json.dumps(chain(link, size)))


def test_a_chain_that_the_bounds_do_not_see_ends_only_the_process_that_tries_it() -> None:
    """References by an `$id` are llguidance's to resolve."""
    defs = {f"a{i}": {"type": "array", "items": {"$ref": f"http://x/y#/$defs/a{i + 1}"}} for i in range(3000)}
    with pytest.raises(InputError, match="schema"):
        require_schema(json.dumps({"$id": "http://x/y", "$ref": "#/$defs/a0", "$defs": defs | {"a3000": {}}}))
    require_schema(json.dumps({"type": "array"}))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "object", "properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}, "properties"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(MAX_PROPERTIES)}}, "properties"),  # in one place
        ({"anyOf": [{"type": "string", "pattern": "a"}] * (MAX_PATTERNS + 1)}, "patterns"),
        ({"type": "string", "pattern": "a" * MAX_PATTERN_CHARS + "b"}, "patterns"),
        (
            {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{20}}"} for i in range(20)]},
            "unsupported schema",
        ),
    ],
)
def test_a_schema_that_costs_too_much_is_refused(schema: Schema, word: str) -> None:
    with pytest.raises(InputError, match=word):
        require_schema(json.dumps(schema))


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**63, 2**64 + 1, 10**300, 1e300])
def test_numbers_that_would_not_be_followed_exactly_are_refused(number: float) -> None:
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"):
        with pytest.raises(InputError, match=key):
            require_schema(json.dumps({"type": "object", "properties": {"a": {key: number}}}))
    with pytest.raises(InputError, match="enum"):
        require_schema(json.dumps({"items": {"enum": ["a", {"b": [number]}]}}))
    require_schema(json.dumps({"type": "object", "properties": {"minimum": {"type": "string", "default": number}}}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1.0},
        {"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1.5},
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"maximum": 0.5}}},
    ],
)
def test_an_exclusive_bound_that_would_be_allowed_is_refused(schema: Schema) -> None:
    with pytest.raises(InputError, match="exclusive"):
        require_schema(json.dumps(schema))


def test_exclusive_bounds_are_followed(model: Model) -> None:
    for low, high in ((0, 1), (0.1, 0.5), (0, 10)):
        schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        require_schema(json.dumps({"properties": {"a": schema, "b": {"type": "number", "maximum": 0.5}}}))
        assert accepts(model, schema, "0.25") and not any(accepts(model, schema, str(bound)) for bound in (low, high))


def test_numbers_up_to_the_bound_are_followed_exactly(model: Model) -> None:
    most = 2**53 - 1
    bounds = {"type": "integer", "minimum": most - 1, "maximum": most}
    for schema in (bounds, {"enum": [most, most - 1]}):
        assert accepts(model, schema, str(most)) and not accepts(model, schema, str(most - 2))
    assert not accepts(model, bounds, str(most + 1))


def test_schemas_of_usual_clients_are_followed(model: Model) -> None:
    node: Schema = {"type": "object", "properties": {"name": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
                    "inner": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
                    "required": ["name", "inner"], "additionalProperties": False}  # fmt: skip
    schema = {"$ref": "#/$defs/Node", "$defs": {"Node": node}}
    require_schema(json.dumps(schema))
    assert accepts(model, schema, '{"name":"2026-11-28","inner":{"name":"2026-11-29","inner":null}}')
    require_schema(json.dumps({"enum": [f"value {i}" for i in range(800)]}))


def test_a_schema_is_compiled_on_no_thread_that_computes_answers(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[str]()

    def noted(schema: str) -> str:
        threads.add(threading.current_thread().name)
        return grammar_of(schema)

    monkeypatch.setattr(grammar_module, "grammar_of", noted)
    schema = CITY | {"title": "never compiled before"}
    done = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=200, response_format=schema_format(schema), n=2, seed=1
    )
    assert len(done.choices) == 2 and threads and "pic-engine" not in threads


def test_a_tenant_waits_for_two_schemas_of_another(monkeypatch: pytest.MonkeyPatch, speaking: Live) -> None:
    """However many slow ones those are; and for none where its own is known."""
    tried, goes_on = list[str](), threading.Semaphore(0)

    def slow(schema: str) -> None:
        goes_on.acquire()
        tried.append(schema)

    monkeypatch.setattr(service_module, "is_tried", lambda schema: schema == "known")
    monkeypatch.setattr(service_module, "require_schema", lambda schema: None if schema == "known" else slow(schema))
    service = Service(speaking.backend, speaking.store.root, Keys())

    async def hold() -> None:
        one, other = Tenant("one"), Tenant("other")
        waiting = [asyncio.ensure_future(service.require_followed(one, [("tools", f"one {i}")])) for i in range(5)]
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(service.require_followed(other, [("tools", "other")])))
        await service.require_followed(other, [("tools", "known")])
        assert tried == []
        goes_on.release(6)
        await asyncio.gather(*waiting)

    asyncio.run(hold())
    assert len(tried) == 6 and "other" in tried[:3]


def test_a_forced_call_that_is_nested_too_deep_is_an_error_of_one_line() -> None:
    """A recursive schema allows it; a client could not send it back."""

    work = AnswerRequest(Tenant("default"), RawPrompt(()), answer_format=AnswerFormat(schema="{}", is_call=True))
    split = splitter_of(work, None)
    assert split is not None
    assert split(DeltaEvent(0, '{"name": "f", "arguments": {"a": ' + "[" * 990 + "]" * 990 + "}}")) == []
    with pytest.raises(ApiError, match="tool_choice") as caught:
        split(FinishEvent(0, "stop", 9))
    assert caught.value.status == 400

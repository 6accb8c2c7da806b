"""The language: what is read, what is written, and what a wrong file gets."""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc
from typing import Any

import pytest
import yaml

from pictool.errors import InputError
from pictool.spans import dsl, reader, reading
from pictool.spans import query as nodes
from pictool.spans.dsl import (
    ask,
    assistant,
    augment,
    cross,
    file,
    g,
    map_,
    monad,
    par,
    plus,
    print_,
    repeat,
    seq,
    system,
    user,
    zip_,
)
from pictool.spans.operators.calls import Call, Generate, Map
from pictool.spans.operators.flow import Ask, Print, Zip
from pictool.spans.operators.retrieve import Augment
from pictool.spans.optimise import shape, tree_text
from pictool.spans.query import MAX_DEPTH, Query, path_text, to_json
from pictool.spans.reading import read_query

ALL = g(
    system("judge"),
    par(monad(plus(user("a"), file("b.txt"))), seq(assistant("c"), Print("d"), Ask("e"))),
    Zip(user("f"), Map(Call("m", 5, 0.5), ("g", "h"))),
    plus(repeat(3, g(cross("i", "j"), model="spnl/x", max_tokens=None, temperature=None))),
    Augment(user("k"), "embedder", "l.txt", "l"),
    dsl.retrieve("m", "docs", "n.txt", k=2, chunk_tokens=100),
    dsl.chat("o", model="p", top_p=0.5, stop=("\n", "ö")),
    model="spnl/y", max_tokens=7, temperature=0,
)  # fmt: skip


def read(data: Any) -> Query:
    return read_query(json.dumps(data), "q.json")


def problem(data: Any) -> str:
    with pytest.raises(InputError) as error:
        read_query(data if isinstance(data, str) else json.dumps(data), "q.json")
    (line,) = str(error.value).splitlines()
    assert line.startswith("q.json: ")
    return line.removeprefix("q.json: ")


def test_every_node_is_read_as_it_was_written_as_json_and_as_yaml() -> None:
    assert read_query(to_json(ALL)) == ALL
    assert read_query(yaml.safe_dump(ALL.to_data()), is_yaml=True) == ALL
    assert shape(ALL) == (
        "G(⋈(S, par(M(+(U, F)), seq(A, print, ask)), zip(U, map), +(repeat(G(⋈(U, U)))), R(U), R(U), C(U)))"
    )


def test_what_spnl_writes_is_read_and_written_unchanged() -> None:
    inner = {"model": "m", "max_tokens": 1, "temperature": 0.0, "input": {"user": "u"}}
    plus = {"plus": [{"repeat": {"n": 2, "g": inner}}]}
    call = {"model": "spnl/m", "max_tokens": 0, "temperature": 0.6, "input": {"cross": [{"system": "s"}, plus]}}
    written = {"g": call}
    assert read(written).to_data() == written


def test_absent_and_null_fields_mean_what_they_mean_to_spnl() -> None:
    call = {"model": "m", "input": {"user": "u"}}
    assert read({"g": call}) == Generate(user("u"), Call("m", 0, 0.6))
    assert read({"g": call | {"max_tokens": None, "temperature": None}}) == Generate(user("u"), Call("m", None, None))


@pytest.mark.parametrize(
    ("lenient", "strict"),
    [
        ({"g": {"model": "m", "input": [{"user": "u"}]}}, {"g": {"model": "m", "input": {"user": "u"}}}),
        (
            {"g": {"model": "m", "input": [{"user": "u"}, {"ask": "w"}]}},
            {"g": {"model": "m", "input": {"cross": [{"user": "u"}, {"ask": "w"}]}}},
        ),
        (
            {"repeat": {"n": 4, "query": {"g": {"model": "m", "input": {"user": "u"}}}}},
            {"repeat": {"n": 4, "g": {"model": "m", "input": {"user": "u"}}}},
        ),
        ({"zip": [{"user": "a"}, {"user": "b"}]}, {"zip": {"first": {"user": "a"}, "second": {"user": "b"}}}),
        ({"retrieve": {"from": "d", "query": {"user": "u"}}}, {"retrieve": {"from": ["d"], "query": {"user": "u"}}}),
        (
            {"g": {"model": "m", "input": {"user": "u"}, "temperature": 2.0}},
            {"g": {"model": "m", "input": {"user": "u"}, "temperature": 2}},
        ),
    ],
)
def test_lenient_forms(lenient: Any, strict: Any) -> None:
    """They give equal trees, which are shown and written alike."""
    one, other = read(lenient), read(strict)
    assert one == other and to_json(one) == to_json(other)
    assert tree_text(one) == tree_text(other)


G: dict[str, Any] = {"model": "m", "input": {"user": "u"}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"pluss": []}, "the query: unknown operator 'pluss'; "),
        ({"seq": [{"user": "a"}, {"plus": [{"user": 1}]}]}, "seq[1].plus[0].user: must be a string"),
        ({"user": "a", "system": "b"}, "the query: must be a mapping with one key, an operator, not a mapping with 2"),
        ({}, "the query: must be a mapping with one key"),
        ([{"user": "a"}], "the query: must be a mapping with one key, an operator, not a list of 1"),
        ({"plus": {"user": "a"}}, "plus: must be a list of queries"),
        ({"seq": ["a"]}, "seq[0]: must be a mapping with one key, an operator, not 'a'"),
        ({"g": {"model": "m"}}, "g: is missing input"),
        ({"g": [1]}, "g: must be a mapping with model, input, not a list of 1"),
        ({"g": G | {"max_token": 1}}, "g: unknown key 'max_token'; "),
        ({"g": G | {"max_tokens": -1}}, "g.max_tokens: must be a whole number from 0"),
        ({"g": G | {"max_tokens": True}}, "g.max_tokens: must be a whole number from 0"),
        ({"g": G | {"max_tokens": "{n}"}}, "g.max_tokens: must be a whole number from 0"),
        ({"g": G | {"temperature": -1}}, "g.temperature: must be a number from 0 to 1000, not -1"),
        ('{"g": {"model": "m", "temperature": NaN}}', "is not JSON (NaN"),
        ({"g": G | {"input": [{"user": "a"}, {"x": 1}]}}, "g.input[1]: unknown operator 'x'"),
        ({"repeat": {"n": 256, "g": G}}, "repeat.n: must be a whole number from 0 to 255, not 256"),
        ({"repeat": {"n": 2, "query": {"user": "u"}}}, "repeat.query: must be a g"),
        ({"repeat": {"n": 2, "g": {"model": "m", "input": {"y": 1}}}}, "repeat.g.input: unknown operator 'y'"),
        ({"map": {"metadata": {"model": "m"}, "inputs": "a"}}, "map.inputs: must be a list"),
        ({"map": {"metadata": {"model": "m"}, "inputs": [None]}}, "map.inputs[0]: must be a string"),
        ({"zip": [{"user": "a"}]}, "zip: must be a mapping with first, second"),
        (
            {"augment": {"embedding_model": "e", "body": {"user": "u"}, "doc": ["n", {"Binary": [1]}]}},
            "augment.doc[1]: must be {\"Text\": \"…\"}",
        ),
        ({"retrieve": {"from": [], "query": {"user": "u"}}}, "retrieve.from: is empty"),
        ({"retrieve": {"from": "d", "query": {"user": "u"}, "k": 0}}, "retrieve.k: must be a whole number from 1"),
        ('{"user": "\\ud800"}', "user: is not valid Unicode at character 0"),
        ('{"user": "a"', "is not JSON (line 1, column 13"),
        ('{"user": 1' + "0" * 5000 + "}", "is not JSON (Exceeds the limit"),
    ],
)  # fmt: skip
def test_a_wrong_file_gets_one_line_with_the_path(data: Any, message: str) -> None:
    assert problem(data).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 0}, "g.top_p: must be a number"),
        ({"top_p": 1.5}, "g.top_p: must be a number"),
        ({"top_p": True}, "g.top_p: must be a number"),
        ({"stop": 5}, "g.stop[0]: must be a string"),
        ({"stop": ["a", ""]}, "g.stop: contains an empty text"),
        ({"stop": ["a"] * 17}, "g.stop: has 17 texts"),
        ({"stop": ["é" * 2049]}, "g.stop: has more than 4096 bytes of text; shorten it"),
    ],
)
def test_sampling_of_a_call_is_bounded(fields: dict[str, Any], message: str) -> None:
    assert problem({"g": {"model": "m", "input": {"user": "u"}, **fields}}).startswith(message)
    kind = {"map": {"metadata": {"model": "m", **fields}, "inputs": []}}
    assert problem(kind).startswith(message.replace("g.", "map.metadata.", 1))


def test_what_only_we_know_of_a_call_is_written_where_it_says_it() -> None:
    assert set(g("u").to_data()["g"]) == {"model", "max_tokens", "temperature", "input"}
    own = read({"g": {"model": "m", "input": {"user": "u"}, "stop": "\n", "top_p": 1}})
    assert own == g("u", model="m", stop=("\n",), top_p=1.0)
    assert tree_text(own).startswith("G model=m max_tokens=0 temperature=0.6 top_p=1 stop=['\\n']")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq: [", "is not YAML (line 1, column 7"),
        ("seq:\n- user: yes\n", "seq[0].user: must be a string"),
        (
            "g: {model: m, temperature: .nan, input: {user: u}}",
            "g.temperature: must be a number from 0 to 1000, not na",
        ),
        ("user: a\nuser: b", "is not YAML (line 2, column 1: the key user "),
        ("seq: &a [*a]", "is not YAML (line 1, column 10: the alias *a"),
        ("user: 2024-13-45", "is not YAML (month must be in 1..12"),
        ("user: !!python/object:os.system {}", "is not YAML (line 1, column 7: could not determine a constructor"),
    ],
)
def test_a_wrong_yaml_file_gets_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_query(text, "q.yaml")
    assert str(error.value).startswith(f"q.yaml: {message}")


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10_000])
@pytest.mark.parametrize("is_yaml", [False, True])
def test_deep_nesting_is_one_line_with_the_path(depth: int, is_yaml: bool) -> None:
    text = '{"seq":[' * depth + '{"user":"a"}' + "]}" * depth
    with pytest.raises(InputError) as error:
        read_query(text, "deep", is_yaml)
    (line,) = str(error.value).splitlines()
    assert line.startswith("deep: seq[0].seq[0].seq[0].seq[0] … .seq[0]")
    assert line.endswith(f"is nested deeper than {MAX_DEPTH} levels; flatten it")


def test_a_tree_of_the_greatest_depth_is_read_and_a_deeper_one_cannot_be_made() -> None:
    text = '{"seq":[' * (MAX_DEPTH - 1) + '{"user":"a"}' + "]}" * (MAX_DEPTH - 1)
    query = read_query(text)
    assert query.depth == MAX_DEPTH and read_query(to_json(query)) == query and hash(query) == hash(query)
    with pytest.raises(InputError, match=f" {MAX_DEPTH} "):
        seq(query)


def test_hashes_are_those_of_equal_trees_and_of_no_other_process() -> None:
    found = [node for _, node in nodes.nodes(ALL)]
    again = [node for _, node in nodes.nodes(read_query(to_json(ALL)))]
    assert [hash(node) for node in found] == [hash(node) for node in again] and len(set(found)) == len(set(again)) > 9
    assert hash(user("a")) != hash(assistant("a")) and hash(seq("a")) != hash(par("a"))
    assert "_hash" in vars(ALL) and "_hash" not in vars(pickle.loads(pickle.dumps(ALL)))


def test_a_map_of_too_many_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_NODES", 10)
    with pytest.raises(InputError, match=r"^q\.json: map: .* 10 "):
        read({"map": {"metadata": {"model": "m"}, "inputs": ["a"] * 10}})


def test_aliases_cannot_multiply_a_small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_NODES", 1000)
    items = ["&s0 {user: x}", *(f"&s{i} {{seq: [{', '.join([f'*s{i - 1}'] * 10)}]}}" for i in range(1, 30))]
    bomb = "seq:\n" + "".join(f"- {item}\n" for item in items)
    with pytest.raises(InputError, match=r"^query: .*YAML \(line 6, column 14: "):
        read_query(bomb)


def test_merge_keys_and_aliases_are_read_and_count_as_what_they_stand_for() -> None:
    """The question is written once, and so are the fields of every call."""
    call = '&call {model: m, temperature: 0, input: &question {user: "Who?"}}'
    assert read_query(f"par:\n- g: {call}\n- g: {{<<: *call, temperature: 1}}\n- *question", is_yaml=True) == par(
        g("Who?", model="m", temperature=0), g("Who?", model="m", temperature=1), "Who?"
    )
    levels = [f"l{i}: &l{i} {{<<: [{', '.join([f'*l{i - 1}'] * 9)}]}}\n" for i in range(1, 9)]
    bomb = f"l0: &l0 {{{', '.join(f'k{i}: v' for i in range(9))}}}\n{''.join(levels)}"
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"^query: .*YAML \(line \d+, column \d+: "):
            read_query(bomb)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_a_key_that_comes_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"^query: .*JSON .*'temperature'"):
        read_query('{"g": {"model": "m", "temperature": 1, "temperature": 0, "input": {"user": "a"}}}')


TOKENS = [
    "{", "}", "[", "]", '"', ":", ",", "null", "1e999", "-1", "true", '"g"', '"plus"', '"user"', '"zip"', "\\ud800",
    "\0", "&a", "*a", "<<", "!!python", "!!binary x", "!!timestamp 1", "!!set", "? ", "- ", "0x1", ".inf", "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("is_yaml", [False, True])
def test_mutated_files_are_queries_or_one_line(is_yaml: bool) -> None:
    rng = random.Random(22)
    whole = yaml.safe_dump(ALL.to_data()) if is_yaml else to_json(ALL)
    read_back = 0
    for _ in range(400):
        text = whole
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(text))
            text = text[:start] + rng.choice([*TOKENS, ""]) + text[start + rng.randint(0, 12) :]
        try:
            query = read_query(text, "f", is_yaml)
        except InputError as error:
            assert "\n" not in str(error) and str(error).startswith("f: ")
        else:
            read_back += read_query(to_json(query)) == query
    assert read_back > 2


def test_the_python_form_is_the_json_form() -> None:
    query = g(plus(file("a.txt"), file("b.txt")), user("Who?"), model="m")
    assert read(
        {"g": {"model": "m", "input": {"cross": [{"plus": [{"file": "a.txt"}, {"file": "b.txt"}]}, {"user": "Who?"}]}}}
    ) == query  # fmt: skip
    call = {"model": "m", "max_tokens": 0, "temperature": 0.6}
    assert read({"map": {"metadata": call, "inputs": ["a", "b"]}}) == map_("a", "b", model="m")
    assert read({"zip": [{"user": "a"}, {"user": "b"}]}) == zip_("a", "b")
    doc = {"embedding_model": "e", "body": {"user": "q"}, "doc": ["n", {"Text": "t"}]}
    assert read({"augment": doc}) == augment("q", "n", "t", "e")
    assert (read({"ask": "a"}), read({"print": "a"})) == (ask("a"), print_("a"))
    assert g("a") == g(user("a")) and g("a", "b").input == cross("a", "b")


def test_paths() -> None:
    found = {path_text(path): node for path, node in nodes.nodes(g(seq("a", monad(plus("b", "c")))))}
    assert list(found) == [
        "the query", "g.input", "g.input.seq[0]", "g.input.seq[1]", "g.input.seq[1].monad",
        "g.input.seq[1].monad.plus[0]", "g.input.seq[1].monad.plus[1]",
    ]  # fmt: skip
    assert found["g.input.seq[1].monad.plus[1]"] == user("c")


def test_children_can_be_replaced_in_every_node() -> None:
    for _, node in nodes.nodes(ALL):
        assert node.with_children(node.children) == node

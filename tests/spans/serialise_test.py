"""Serialisation for paged prefix caches, as spnl's tokenizer does it: id by id against its wheel."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from spans import random_queries
from spans.oracle import Oracle, encode, execute, make_hub

from pictool.errors import InputError
from pictool.spans import query as nodes
from pictool.spans.dsl import assistant, cross, g, monad, par, plus, repeat, seq, system, user
from pictool.spans.query import Call, Message, Query
from pictool.spans.serialise import Markers, serialise, serialise_map
from pictool.spans.templates import TEMPLATES, template_of

NAMES = [word for words, _ in TEMPLATES for word in words]
FAMILIES = ("granite", "Qwen", "llama3")
IN_TEXTS = encode("a")[0]  # an id that texts have as well
MARKERS = [
    Markers(pad, cross, plus, block)
    for block in (1, 2, 3, 16, 17)
    for pad, cross, plus in [(5, 6, 7), (5, None, 7), (5, 6, None), (5, None, None), (5, 5, 5), (5, 6, IN_TEXTS)]
]
QUERIES = 2400


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    home = tmp_path_factory.mktemp("hub")
    make_hub(home, NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield Oracle()


def test_random_queries_give_the_same_ids(oracle: Oracle) -> None:
    rng = random.Random(16)
    for number in range(QUERIES):
        query = g(random_queries.flat(rng), model=f"local/{rng.choice(FAMILIES)}", max_tokens=number, temperature=None)
        markers = rng.choice(MARKERS)
        assert serialise(query, encode, markers) == oracle.tokenize(query, markers).messages, (query, markers)


@pytest.mark.parametrize("name", NAMES)
def test_every_template_writes_every_role(oracle: Oracle, name: str) -> None:
    query = g(system(" s "), plus(user("\tu"), assistant(" an answer \x1c" * 4)), user("\n"), model=f"local/{name}")
    for markers in (MARKERS[6], MARKERS[-3]):
        assert serialise(query, encode, markers) == oracle.tokenize(query, markers).messages


def test_repeats_and_maps(oracle: Oracle) -> None:
    call = g(system("s"), plus("a", assistant("b c d e f g h")), model="local/granite", max_tokens=3)
    for markers in MARKERS:
        tokenized = oracle.tokenize(repeat(3, call), markers)
        assert tokenized.messages == serialise(repeat(3, call), encode, markers)
        assert (tokenized.n, tokenized.max_tokens) == (3, 3)
        query = nodes.Map(Call("local/granite"), ("a", "", "b c d\n"))
        assert oracle.tokenize(query, markers).inputs == serialise_map(query, encode, markers)


def test_what_makes_the_wheel_panic_is_nothing_or_an_error_here(
    oracle: Oracle, capfd: pytest.CaptureFixture[str]
) -> None:
    query = g(plus("a"), cross(), model="local/granite")
    with pytest.raises(BaseException, match="mid > len"):
        oracle.tokenize(query, MARKERS[0])
    assert serialise(query, encode, MARKERS[0]) == serialise(g(plus("a"), seq(), model="granite"), encode, MARKERS[0])
    with pytest.raises(InputError, match="blocks of 0 tokens: must be 1 or more"):
        Markers(5, 6, 7, 0)
    capfd.readouterr()


@pytest.mark.parametrize(
    ("query", "path"),
    [
        (g(seq("a", plus("b", g("c"))), model="granite"), "g.input.seq[1].plus[1]: a g"),
        (repeat(2, g(monad("a"), model="granite")), "repeat.g.input: a monad"),
    ],
)
def test_what_has_to_be_run_first_is_refused_by_its_path(oracle: Oracle, query: Query, path: str) -> None:
    with pytest.raises(TypeError, match="did not match any variant"):
        oracle.tokenize(query, MARKERS[0])
    assert isinstance(query, nodes.Generate | nodes.Repeat)
    with pytest.raises(InputError) as error:
        serialise(query, encode, MARKERS[0])
    assert str(error.value) == f"{path} has to be run before the query is serialised"


def test_a_model_that_spnl_has_no_template_for() -> None:
    with pytest.raises(InputError, match="model 'other/model': spnl knows no chat template for it; its name has to"):
        template_of("other/model")


def test_the_wheel_reads_what_is_written_here() -> None:
    """It executes what calls no model: its text is that of the messages in their order."""
    query = seq(
        system("a"), plus(monad("b"), "c", par(assistant("d"))), nodes.Zip(user("e"), seq("f", "g")), cross("h", seq())
    )
    assert asyncio.run(execute(query)) == "\n".join("acdefegh")


def test_random_messages_are_read_by_the_wheel() -> None:
    rng = random.Random(5)
    for _ in range(100):
        message = random_queries.message(rng)
        assert isinstance(message, Message)
        assert asyncio.run(execute(message)) == message.text

"""The optimizer: the paper's figures, one case a rule, and that meaning stays."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from spans import random_queries
from spans.oracle import execute

from pictool.errors import InputError
from pictool.spans.dsl import assistant, chat, cross, fragment, g, monad, par, plus, repeat, retrieve, seq, system, user
from pictool.spans.operators.calls import Call, Chat, Generate, Map
from pictool.spans.operators.flow import Ask, Print, Zip
from pictool.spans.operators.joins import Join, Plus
from pictool.spans.operators.messages import Message
from pictool.spans.operators.retrieve import Fragment
from pictool.spans.optimise import optimise, shape, tree_text
from pictool.spans.query import Effect, Options, Query, path_text, with_origins
from pictool.spans.query import nodes as nodes_of
from pictool.spans.reading import OPERATORS

F = (fragment("f1"), fragment("f2"))
FOUND = Options(retrieve=lambda node: F)


@pytest.mark.parametrize(
    ("query", "options", "want"),
    [
        pytest.param(chat(system("S"), assistant("A"), "U"), Options(), "G(⋈(S, A, U))", id="fig. 9a"),
        pytest.param(
            chat(system("S"), retrieve("U", "docs"), "U"), FOUND, "G(⋈(S, M(+(G¹(F), G¹(F))), +(F, F), U))",
            id="fig. 9b",
        ),
        pytest.param(plus(plus("a", "b"), "c", plus("d", plus("e"))), Options(), "+(U, U, U, U, U)", id="fig. 7c"),
        pytest.param(retrieve("q", "docs"), FOUND, "+(F, F)", id="R outside a call has nobody to prepare it"),
        pytest.param(retrieve("q", "docs"), Options(), "R(U)", id="R without a retriever"),
        pytest.param(g(cross(plus(g("a")), "b")), Options(), "G(⋈(+(G(U)), U))", id="linked objects need no input"),
        pytest.param(
            seq(seq("a", user("")), par("b"), seq(), cross("c", cross("d", seq("e", "f")))), Options(),
            "seq(U, U, ⋈(U, U, seq(U, U)))", id="simplifications",
        ),
        pytest.param(cross(seq("a", "b"), "c"), Options(), "⋈(U, U, U)", id="seq in ⋈"),
        pytest.param(plus(seq("a", "b"), "c"), Options(sorts_plus=True), "+(seq(U, U), U)", id="a seq in a + stays"),
        pytest.param(par(plus("a", "b"), plus("c")), Options(), "par(+(U, U), +(U))", id="a par of + stays"),
        pytest.param(user(""), Options(), "U", id="the root stays"),
    ],
)  # fmt: skip
def test_shapes(query: Query, options: Options, want: str) -> None:
    optimised = optimise(query, options)
    assert shape(optimised.after) == want
    assert optimise(optimised.after, options).steps == ()


def candidates(count: int) -> list[Query]:
    return [g(f"candidate {number}", temperature=0) for number in range(count)]


def judges(query: Query) -> int:
    return sum(isinstance(node, Generate) and node.call.model == "judge" for _, node in nodes_of(query))


@pytest.mark.parametrize(
    ("count", "arity", "plies", "number"), [(8, 2, 3, 7), (8, 3, 2, 4), (9, 3, 2, 4), (5, 2, 3, 4), (2, 2, 1, 1)]
)
def test_a_judge_becomes_a_tree(count: int, arity: int, plies: int, number: int) -> None:
    """Fig. 16: 8 candidates by two are 4 + 2 + 1 judges in three plies."""
    query = g(system("S"), plus(*candidates(count)), "U", model="judge")
    after = optimise(query, Options(arity=arity)).after
    assert judges(after) == number
    assert all(len(node.parts) <= arity for _, node in nodes_of(after) if isinstance(node, Plus))
    depth = max(
        sum(isinstance(above, Generate) and above.call.model == "judge" for above in chain(after, path))
        for path, _ in nodes_of(after)
    )
    assert depth == plies
    leaves = [node for _, node in nodes_of(after) if isinstance(node, Generate) and node.call.model != "judge"]
    assert leaves == candidates(count)


def chain(query: Query, path: tuple[Any, ...]) -> list[Query]:
    return [node for at, node in nodes_of(query) if path[: len(at)] == at]


def test_trees_are_made_only_where_they_are_asked_for_and_of_one_plus() -> None:
    two = g(plus("a", "b", "c"), plus("d", "e", "f"))
    assert optimise(g(plus(*candidates(9)))).steps == () == optimise(two, Options(arity=2)).steps
    assert shape(optimise(g(plus("a", "b", "c")), Options(arity=2)).after) == "G(+(G(+(U, U)), U))"


PAGES_AND_CANDIDATES = g(
    cross(plus(*F, repeat(3, g("a")), par(g("b"), Map(Call("m"), ("c", "d")))), "Which?"), model="judge"
)


def test_a_tree_judges_what_is_generated_and_every_judge_reads_the_pages() -> None:
    """A repeat, its standard form, is as many candidates; each draws as it would in the repeat."""
    after = optimise(with_origins(PAGES_AND_CANDIDATES), Options(arity=2)).after
    inner = "G(⋈(+(F, F, G(U), G(U)), U))"
    assert shape(after) == f"G(⋈(+(F, F, G(⋈(+(F, F, {inner}, {inner}), U)), {inner}), U))"
    origins = [node.origin for _, node in nodes_of(after) if isinstance(node, Generate)]
    assert len(set(origins)) == len(origins) == 5 + 6
    drawn = [path_text(node.origin or ()) for _, node in nodes_of(after) if shape(node) == "G(U)"]
    assert drawn == [
        *(f"g.input.cross[0].plus[2].repeat[{index}]" for index in range(3)), "g.input.cross[0].plus[3].par[0]",
        *(f"g.input.cross[0].plus[3].par[1].map[{index}]" for index in range(2)),
    ]  # fmt: skip
    apart = g(cross(plus(*F), plus(repeat(4, g("a"))), "Which?"))
    assert shape(optimise(apart, Options(arity=2)).after).count("+(F, F)") == 3
    varied = g(plus(repeat(4, g(g("a")))))
    assert optimise(varied, Options(arity=2)).steps == ()  # each judge would draw the input anew
    with pytest.raises(InputError, match=r" 2,.* 100000 "):
        optimise(g(cross(plus(repeat(255, g("a"))), *["page"] * 500)), Options(arity=2))


def test_order_is_free_only_where_it_is_asked_for() -> None:
    one, other = (g(plus(*texts), "q") for texts in ("ba", "ab"))
    assert optimise(one).after == one != other
    exact = Options(sorts_plus=True)
    assert optimise(one, exact).after == optimise(other, exact).after == other
    (step,) = optimise(one, exact).steps
    assert (step.rule, step.effect, path_text(step.path)) == ("order +", Effect.ORDER, "g.input.cross[0]")


def test_calls_that_are_equal_and_greedy_run_once() -> None:
    query = par(g("a", temperature=0), g("a", temperature=0), g("a"), g("a"), g("b", g("a", temperature=0)))
    shared = {path_text(path): path_text(first) for path, first in optimise(query).shared.items()}
    assert shared == {"par[1]": "par[0]", "par[4].g.input.cross[1]": "par[0]"}
    assert g(Ask("?"), temperature=0).varies and not g("a", temperature=None).varies


def with_calls(rng: random.Random, depth: int = 3) -> Query:
    """Random queries with calls, repeats, monads, zips and empty joins."""
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return random_queries.message(rng)
    inner = [with_calls(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    one = inner[0] if inner else user("x")
    temperature = rng.choice([0, 0.5])
    if kind < 0.4:
        return rng.choice([g, chat])(one, temperature=temperature)
    if kind < 0.5:
        return rng.choice([monad(one), Zip(user("z"), one), repeat(2, g(one, temperature=temperature))])
    return rng.choice([seq, par, plus, plus, cross])(*inner)


def meaning(query: Query) -> tuple[Any, ...]:
    """What a query says, without how it says it: messages and calls in their order, those of a + as a set."""
    match query:
        case Message(role, text):
            return ((role, text),) if text else ()
        case Plus(parts):
            members: list[Any] = []
            for entry in filter(None, map(meaning, parts)):
                members.extend(entry[0][1] if len(entry) == 1 and entry[0][0] == "+" else [entry])
            return (("+", tuple(sorted(members, key=repr))),) if members else ()
        case Join(parts):
            return tuple(entry for part in parts for entry in meaning(part))
        case Generate() | Chat():
            return (("g", query.call, meaning(query.input)),)
    return ((query.kind, *(meaning(child) for child in query.children)),)


def test_what_a_query_means_stays_under_every_rule_that_says_so() -> None:
    rng, fired = random.Random(7), set()
    kept = {rule.name for operator in OPERATORS for rule in operator.rules if rule.effect is not Effect.PROMPT}
    for _ in range(1500):
        query = with_calls(rng)
        optimised = optimise(query, Options(sorts_plus=True))
        fired |= {step.rule for step in optimised.steps}
        assert all(step.effect is not Effect.PROMPT for step in optimised.steps)
        assert meaning(optimised.after) == meaning(query), (query, optimised.after)
    assert fired == kept - {"desugar R"}


def test_the_wheel_executes_simplified_queries_to_the_same_messages() -> None:
    rng = random.Random(9)
    for _ in range(150):
        query = random_queries.flat(rng)
        simple = optimise(query).after
        plain, simplified = (asyncio.run(execute(each)) for each in (query, simple))
        assert [line for line in plain.split("\n") if line] == [line for line in simplified.split("\n") if line]


def test_rules_that_change_the_prompt_say_so() -> None:
    steps = optimise(g(plus(*candidates(4))), Options(arity=2)).steps
    assert Effect.PROMPT in {step.effect for step in steps}


def test_explain_shows_the_trees_the_rules_and_what_is_shared() -> None:
    query = chat(plus(plus(g("a", temperature=0)), g("a", temperature=0)), "Which  one?" + " x" * 60, model="m")
    assert optimise(query).explain().splitlines() == [
        "before",
        "C model=m max_tokens=0 temperature=0.6",
        "└─ ⋈",
        "   ├─ +",
        "   │  ├─ +",
        "   │  │  └─ G max_tokens=0 temperature=0",
        '   │  │     └─ U "a"',
        "   │  └─ G max_tokens=0 temperature=0",
        '   │     └─ U "a"',
        '   └─ U "Which one? x x x x x x x x x x x x x x x x x x x x x x x x x…"',
        "",
        "1. desugar C at the query: C(⋈(+(+(G(U)), G(U)), U)) → G(⋈(+(+(G(U)), G(U)), U))",
        "2. flatten + at g.input.cross[0]: +(+(G(U)), G(U)) → +(G(U), G(U))",
        "",
        "after",
        "G model=m max_tokens=0 temperature=0.6",
        "└─ ⋈",
        "   ├─ +",
        "   │  ├─ G max_tokens=0 temperature=0",
        '   │  │  └─ U "a"',
        "   │  └─ G max_tokens=0 temperature=0",
        '   │     └─ U "a"',
        '   └─ U "Which one? x x x x x x x x x x x x x x x x x x x x x x x x x…"',
        "g.input.cross[0].plus[1] runs once, as g.input.cross[0].plus[0]",
    ]
    assert "no rule applies" in optimise(user("a")).explain()


def test_trees_show_the_fields_of_every_node() -> None:
    lines = tree_text(
        seq(retrieve("q", "docs", k=2), Fragment("a.txt"), Map(Call("m", 1, 0), ("x",)), Print("p"))
    ).splitlines()
    assert lines[1:] == [
        "├─ R sources=('docs',) k=2 chunk_tokens=None",
        '│  └─ U "q"',
        '├─ F "a.txt"',
        "├─ map model=m max_tokens=1 temperature=0 inputs=('x',)",
        '└─ print "p"',
    ]

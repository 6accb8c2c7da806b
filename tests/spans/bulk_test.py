"""Bulks: the order that lets shared fragments meet, and the file of answers."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pictool.core import Chunk
from pictool.errors import InputError
from pictool.spans.bulk import BulkQuery, expected_hits, items_of, read_bulk, schedule
from pictool.spans.dsl import file, fragment, g, plus, retrieve, user
from pictool.spans.execute import Executor
from pictool.spans.operators import retrieve as retrieval
from pictool.spans.operators.calls import Call, Map
from pictool.spans.operators.retrieve import Augment
from pictool.spans.query import to_json
from pictool.spans.running import QueryError, RunOptions


def test_queries_that_share_fragments_become_neighbours() -> None:
    queries = [{name: 10, f"q{index}": 1} for index, name in enumerate("abcabcabc")]
    made = schedule(queries, 25)
    assert [queries[index].keys() & set("abc") for index in made.order] == [{name} for name in "aaabbbccc"]
    assert (made.hits_as_given, made.hits, made.total) == (0, 60, 99)


def test_an_order_is_a_permutation_and_greedy_is_no_worse_on_average() -> None:
    rng = random.Random(2)
    before = after = 0
    for _ in range(50):
        queries = [{rng.randrange(12): 5 for _ in range(rng.randint(0, 3))} for _ in range(rng.randint(0, 30))]
        capacity = rng.choice([0, 10, 20, 1000])
        made = schedule(queries, capacity)
        assert sorted(made.order) == list(range(len(queries)))
        assert made.hits == expected_hits([queries[index] for index in made.order], capacity) <= made.total
        if capacity == 1000:
            assert made.hits == made.hits_as_given
        before, after = before + made.hits_as_given, after + made.hits
    assert after > 1.2 * before


def test_an_order_that_is_no_better_is_not_taken() -> None:
    rng = random.Random(5)
    for _ in range(1500):
        queries = [{rng.randrange(8): rng.randint(1, 9) for _ in range(3)} for _ in range(rng.randint(2, 8))]
        made = schedule(queries, rng.randint(5, 20))
        assert made.hits >= made.hits_as_given
        assert made.hits > made.hits_as_given or made.order == tuple(range(len(queries)))


def test_the_cache_evicts_the_least_recently_used_and_keeps_nothing_too_large() -> None:
    assert expected_hits([{"a": 4}, {"b": 4}, {"a": 4}, {"c": 4}, {"a": 4}, {"b": 4}], 8) == 8
    assert expected_hits([{"a": 9}, {"a": 9}], 8) == 0


def test_thousands_of_queries_are_ordered_in_a_second() -> None:
    rng = random.Random(1)
    made = schedule([{rng.randrange(400): 100 for _ in range(4)} for _ in range(2000)], 4000)
    assert made.hits > 1.5 * made.hits_as_given


def test_items_are_the_texts_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("12345")
    query = g(plus(file("a.txt"), fragment("123"), fragment("123", "other")), Map(Call("m"), ("1", "22")), "question")
    assert sorted(items_of(query, tmp_path).values()) == [1, 2, 3, 5, 8]
    found = g(retrieve("q", "a.txt"), Augment(user("q"), "m", "name", "1234567"))
    engine: Any = SimpleNamespace(model=None)
    executed = Executor(lambda _: engine, RunOptions(base=tmp_path))
    monkeypatch.setattr(retrieval, "make_chunks", lambda model, text, source, size: [Chunk(text, (), source)])
    assert items_of(executed.optimise(found).after, tmp_path).keys() == items_of(
        g(file("a.txt"), fragment("1234567")), tmp_path
    ).keys()  # fmt: skip
    with pytest.raises(QueryError, match=r"^g\.input\.plus\[1\]: .*none\.txt"):
        items_of(g(plus(file("a.txt"), file("none.txt"))), tmp_path)


def test_a_file_of_queries() -> None:
    text = f"{to_json(g('a'))}\n\n{to_json(g('b'))}\n"
    assert read_bulk(text, "q.jsonl") == [BulkQuery(1, g("a")), BulkQuery(3, g("b"))]
    lines = "".join(f'{{"user": "a{mark}b"}}\n' for mark in ("\u2028", "\x85", "\u2029"))
    assert [line.query for line in read_bulk(lines, "q.jsonl")] == [user(f"a{mark}b") for mark in "\u2028\x85\u2029"]
    with pytest.raises(InputError, match=r"^q\.jsonl:2: g: "):
        read_bulk(f'{to_json(g("a"))}\n{{"g": {{"model": "m"}}}}', "q.jsonl")
    with pytest.raises(InputError, match=r"^q\.jsonl: "):
        read_bulk("\n", "q.jsonl")

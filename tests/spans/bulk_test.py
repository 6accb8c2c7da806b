"""Bulks: the order that lets shared fragments meet, and the file of answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pictool.errors import InputError
from pictool.spans.bulk import AnswerFile, BulkQuery, expected_hits, items_of, read_bulk, schedule
from pictool.spans.dsl import file, fragment, g, plus
from pictool.spans.query import Call, Map
from pictool.spans.reading import to_json


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


def test_the_cache_evicts_the_least_recently_used_and_keeps_nothing_too_large() -> None:
    assert expected_hits([{"a": 4}, {"b": 4}, {"a": 4}, {"c": 4}, {"a": 4}, {"b": 4}], 8) == 8
    assert expected_hits([{"a": 9}, {"a": 9}], 8) == 0


def test_thousands_of_queries_are_ordered_in_a_second() -> None:
    rng = random.Random(1)
    made = schedule([{rng.randrange(400): 100 for _ in range(4)} for _ in range(2000)], 4000)
    assert made.hits > 1.5 * made.hits_as_given


def test_items_are_the_texts_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("12345")
    query = g(plus(file("a.txt"), fragment("123"), fragment("123", "other")), Map(Call("m"), ("1", "22")), "question")
    assert items_of(query, tmp_path) == {
        ("file", "a.txt"): 5, ("text", "123"): 3, ("text", "1"): 1, ("text", "22"): 2, ("text", "question"): 8
    }  # fmt: skip


def test_a_file_of_queries() -> None:
    text = f"{to_json(g('a'))}\n\n{to_json(g('b'))}\n"
    assert read_bulk(text, "q.jsonl") == [BulkQuery(1, g("a")), BulkQuery(3, g("b"))]
    with pytest.raises(InputError, match=r"^q\.jsonl:2: g: has no input$"):
        read_bulk(f'{to_json(g("a"))}\n{{"g": {{"model": "m"}}}}', "q.jsonl")
    with pytest.raises(InputError, match=r"^q\.jsonl: has no queries$"):
        read_bulk("\n", "q.jsonl")


def test_answers_are_kept_and_what_failed_or_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    queries = [BulkQuery(number, g(str(number))) for number in (1, 2, 3)]
    path = tmp_path / "answers.jsonl"
    answers = AnswerFile(path, queries)
    answers.append(queries[0], {"answer": "é"})
    answers.append(queries[1], {"error": "no"})
    with path.open("ab") as out:
        out.write(b'{"line": 3, "qu')
    again = AnswerFile(path, queries)
    assert {line: record["answer"] for line, record in again.answered.items()} == {1: "é"}
    again.append(queries[2], {"answer": "c"})
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == [1, 2, 3]
    with pytest.raises(InputError, match=r"answers\.jsonl:1: answers another query; name another file with -o"):
        AnswerFile(path, [BulkQuery(1, g("other"))])
    path.write_text("nonsense\n")
    with pytest.raises(InputError, match=r"answers\.jsonl:1: is no answer to a query; name another file with -o"):
        AnswerFile(path, queries)

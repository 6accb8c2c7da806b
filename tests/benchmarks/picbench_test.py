"""picbench: every case's answer is found in its documents by other code, and cases are fixed by their fields."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import pytest

from benchmarks.questions.picbench import ORDERS, Picbench
from benchmarks.questions.tasks import TASKS
from pictool.errors import InputError
from pictool.eval.datasets.base import Case
from pictool.eval.metrics import METRICS
from pictool.linker.fields import make

CASES = list(Picbench(documents=(2, 5), words=(20, 120), cases_each=6).cases())
NAME = r"[A-Z]\w+ [A-Z]\w+"


def find(pattern: str, text: str) -> list[Any]:
    return re.findall(pattern, text)


def value_of_variable(text: str, query: str) -> str:
    (name,) = find(r"number is (X\d+)\?", query)
    while not (number := find(rf"Let {name} be (\d+)\.", text)):
        (name,) = find(rf"Let {name} be equal to (X\d+)\.", text)
    return str(number[0])


def chosen(case: Case) -> str:
    ((limit,),) = [find(r"at most (\d+) euros", case.query)]
    offers = [
        (find(rf"({NAME}) offers to do the work for (\d+) euros", text)[0], find(r"take (\d+) weeks", text)[0])
        for text in case.documents
    ]
    (name,) = [who for (who, price), weeks in offers if int(price) <= int(limit) and int(weeks) <= 4]
    return str(name)


def continued(case: Case) -> str:
    ((place,),) = [find(r"the key of (.*)\?", case.query)]
    (at,) = [i for i, text in enumerate(case.documents) if f"The key of {place} was given" in text]
    return str(find(rf"^({NAME}) arrived", case.documents[at + 1])[0])


def two_hops(text: str, query: str) -> str:
    (who,) = find(rf"where ({NAME}) works", query)
    (place,) = find(rf"{who} works at (.*?)\.", text)
    return str(find(rf"The telephone number of {place} is (\d+)\.", text)[0])


def invoice(text: str, query: str) -> str:
    (name,) = find(r"invoice (INV-\d+) as", query)
    (who, amount, date), *_ = find(
        rf"(?s)Invoice {name} was sent to ({NAME})\..*?sum of (\d+) euros is due on (.*?)\.", text
    )
    return json.dumps({"customer": who, "due": date, "euros": int(amount)})


def call(text: str, query: str) -> str:
    (who,) = find(rf"that ({NAME}) wants", query)
    (place,), (number,) = (
        find(rf"{who} wants to be met at (.*?)\.", text),
        find(rf"{who} has the customer number (\d+)", text),
    )
    return json.dumps({"arguments": {"place": place, "customer_number": int(number)}, "name": "arrange"})


def returned(case: Case) -> str:
    """Run the program."""
    (function,) = find(r"does (.*)\(\) return", case.query)
    modules = {find(r"# file (\w+)\.py", text)[0]: text for text in case.documents}
    constants: dict[str, Any] = {}
    for text in modules.values():
        constants |= {name: int(value) for name, value in find(r"(?m)^(LIMIT_\d+) = (\d+)$", text)}
    space: dict[str, Any] = dict(constants)
    exec(re.sub(r"(?m)^from .*$", "", "\n".join(modules.values())), space)
    for name, text in modules.items():
        for source, constant in find(r"(?m)^from (\w+) import (\w+)$", text):
            assert f"{constant} = " in modules[source], name
    return str(space[function]())


def who_and(pattern: str) -> Callable[[Case], list[str]]:
    def answer(case: Case) -> list[str]:
        (who,) = find(rf"({NAME}) (?:rent|sign|sit)|code of ({NAME})", case.query)
        return find(pattern.format(who=who[0] or who[1]), "".join(case.documents))

    return answer


SOLVED: dict[str, Callable[[Case], str]] = {
    "keys": lambda case: who_and(r"code of {who} is (\d+)")(case)[0],
    "values": lambda case: ", ".join(who_and(r"{who} rented the locker (\d+)")(case)),
    "continued": continued,
    "two-hops": lambda case: two_hops("".join(case.documents), case.query),
    "variables": lambda case: value_of_variable("".join(case.documents), case.query),
    "counting": lambda case: str(len(who_and(r"{who} signed for a delivery")(case))),
    "common-words": lambda case: ", ".join(
        sorted(word for word, _ in Counter(find(r"crate of (\w+)", "".join(case.documents))).most_common(2))
    ),
    "versions": lambda case: who_and(r"{who} sits in room (\d+)")(case)[-1],
    "order": lambda case: who_and(r"code of {who} is (\d+)")(case)[0],
    "choice": chosen,
    "json": lambda case: invoice("".join(case.documents), case.query),
    "tool": lambda case: call("".join(case.documents), case.query),
    "code": returned,
}


@pytest.mark.parametrize("task", TASKS)
def test_other_code_finds_the_answers(task: str) -> None:
    cases = [case for case in CASES if case.kind == task]
    assert len(cases) == 24 * (ORDERS if task == "order" else 1)
    for case in cases:
        assert METRICS[case.metric](SOLVED[task](case), case.answers) == 1, case.id
        assert METRICS[case.metric]("", case.answers) == 0


def test_sizes() -> None:
    for case in CASES:
        count, words = map(int, find(r"-(\d+)x(\d+)-", case.id)[0])
        assert len(case.documents) == count
        if words == 120 and count == 5 and case.kind != "common-words":
            assert all(120 <= len(text.split()) <= 135 for text in case.documents), case.id


def test_ids_are_unique_and_cases_fixed() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    by_id = {case.id: case for case in CASES}
    fewer = list(Picbench(documents=(5,), words=(120, 20), cases_each=2, tasks=("tool", "order")).cases())
    assert len(fewer) == 16 and all(by_id[case.id] == case for case in fewer)
    other = {case.documents for case in Picbench(seed=1, documents=(2, 5), words=(20, 120), cases_each=6).cases()}
    assert not other & {case.documents for case in CASES}


def test_the_prompts_are_those_that_strangers_compare_by() -> None:
    """What would change them needs another name."""
    contents = ""
    for case in Picbench().cases():
        fields = asdict(case)
        assert (fields.pop("is_one_text"), fields.pop("separator")) == (False, None)  # as before there were any
        contents += json.dumps(fields, sort_keys=True)
    assert sha256(contents.encode()).hexdigest()[:16] == "55fe8e3b0b97c4bd"


def test_orders_have_the_same_documents() -> None:
    orders = [case for case in CASES if case.kind == "order"]
    assert [case.kind for case in list(Picbench().cases())[:15]] == [
        *list(TASKS)[:8], *["order"] * ORDERS, *list(TASKS)[9:]
    ]  # fmt: skip
    for start in range(0, len(orders), ORDERS):
        several = orders[start : start + ORDERS]
        assert len({case.id.rpartition("-")[0] for case in several}) == 1 == len({case.query for case in several})
        assert len({tuple(sorted(case.documents)) for case in several}) == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tasks": "keys,sums"}, "tasks=sums "),
        ({"tasks": "keys,keys"}, "tasks= "),
        ({"documents": "1"}, "documents=1 "),
        ({"words": "0,5"}, "words=0 "),
        ({"cases_each": "0"}, "cases_each=0 "),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=f"^picbench: {named}"):
        make(Picbench, "picbench", fields)

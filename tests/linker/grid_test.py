"""Specifications of policies: as the papers name them, and grids."""

from __future__ import annotations

import pytest

from pictool.errors import InputError
from pictool.linker.grid import label_of, parse_grid, parse_policy
from pictool.linker.policies import make_policy, policies


@pytest.mark.parametrize(
    ("spec", "labels"),
    [
        ("full", ["full"]),
        ("legolink", ["legolink-16"]),
        ("legolink-2", ["legolink-2"]),
        ("legolink-1", ["legolink-1"]),
        ("legolink:k=1", ["legolink-1"]),
        ("cacheblend-15", ["cacheblend-15"]),
        ("cacheblend-2.5", ["cacheblend-2.5"]),
        ("cacheblend:ratio=.05,.15:on=v,k",
         ["cacheblend-5", "cacheblend-5:on=k", "cacheblend-15", "cacheblend-15:on=k"]),
        ("cacheblend-15:layers=1+2", ["cacheblend-15:layers=1+2"]),
        ("speccache-30:max_span=1,16", ["speccache-30:max_span=1", "speccache-30"]),
    ],
)  # fmt: skip
def test_what_a_specification_names(spec: str, labels: list[str]) -> None:
    assert [one.label for one in parse_grid([spec])] == labels


def test_a_number_is_the_main_field() -> None:
    lego, blend = parse_grid(["legolink-4", "cacheblend-20"])
    assert lego.policy.params == {"k": 4}
    assert blend.policy.params["ratio"] == pytest.approx(0.2)
    assert parse_grid(["cacheblend-5:layers=1+3"])[0].policy.params["layers"] == "1,3"


def test_equal_policies_come_once_in_the_order_given() -> None:
    specs = ["naive", "legolink-16", "legolink:k=16,8", "naive"]
    assert [one.label for one in parse_grid(specs)] == ["naive", "legolink-16", "legolink-8"]


@pytest.mark.parametrize("name", sorted(policies()))
def test_labels_find_their_policy_again(name: str) -> None:
    policy = make_policy(name, {})
    (found,) = parse_grid([label_of(policy)])
    assert found.policy == policy


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("nonsense", "'nonsense'"),
        ("nonsense-3", "'nonsense-3'"),
        ("full-3", "full-3"),
        ("legolink-x", "legolink-x"),
        ("legolink:k", "'k'"),
        ("legolink:k=", "'k='"),
        ("legolink:k=1,,2", "k=''"),
        ("legolink:n=1", "'n'"),
        ("cacheblend-150", "ratio=1.5"),
    ],
)
def test_what_is_none_is_refused(spec: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_grid([spec])


def test_one_policy_is_no_grid() -> None:
    assert parse_policy("cacheblend-5:layers=1+3") == parse_grid(["cacheblend-5:layers=1+3"])[0].policy
    with pytest.raises(InputError, match="2 values"):
        parse_policy("legolink:k=1,2")
    values = ",".join(["0.1"] * 300)
    with pytest.raises(InputError, match="300 values"):  # expanded, it would never end
        parse_policy("speccache:" + ":".join(f"{field}={values}" for field in ("ratio", "deep", "tau_cover", "budget")))

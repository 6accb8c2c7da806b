"""Texts to the fields of a frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from pictool.errors import InputError
from pictool.linker.fields import make


@dataclass(frozen=True)
class Options:
    kind: ClassVar[str] = "a class's own"
    path: str
    count: int = 1
    share: float = 0.5
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Nothing:
    pass


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({"path": "a"}, Options("a")),
        ({"path": "a", "count": "7", "share": "1e-2"}, Options("a", 7, 0.01)),
        ({"path": "a", "count": 7.0, "share": 1}, Options("a", 7, 1.0)),
        ({"path": "a,b", "names": "a, b", "sizes": "1,2"}, Options("a,b", names=("a", "b"), sizes=(1, 2))),
        ({"path": "", "names": ["a,b"], "sizes": (3,)}, Options("", names=("a,b",), sizes=(3,))),
        ({"path": "a", "sizes": 3}, Options("a", sizes=(3,))),
    ],
)
def test_values_that_fit(values: dict[str, Any], made: Options) -> None:
    got = make(Options, "options", values)
    assert got == made and [type(value) for value in vars(got).values()] == [type(v) for v in vars(made).values()]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "options: path=…"),
        ({"path": "a", "kind": "b"}, "options has no field 'kind'; its fields are path, count, share, names, sizes"),
        ({"path": 3}, "options: path=3 must be of type str"),
        ({"path": "a", "count": "1.5"}, "options: count='1.5' must be of type int, at most 2147483647"),
        ({"path": "a", "count": 1.5}, "options: count=1.5 must be of type int, at most 2147483647"),
        ({"path": "a", "count": True}, "options: count=True must be of type int, at most 2147483647"),
        ({"path": "a", "count": None}, "options: count=None must be of type int, at most 2147483647"),
        ({"path": "a", "count": float("inf")}, "options: count=inf must be of type int, at most 2147483647"),
        ({"path": "a", "count": 1 << 40}, "options: count=1099511627776 must be of type int, at most 2147483647"),
        ({"path": "a", "share": "inf"}, "options: share='inf' must be of type float, and finite"),
        ({"path": "a", "share": float("nan")}, "options: share=nan must be of type float, and finite"),
        ({"path": "a", "share": "half"}, "options: share='half' must be of type float, and finite"),
        ({"path": "a", "names": ""}, "options: names='' must be a list of str, separated by commas"),
        ({"path": "a", "sizes": "1,x"}, "options: sizes='1,x' must be a list of int, separated by commas"),
        ({"path": "a", "sizes": [1, "x"]}, "options: sizes=[1, 'x'] must be a list of int, separated by commas"),
    ],
)
def test_values_that_do_not(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make(Options, "options", values)
    assert str(caught.value).startswith(message)


def test_no_fields() -> None:
    assert make(Nothing, "nothing", {}) == Nothing()
    with pytest.raises(InputError, match=r"^nothing .*'a'"):
        make(Nothing, "nothing", {"a": "1"})

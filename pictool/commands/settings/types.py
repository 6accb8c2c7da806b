"""Types of options: what the text of an option, a variable or `pic.yaml` becomes, and what is wrong with it.

Each takes the name that a message names, and the text; it raises InputError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.compiler.splitters.base import Splitter
    from pictool.linker.policies.base import Policy

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZES |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("KMGT", 1)}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"


def parse_size(name: str, text: str) -> int:
    """Bytes: 10G and 10GB are 10·10⁹, 10Gi and 10GiB are 10·2³⁰, 10B is 10. Only 0 needs no unit."""
    if match := re.fullmatch(_NUMBER + r" ?(?:([KMGT]i?)B?|B)?", text.strip(), re.ASCII | re.IGNORECASE):
        unit = "" if match[2] is None else match[2][:1].upper() + match[2][1:].lower()
        if unit or text.strip().upper().endswith("B") or float(match[1]) == 0:
            return int(float(match[1]) * _SIZES[unit])
    raise InputError(f"{name} {text!r}: must be a size such as 500M, 10G or 2GiB; a unit is needed")


def parse_age(name: str, text: str) -> float:
    """Seconds: 90s, 10m, 12h, 30d, 2w."""
    if match := re.fullmatch(_NUMBER + r" ?([smhdw])", text.strip(), re.ASCII):
        return float(match[1]) * _AGES[match[2]]
    raise InputError(f"{name} {text!r}: must be an age such as 90s, 12h, 30d or 2w")


def parse_seed(name: str, text: str) -> int:
    """A whole number of 64 bits."""
    if text.isascii() and text.isdigit() and int(text) < 1 << 64:
        return int(text)
    raise InputError(f"{name} {text}: must be a whole number from 0 to 2^64 - 1")


def parse_rates(name: str, text: str) -> dict[str, float]:
    """Bytes per second of devices, by what they are called: `0.5,7` GB/s."""
    try:
        rates = {f"{float(number):g} GB/s": float(number) * 1e9 for number in text.split(",")}
    except ValueError as error:
        raise InputError(f"{name} {text}: must be numbers, separated by commas") from error
    if not all(0 < rate < float("inf") for rate in rates.values()):
        raise InputError(f"{name} {text}: each must be above 0")
    return rates


def parse_algo(name: str, text: str) -> Policy:
    """The one policy of NAME, NAME-NUMBER or NAME:FIELD=VALUE."""
    from pictool.linker.grid import parse_policy

    return parse_policy(text)


def parse_splitter(name: str, text: str) -> Splitter:
    """The splitter of NAME or NAME:FIELD=N,…"""
    from pictool.compiler.splitters import make_splitter

    return make_splitter(text)


def parse_policy_name(name: str, text: str) -> str:
    """A policy's name, without fields."""
    from pictool.linker.policies import policies

    return one_of(policies())(name, text)


def one_of(names: Collection[str]) -> Callable[[str, str], str]:
    """The type of texts that are one of these."""

    def parse(name: str, text: str) -> str:
        if text not in names:
            *others, last = names
            raise InputError(f"{name} {text}: must be {', '.join(others)} or {last}")
        return text

    return parse

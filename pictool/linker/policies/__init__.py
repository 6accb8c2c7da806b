"""The policies, one file each. A file put here is found, and so is one of another package: nothing else names it.

Another package adds policies by an entry point, as it does for pytest or fsspec:

    [project.entry-points."pictool.policies"]
    my-policy = "my_package.my_policy:MyPolicy"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pictool.core import CompileOptions
from pictool.errors import InputError
from pictool.linker.fields import make
from pictool.linker.policies.base import Policy
from pictool.plugins import find_classes

DEFAULT = "legolink"
BASELINE = "full"  # what every other policy is compared with


@cache
def policies() -> Mapping[str, type[Policy]]:
    """Every policy by its name."""
    return find_classes(__name__, __path__, "pictool.policies", Policy)  # type: ignore[type-abstract]


def make_policy(name: str, values: Mapping[str, Any] | None = None) -> Policy:
    """A policy from its name and fields; a text is converted to the field's type. See `grid.named_policy`.

    Raises:
        InputError: no such policy, no such field, or a value that does not fit.
    """
    known = policies()
    if name not in known:
        raise unknown_policy(name)
    return make(known[name], name, values or {})


def unknown_policy(name: str) -> InputError:
    """The error for what names no policy."""
    return InputError(
        f"algorithm {name[:80]!r}: must be one of {', '.join(policies())}, or as legolink-16, cacheblend-15"
    )


def object_kinds(policies: Iterable[Policy], codec: str, probes: int, is_hybrid: bool = False) -> list[CompileOptions]:
    """The kinds of objects that documents are compiled to for these policies, those with tables first.

    An object with a table serves those who need none, so that compiling in this order compiles nothing twice.

    Args:
        probes: those of a table, for policies that read tables.
        is_hybrid: whether the model's objects have states, at the cut that a policy needs.
    """
    needs = [policy.needs for policy in policies]
    if is_hybrid:
        cuts = sorted({CompileOptions(codec=codec, cut=need.cut) for need in needs if need.cut is not None})
        return [CompileOptions(codec=codec, probes=probes)] * any(need.tables for need in needs) + cuts
    kinds = {CompileOptions(need.sinks, codec, probes if need.tables else 0) for need in needs if need.objects}
    return sorted(kinds, reverse=True)

"""The policies, one file each. A file put here is found, and so is one of another package: nothing else names it.

Another package adds policies by an entry point, as it does for pytest or fsspec:

    [project.entry-points."pictool.policies"]
    my-policy = "my_package.my_policy:MyPolicy"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pictool.compiler.contexts import PREVIOUS
from pictool.core import CompileOptions, Contexts
from pictool.errors import InputError
from pictool.linker.fields import make
from pictool.linker.policies.base import Policy
from pictool.plugins import find_classes

DEFAULT = "auto"
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
    if name.startswith("fixup"):
        return InputError(f"algorithm {name[:80]!r}: was removed; use auto")
    return InputError(
        f"algorithm {name[:80]!r}: must be one of {', '.join(policies())}, or like legolink-16, cacheblend-15"
    )


def object_kinds(
    policies: Iterable[Policy], codec: str, is_hybrid: bool = False, after: str | Contexts = PREVIOUS
) -> list[CompileOptions]:
    """The kinds of objects that documents are compiled to for these policies.

    Args:
        is_hybrid: whether the model's objects have states, at the cut that a policy needs.
    """
    needs = [policy.needs for policy in policies]
    if is_hybrid:
        cuts = sorted({need.cut for need in needs if need.cut is not None})
        return [CompileOptions(codec, cut) for cut in cuts]
    return [CompileOptions(codec, after=after)] * any(need.objects for need in needs)

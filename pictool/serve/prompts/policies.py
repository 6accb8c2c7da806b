"""The policies that requests may name."""

from __future__ import annotations

from collections.abc import Collection

from pictool.errors import InputError
from pictool.linker.grid import parse_policy
from pictool.linker.policies import BASELINE
from pictool.linker.policies.base import Policy
from pictool.serve.errors import ApiError


def allowed_policy(spec: str, default: Policy, allowed: Collection[str] | None) -> Policy:
    """The policy that a request names, if it may.

    Args:
        default: that of requests which name none. allowed: names of others; None: all.

    Raises:
        ApiError: no such policy, one that is not allowed here, or another second model than the server's.
    """
    try:
        policy = parse_policy(spec)
    except InputError as error:
        raise ApiError(400, f"policy: {error}", param="pic.policy") from error
    require_allowed(policy, default, allowed)
    return policy


def require_allowed(policy: Policy, default: Policy, allowed: Collection[str] | None) -> None:
    """Refuse a policy that a server does not allow. Raises ApiError."""
    if allowed is not None and policy.name not in {*allowed, default.name, BASELINE}:
        raise ApiError(400, f"policy: {policy.name} is not allowed on this server", param="pic.policy")
    if policy.second_model and policy.second_model != default.second_model:
        raise ApiError(400, "policy: its second model is not that of this server", param="pic.policy")

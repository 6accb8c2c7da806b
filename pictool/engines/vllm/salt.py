"""Salts keep linked blocks apart: vLLM's prefix cache finds them only for a request that links the same way."""

from __future__ import annotations

import hashlib
import json
import secrets

from pictool.core import RowMask
from pictool.engines.vllm.plan import LinkPlan


class Salter:
    """Makes salts; a secret of this process is in them, so that no client can name one."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)

    def of(self, plan: LinkPlan, own: str | None, rows: RowMask | None = None) -> str:
        """The salt of a plan: policy, fields, and what stands where. `own` is what the request brought.

        `rows` are what was selected, where that follows from more: a key does not tell which table its object has.
        """
        spans = [(span.start, span.end, span.key) for span in plan.spans]
        chosen = None if rows is None else hashlib.sha256(rows.tobytes()).hexdigest()
        return self._salt([own, plan.policy.name, plan.policy.params, spans, chosen])

    def unique(self) -> str:
        """A salt that no other request has."""
        return self._salt(secrets.token_hex(16))

    def _salt(self, value: object) -> str:
        return "pic:" + hashlib.sha256(json.dumps([self._secret, value], sort_keys=True).encode()).hexdigest()

"""One line of a results file: one case under one algorithm."""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass
from typing import Any

from pictool.errors import InputError
from pictool.eval.reply import Times

MEASURED = ("timing", "peak_bytes")  # what differs from run to run; everything else does not


@dataclass(frozen=True)
class Row:
    """What a case gave under an algorithm. Tokens are counted by the model; compared is with `full` on the same case.

    rows: mean number of context rows computed per layer. kl: KL(full ‖ this) of the first token in nats; None for
    methods, whose prompts are others. agreement: share of equal tokens, position by position, of the longer answer.
    """

    id: str
    label: str
    kind: str
    algo: str
    params: dict[str, Any]
    other_model: str | None  # fingerprint of a second model that the user named
    metric: str  # the case's own
    scores: dict[str, float]  # by every metric
    answer: str
    kl: float | None
    agreement: float
    common_prefix: int  # tokens
    generated: int  # tokens
    tokens: int  # of the prompt
    context: int  # tokens of head and documents
    rows: float
    bytes_read: int
    timing: Times
    peak_bytes: int | None

    @property
    def key(self) -> tuple[str, str]:
        return self.id, self.label

    @property
    def row_share(self) -> float:
        """`rows` as a share of the context; above 1 for methods that call the model several times."""
        return self.rows / self.context if self.context else 0.0

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything that is the same in every run."""
        return {name: value for name, value in self.report().items() if name not in MEASURED}

    def report(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Any) -> Row:
        """The row of a JSON object.

        Raises:
            InputError: a key is missing, unknown, or has a value of another type.
        """
        fields = _checked(cls, values, "")
        return cls(**{**fields, "timing": Times(**_checked(Times, fields["timing"], "timing."))})


def _checked(cls: type[Any], values: Any, prefix: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict) or set(values) != set(hints):
        raise InputError(f"is no {'row' if not prefix else 'timing'} of this version")
    for name, hint in hints.items():
        if hint is not Times and not _is_of(values[name], hint):
            raise InputError(f"{prefix}{name} has the value {values[name]!r}")
    return values


def _is_of(value: Any, hint: Any) -> bool:
    kind = hint if isinstance(hint, types.UnionType) else typing.get_origin(hint) or hint
    return isinstance(value, kind) and not isinstance(value, bool)

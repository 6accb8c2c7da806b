"""What the doctor says: one verdict for each thing that it looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pictool.engines.answer_file import model_identity
from pictool.errors import PicError
from pictool.linker.policies import make_policy, policies

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_MAX_REASON = 500  # characters of an error that nobody foresaw


class VerdictStatus(StrEnum):
    """`FAILED` alone makes a report bad. `NOTE`: a fact, or a package for a feature that is missing."""

    OK = "ok"
    NOTE = "note"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    """One line of a report.

    Fields:
        section: what it belongs to. check: what was looked at. text: what was found, for people.
        values: the numbers of it, as JSON has them.
    """

    section: str
    check: str
    status: VerdictStatus
    text: str
    values: dict[str, Any] = field(default_factory=dict)


OnVerdict = Callable[[Verdict], None]


@dataclass(frozen=True)
class DoctorReport:
    """All verdicts, in their order."""

    verdicts: tuple[Verdict, ...]

    @property
    def is_good(self) -> bool:
        return all(verdict.status is not VerdictStatus.FAILED for verdict in self.verdicts)

    def of(self, check: str) -> Verdict:
        """The verdict of a check. Raises KeyError if it was not made."""
        found = {verdict.check: verdict for verdict in self.verdicts}
        return found[check]

    def report(self) -> dict[str, Any]:
        return {"is_good": self.is_good, "verdicts": [asdict(verdict) for verdict in self.verdicts]}


def facts_of(model: Model) -> dict[str, Any]:
    """What a report says of a model; `policies` are those that it runs without a second one, or stored beginnings."""
    known = [
        policy for policy in map(make_policy, policies()) if not (policy.needs.model_field or policy.needs.chain_block)
    ]
    runnable = [policy.name for policy in known if model.links(policy)]
    return {"name": model.name, **model_identity(model), "positions": model.max_positions, "policies": runnable}


def within(section: str, check: str, difference: float, limit: float, what: str) -> Verdict:
    """A verdict on a difference, which is not allowed to be above a limit, or nan."""
    status = VerdictStatus.OK if difference <= limit else VerdictStatus.FAILED
    text = f"{what} {difference:.1e} apart (limit {limit:.0e})"
    return Verdict(section, check, status, text, {"difference": difference, "limit": limit})


def guarded(section: str, check: str, run: Callable[[], Verdict | Iterable[Verdict]]) -> Iterator[Verdict]:
    """The verdicts of a check as they are made. Whatever it raises is one too: a report is of what does not work."""
    try:
        made = run()
        yield from [made] if isinstance(made, Verdict) else made
    except PicError as error:
        yield Verdict(section, check, VerdictStatus.FAILED, str(error))
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}"
        yield Verdict(section, check, VerdictStatus.FAILED, reason, {"error": type(error).__name__})

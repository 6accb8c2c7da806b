"""A guarantee in service: the mean KL of the answers of a class stays below a limit, or they are computed exactly.

What is bounded is the mean, over all answers of a class in a window, of KL(full ‖ linked) of full's whole answer, each
clipped at a declared maximum. An unpredictable coin of probability p chooses the answers that are verified. It alone is
random here: prompts may change in any way, or be chosen by an adversary who knows all former coins. For a value x
in [0, 1] and a bet b < 1, E[1 - b·coin·x] = 1 - b·p·x <= exp(-b·p·x), so the product of (1 - b·coin·x) exp(b·p·x)
over all answers is a supermartingale, and so is a mixture over bets: it exceeds 1 / δ at any time with a probability
of δ at most (Ville; betting §4). That bounds the sum of x from above, and negative bets bound it from below. Window k
of a class has δ_k = 6 δ / (π k)², so all its windows hold together at the level.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pictool.errors import InputError
from pictool.linker.grid import label_of
from pictool.linker.policies.base import Policy

_BETS = (0.05, 0.1, 0.2, 0.35, 0.55, 0.8, 0.97)  # that the mean is low
_BETS_ABOVE = (-0.1, -0.3, -1.0, -3.0, -10.0)  # that it is high
_WEIGHTS = (0.06, 0.06, 0.08, 0.1, 0.1, 0.2, 0.4)  # of the capital, for each of `_BETS`
_STEPS = 30  # of bisection
_STRENGTHS = 4  # policies of a chain, each with twice the rows of the one before
_MAX_CLASSES, _MAX_PENDING = 1000, 64
_WAIT = 4  # windows that hold before a cheaper policy is tried; twice as many after each breach


@dataclass(frozen=True)
class Guarantee:
    """What `--guarantee` declares.

    Fields:
        kl: highest mean KL of whole answers, nats, each clipped at `clip`. level: of confidence, for each class.
        share: of answers that are verified.
    """

    kl: float
    level: float = 0.95
    clip: float = 1.0
    share: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise InputError(f"--guarantee: level={self.level:g} must be between 0 and 1")
        if not 0 < self.kl < self.clip or not math.isfinite(self.clip):
            raise InputError(f"--guarantee: kl={self.kl:g} must be above 0 and below clip={self.clip:g}")
        if not 0 < self.share <= 1:
            raise InputError(f"--verify-share {self.share:g}: must be a share above 0, up to 1")

    @classmethod
    def parse(cls, text: str, share: float) -> Guarantee:
        """Of `kl=0.05,level=0.95`, and perhaps `clip=1`. Raises InputError."""
        pairs = [part.partition("=") for part in text.split(",")]
        try:
            values = {name.strip(): float(value) for name, _, value in pairs}
        except ValueError:
            values = {}
        if "kl" not in values or not set(values) <= {"kl", "level", "clip"} or len(values) < len(pairs):
            raise InputError(f"--guarantee {text}: must be as kl=0.05,level=0.95")
        return cls(**values, share=share)


class Window:
    """What the answers of a stretch of time say. Values are shares of `clip`."""

    def __init__(self, number: int, limit: float, level: float) -> None:
        self.number, self.limit = number, limit
        self._odds = -math.log((1 - level) * 6 / (math.pi * number) ** 2)
        self.expected = 0.0  # verifications: the sum of the coins' probabilities
        self._won = [math.log(weight) for weight in _WEIGHTS]
        self._won_above = [-math.log(len(_BETS_ABOVE))] * len(_BETS_ABOVE)

    @property
    def needed(self) -> float:
        """Verifications after which a window of zeros holds."""
        return (self._odds + 1) / self.limit

    def add(self, probability: float, value: float | None) -> None:
        """Count an answer; `value` is from 0 to 1, None if the coin did not choose it."""
        self.expected += probability
        if value is not None:
            for won, bets in ((self._won, _BETS), (self._won_above, _BETS_ABOVE)):
                won[:] = [amount + math.log1p(-bet * value) for amount, bet in zip(won, bets, strict=True)]

    @property
    def holds(self) -> bool:
        """Whether the mean is shown to be at most the limit."""
        return _log_capital(self._won, _BETS, self.expected * self.limit) >= self._odds

    @property
    def is_breached(self) -> bool:
        """Whether the mean is shown to be above the limit."""
        return _log_capital(self._won_above, _BETS_ABOVE, self.expected * self.limit) >= self._odds

    @property
    def bound(self) -> float:
        """What the mean is at most; 1 if nothing is shown."""
        low, high = 0.0, 1.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            is_above = _log_capital(self._won, _BETS, self.expected * middle) >= self._odds
            low, high = (low, middle) if is_above else (middle, high)
        return high


def _log_capital(won: Sequence[float], bets: Sequence[float], total: float) -> float:
    """The logarithm of the capital of all bets, if the expected sum of the verified values is `total`."""
    each = [amount + bet * total for amount, bet in zip(won, bets, strict=True)]
    highest = max(each)
    return highest + math.log(sum(math.exp(amount - highest) for amount in each))


@dataclass(eq=False)
class Ticket:
    """An answer of a class: the policy that links it, and whether it is verified; `is_exact`: full answers it."""

    of: AnswerClass
    policy: Policy
    strength: int
    is_exact: bool
    is_chosen: bool
    value: float | None = None
    is_done: bool = False
    is_withdrawn: bool = False

    def report(self) -> dict[str, Any]:
        """The field `pic.guarantee` of a response."""
        return self.of.report() | {"state": "exact" if self.is_exact else "linked"}


class AnswerClass:
    """The answers of one tenant under one policy, over about as many documents, and what they may be given by."""

    def __init__(
        self, name: str, chain: Sequence[Policy], declared: Guarantee, on_event: Callable[[str], None]
    ) -> None:
        self.name, self.chain, self.declared = name, chain, declared
        self.strength, self.is_linked, self.verified, self.breaches = 0, False, 0, 0
        self._on_event, self._wait, self._held, self._numbers = on_event, _WAIT, 0, 0
        self._tickets = deque[Ticket]()
        self._restart()

    @property
    def policy(self) -> Policy:
        return self.chain[self.strength]

    @property
    def bound(self) -> float:
        """Upper bound of the mean, nats."""
        return self._window.bound * self.declared.clip

    def report(self) -> dict[str, Any]:
        return {
            "kl": self.declared.kl, "level": self.declared.level, "clip": self.declared.clip,
            "policy": label_of(self.policy), "bound": self.bound, "verified": self.verified,
        }  # fmt: skip

    def draw(self, is_chosen: bool) -> Ticket:
        """The next answer."""
        ticket = Ticket(self, self.policy, self.strength, not self.is_linked, is_chosen)
        self._tickets.append(ticket)
        return ticket

    def advance(self) -> None:
        """Count the answers that are done, in the order in which they were drawn, and decide."""
        while self._tickets and self._tickets[0].is_done:
            ticket = self._tickets.popleft()
            if ticket.is_withdrawn or ticket.strength != self.strength:
                continue
            self.verified += ticket.is_chosen
            for window in (self._window, *([] if self._next is None else [self._next])):
                window.add(self.declared.share, ticket.value)
            self._decide()

    def _decide(self) -> None:
        if self._window.is_breached or (self._next is not None and self._next.is_breached):
            self.breaches += 1
            self._wait *= 2
            self._move(min(self.strength + 1, len(self.chain) - 1), "is breached")
        elif self._window.holds != self.is_linked:
            self.is_linked = self._window.holds
            self._say("holds: answers are linked" if self.is_linked else "is not shown any more: answers are exact")
        self._rotate()

    def _rotate(self) -> None:
        """A younger window takes over once it says as much, so that old answers do not hide new ones."""
        if self._next is None and self._window.expected >= self._window.needed:
            self._next = self._new_window()
        elif self._next is not None and self._next.expected >= 1.5 * self._next.needed:
            self._window, self._next = self._next, None
            self._held = self._held + 1 if self.is_linked else 0
            if self.strength and self._held >= self._wait:
                self._move(self.strength - 1, f"held for {self._held} windows; a cheaper policy is tried")

    def _move(self, strength: int, why: str) -> None:
        self.strength, self.is_linked = strength, False
        self._say(f"{why}: answers are exact until it is shown for {label_of(self.policy)}")
        self._restart()

    def _restart(self) -> None:
        self._held, self._window, self._next = 0, self._new_window(), None

    def _new_window(self) -> Window:
        self._numbers += 1
        return Window(self._numbers, self.declared.kl / self.declared.clip, self.declared.level)

    def _say(self, what: str) -> None:
        self._on_event(f"guarantee of {self.name}: KL at most {self.declared.kl:g} at {self.declared.level:g} {what}")

    _window: Window
    _next: Window | None


@dataclass
class Guarantor:
    """Draws tickets, and decides by what verification says of them. Used by one thread.

    Fields:
        on_event: called with each decision. coin: unpredictable, from 0 to 1.
    """

    declared: Guarantee
    on_event: Callable[[str], None]
    coin: Callable[[], float] = field(default_factory=lambda: secrets.SystemRandom().random)
    classes: dict[tuple[str, str, int], AnswerClass] = field(default_factory=dict)
    pending: int = 0  # chosen answers that are not verified yet

    def report(self) -> list[dict[str, Any]]:
        """A row for each class, for metrics."""
        return [
            {
                "labels": (tenant, policy, str(1 << (size - 1))), "bound": of.bound, "linked": float(of.is_linked),
                "verified": of.verified, "breaches": of.breaches,
            }
            for (tenant, policy, size), of in list(self.classes.items())
        ]  # fmt: skip

    def draw(self, tenant: str, policy: Policy, num_documents: int) -> Ticket | None:
        """The ticket of an answer that could be linked; None: it has to be exact, as too many wait for verification.

        The coin is thrown for every answer, before anything of the load is looked at.
        """
        is_chosen = self.coin() < self.declared.share
        key = (tenant, label_of(policy), num_documents.bit_length())
        if self.pending >= _MAX_PENDING or (key not in self.classes and len(self.classes) >= _MAX_CLASSES):
            return None
        if key not in self.classes:
            least = 1 << (key[2] - 1)
            name = f"{tenant}, {key[1]}, {least} to {2 * least - 1} documents"
            self.classes[key] = AnswerClass(name, chain_of(policy), self.declared, self.on_event)
        ticket = self.classes[key].draw(is_chosen)
        self.pending += is_chosen
        return ticket

    def finish(self, ticket: Ticket) -> None:
        """An answer was given whole; one that is chosen waits for `verify`."""
        if not ticket.is_chosen:
            self._end(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """An answer was not given whole: its client went away, or it failed. What it would say does not count."""
        self.pending -= ticket.is_chosen
        ticket.is_withdrawn = True
        self._end(ticket)

    def verify(self, ticket: Ticket, kl: float | None) -> None:
        """The KL of a chosen answer; None: it cannot be told, and counts as the highest."""
        assert ticket.is_chosen and not ticket.is_done
        self.pending -= 1
        clip = self.declared.clip
        ticket.value = 1.0 if kl is None or math.isnan(kl) else min(kl, clip) / clip
        self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.is_done = True
        ticket.of.advance()


def chain_of(policy: Policy) -> list[Policy]:
    """A policy and stronger ones: its knob doubled, as long as it stays a cheaper way than full."""
    chain, knob = [policy], policy.knob
    while knob is not None and len(chain) < _STRENGTHS:
        value = 2 * getattr(chain[-1], knob.field)
        if value == 0 or (knob.is_share and value >= 1):
            break
        chain.append(replace(chain[-1], **{knob.field: value}))
    return chain

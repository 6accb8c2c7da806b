"""What a client has of an answer, so that another replica can go on with it where one died."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pictool.serve.work import DeltaEvent, FinishEvent, StartEvent, TokenInfo


class EventMismatch(Exception):
    """An event differs from what the client already received."""


@dataclass
class _Text:
    """A text that grows, with its tokens; `at` and `num_tokens` are how much of it an attempt has given again."""

    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    at: int = 0
    num_tokens: int = 0

    def rest(self, text: str, tokens: tuple[TokenInfo, ...]) -> tuple[str, tuple[TokenInfo, ...]]:
        """What is new of the next piece. Raises EventMismatch."""
        known, known_tokens = self.text[self.at :][: len(text)], self.tokens[self.num_tokens :][: len(tokens)]
        if not text.startswith(known) or any(
            a.text != b.text for a, b in zip(known_tokens, tokens[: len(known_tokens)], strict=True)
        ):
            raise EventMismatch
        self.at += len(text)
        self.num_tokens += len(tokens)
        new = text[len(known) :], tokens[len(known_tokens) :]
        self.text += new[0]
        self.tokens += new[1]
        return new

    @property
    def is_whole(self) -> bool:
        return self.at == len(self.text) and self.num_tokens == len(self.tokens)


class SentEvents:
    """The events of a call that the client received. A retry yields them again; they are compared and dropped.

    An engine that batches joins tokens as they come, so texts are compared, however they are cut. Log-probabilities
    may differ by the noise of a batch, and so do the tokens that an engine's own cache had.
    """

    def __init__(self) -> None:
        self._texts: dict[object, _Text] = {}
        self._once: dict[object, Any] = {}
        self._others: list[Any] = []
        self._num_others = 0

    def __bool__(self) -> bool:
        return bool(self._texts or self._once or self._others)

    def begin_again(self) -> None:
        """The events of another attempt follow."""
        self._num_others = 0
        for text in self._texts.values():
            text.at = text.num_tokens = 0

    def rest(self, event: Any) -> Any:
        """What is new of an event; None: nothing. Raises EventMismatch."""
        if isinstance(event, DeltaEvent):
            text, tokens = self._texts.setdefault(event.index, _Text()).rest(event.text, event.tokens)
            return DeltaEvent(event.index, text, tokens, event.num_tokens) if text or tokens else None
        if isinstance(event, dict) and event.keys() == {"text"}:
            text, _ = self._texts.setdefault("link", _Text()).rest(event["text"], ())
            return {"text": text} if text else None
        if isinstance(event, StartEvent):
            return self._first("started", event, replace(event.reuse, cached=0))
        if isinstance(event, FinishEvent):
            if not self._texts.get(event.index, _Text()).is_whole:
                raise EventMismatch
            return self._first(event.index, event, event)
        self._num_others += 1
        if self._num_others > len(self._others):
            self._others.append(event)
            return event
        if event != self._others[self._num_others - 1]:
            raise EventMismatch
        return None

    def _first(self, name: object, event: Any, compared: Any) -> Any:
        if name not in self._once:
            self._once[name] = compared
            return event
        if self._once[name] != compared:
            raise EventMismatch
        return None

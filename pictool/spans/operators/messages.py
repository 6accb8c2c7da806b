"""S, U, A: the messages of a chat; what every query gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pictool.spans.query import Path, Query
from pictool.spans.reader import QueryReader

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message(Query):
    """One message of a chat: `{"user": "…"}`. It gives itself."""

    kind: ClassVar[str] = "message"
    role: Role
    text: str

    @property
    def symbol(self) -> str:
        return self.role[0].upper()

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    @classmethod
    def read(cls, role: Role, reader: QueryReader, value: Any, path: Path, depth: int) -> Message:
        return cls(role, reader.text(value, path))

    def to_data(self) -> dict[str, Any]:
        return {self.role: self.text}

    def run(self, run: object, path: Path) -> Message:
        return self


@dataclass(frozen=True)
class Output(Message):
    """What a call generated.

    Fields:
        tokens: its ids as they were generated, without the end token; empty if its text is read instead.
        source: the call's path.
        object: the key of its generated object, of its text and the seam after it; empty if there is none.
    """

    tokens: tuple[int, ...] = ()
    source: str = ""
    object: str = ""


@dataclass(frozen=True)
class FileText(Message):
    """A user's message that is a fragment's text. `source` is where it came from."""

    source: str = ""


def as_query(item: Query | str) -> Query:
    """An item of the Python form: a text is a user's message."""
    return Message("user", item) if isinstance(item, str) else item

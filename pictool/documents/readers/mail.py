from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import EmailMessage, Message
from typing import ClassVar, cast

from pictool.documents.base import MAX_PAGES, Note, Reader, Section, UnreadableError
from pictool.documents.readers.html import html_sections
from pictool.documents.texts import decoded

_FIELD = re.compile(rb"([!-9;-~]+):[ \t]*\S")
_KNOWN = set(b"from to subject date message-id received return-path mime-version delivered-to".split())
_LEAST = 3  # known fields that tell a message from a text with a colon
_BETWEEN = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\n\r\n))From [^\n]*\n(?=[!-9;-~]+:)")  # messages of a mailbox


class Mail(Reader):
    """An e-mail, or several of a mailbox file (mbox), a section for each; attachments are named, and not read."""

    name: ClassVar[str] = "e-mail"
    modules: ClassVar[tuple[str, ...]] = ("email", "charset_normalizer", "selectolax.lexbor")

    def recognises(self, data: bytes, suffix: str) -> bool:
        lines = data[:16384].replace(b"\r\n", b"\n").removeprefix(b"\xef\xbb\xbf").split(b"\n\n")[0].split(b"\n")
        if lines[0].startswith(b"From "):
            lines = lines[1:]
        if not lines or not _FIELD.match(lines[0]):
            return False
        fields = {match[1].lower() for match in map(_FIELD.match, lines) if match is not None}
        return len(fields & _KNOWN) >= _LEAST

    def sections(self, data: bytes) -> Iterator[Section | Note]:
        from email import message_from_bytes
        from email.policy import default

        messages = _BETWEEN.split(data)[1:] if data.startswith(b"From ") else [data]
        if len(messages) > MAX_PAGES:
            raise UnreadableError(f"has more than {MAX_PAGES:,d} messages; split it")
        attached = list[str]()
        for number, each in enumerate(messages, 1):
            message = message_from_bytes(each, policy=default)
            yield Section("\n".join(_lines(message, attached)), f"message {number}" if len(messages) > 1 else "")
        if attached:
            yield Note(f"attachments not read: {', '.join(attached[:5])}{' …' * (len(attached) > 5)}")


def _lines(message: EmailMessage, attached: list[str]) -> Iterator[str]:
    """The head of a message, the names of its attachments, its text, and the same of the messages that it forwards."""
    own = list[str]()
    texts = list(_texts(message, own))
    yield from (f"{name}: {message[name]}" for name in ("From", "To", "Date", "Subject") if message[name])
    yield from (f"Attachment: {name}" for name in own)
    yield from ["", *texts]
    attached += own


def _texts(part: Message, attached: list[str]) -> Iterator[str]:
    kind = part.get_content_type()
    if part.is_multipart():
        parts = cast(list[EmailMessage], part.get_payload())
        if kind == "message/rfc822":
            yield from (line for message in parts for line in _lines(message, attached))
            return
        if kind == "multipart/alternative":
            plain = (one for one in parts if one.get_content_type() == "text/plain")
            parts = [next(plain, parts[-1])]
        for inner in parts:
            yield from _texts(inner, attached)
    elif part.get_content_disposition() == "attachment" or not kind.startswith(("text/", "multipart/")):
        attached.append(part.get_filename() or kind)
    else:
        text = _content(part)
        yield text if kind != "text/html" else "\n".join(section.text for section in html_sections(text))


def _content(part: Message) -> str:
    """The text of a part. One in a charset that Python does not know is read as a file whose encoding nobody names."""
    data = cast(bytes, part.get_payload(decode=True))
    try:
        return data.decode(part.get_content_charset("ascii"))
    except (LookupError, UnicodeDecodeError):
        try:
            return decoded(data)
        except UnreadableError:
            return data.decode(errors="replace")

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import EmailMessage, MIMEPart
from typing import ClassVar

from pictool.documents.base import MAX_PAGES, Reader, Section, UnreadableError
from pictool.documents.texts import decoded

_FIELD = re.compile(rb"([!-9;-~]+):[ \t]*\S")
_KNOWN = {
    b"from",
    b"to",
    b"subject",
    b"date",
    b"message-id",
    b"received",
    b"return-path",
    b"mime-version",
    b"delivered-to",
}
_LEAST = 3  # known fields that tell a message from a text with a colon


class Mail(Reader):
    """An e-mail, or several of a mailbox file (mbox), a section for each; attachments are named, and not read."""

    name: ClassVar[str] = "e-mail"
    modules: ClassVar[tuple[str, ...]] = (
        "email", "charset_normalizer", "selectolax.lexbor"
    )  # fmt: skip

    def recognises(self, data: bytes, suffix: str) -> bool:
        lines = data[:16384].replace(b"\r\n", b"\n").removeprefix(b"\xef\xbb\xbf").split(b"\n\n")[0].split(b"\n")
        if lines[0].startswith(b"From "):
            lines = lines[1:]
        if not lines or not _FIELD.match(lines[0]):
            return False
        fields = {match[1].lower() for match in map(_FIELD.match, lines) if match is not None}
        return len(fields & _KNOWN) >= _LEAST

    def sections(self, data: bytes) -> Iterator[Section]:
        from email import message_from_bytes
        from email.policy import default

        parts = re.split(rb"^From [^\n]*\n", data, flags=re.MULTILINE)[1:] if data.startswith(b"From ") else [data]
        if len(parts) > MAX_PAGES:
            raise UnreadableError(f"has more than {MAX_PAGES:,d} messages; split it")
        for number, part in enumerate(parts, 1):
            message = message_from_bytes(part, policy=default)
            assert isinstance(message, EmailMessage)
            yield Section(_text(message), f"message {number}" if len(parts) > 1 else "")


def _content(body: MIMEPart) -> str:
    """The text of a part. One in a charset that Python does not know is read as a file whose encoding nobody names."""
    try:
        return str(body.get_content())
    except LookupError:
        data = body.get_payload(decode=True)
        assert isinstance(data, bytes)
        try:
            return decoded(data)
        except UnreadableError:
            return data.decode(errors="replace")


def _text(message: EmailMessage) -> str:
    head = [f"{name}: {message[name]}" for name in ("From", "To", "Date", "Subject") if message[name]]
    attached = [f"Attachment: {name}" for part in message.iter_attachments() if (name := part.get_filename())]
    body = message.get_body(("plain", "html"))
    if body is None:
        return "\n".join([*head, *attached])
    text = _content(body)
    if body.get_content_subtype() == "html":
        from pictool.documents.readers.html import html_sections

        text = "\n".join(section.text for section in html_sections(text))
    return "\n".join([*head, *attached, "", text])

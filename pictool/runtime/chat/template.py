"""A prompt's head and tail: from a chat template, split where the documents go, or plain."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pictool.core import Message, PromptText
from pictool.errors import InputError, ModelError

if TYPE_CHECKING:
    from pictool.runtime.model import Model

PLAIN_QUERY = "Question: {query}\nAnswer:"
CHAT_QUERY = "{query}"
_MARK = "\x02documents\x03"


def separator_between(before: str, separator: str, after: str = "") -> str:
    """What a prompt has between a document and what follows: the part of a separator that the two texts lack.

    With a blank line as separator it is `\\n` after a text that ends in one line break, and nothing after one that ends
    in two.
    """
    present = next(n for n in range(len(separator), -1, -1) if before.endswith(separator[:n]))
    rest = separator[present:]
    return next(rest[:n] for n in range(len(rest) + 1) if after.startswith(rest[n:]))


@dataclass(frozen=True)
class Frame:
    """The texts around the documents. The tail comes after a separator, if there are documents (`tail_after`)."""

    head: PromptText
    tail: PromptText

    def tail_after(self, document: str, separator: str) -> PromptText:
        """The tail with what separates it from the last document's text."""
        return PromptText(separator_between(document, separator, self.tail.text)) + self.tail


def make_frame(
    model: Model, query: str, head: str | None = None, query_template: str | None = None, separator: str | None = None
) -> Frame:  # fmt: skip
    """The head and tail of a prompt for `query`.

    With a chat template, `head` is the system message and the user's message is documents + query. Without one, the
    head is BOS (if the model has one) and `head` with a separator after it.

    Args:
        query_template: how the query is put behind the documents; `{query}` stands for it.
        separator: None: the model's.

    Raises:
        InputError: a template without `{query}`, or an empty query.
        ModelError: a chat template that does not keep the documents in one place.
    """
    default = CHAT_QUERY if model.tokenizer.chat_template else PLAIN_QUERY
    template = default if query_template is None else query_template
    if "{query}" not in template:
        raise InputError(f"query template {template!r}: must contain {{query}}")
    if not query.strip():
        raise InputError("the query is empty")
    ask = template.replace("{query}", query)
    if model.tokenizer.chat_template:
        messages = [*([Message("system", head)] if head else []), Message("user", ask)]
        return _chat_frame(model, messages, len(messages) - 1)
    apart = separator_between(head, model.separator if separator is None else separator) if head else ""
    quoted = model.encoder.quoted
    return Frame(PromptText(model.tokenizer.bos_token or "") + quoted((head or "") + apart), quoted(ask))


def frame_messages(
    model: Model, messages: Sequence[Message], head: str | None = None, query_template: str | None = None
) -> Frame:
    """The head and tail of a prompt for a chat: the documents come before the text of its last user message.

    Args:
        head: a system message, for a chat that begins with none.
        query_template: how that text follows the documents; `{query}` stands for it.

    Raises:
        InputError: no message of a user, or a model without a chat template.
        ModelError: a chat template that does not keep the documents in one place.
    """
    if not model.tokenizer.chat_template:
        raise InputError(f"{model.name}: has no chat template, so it takes a query, not messages")
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None or not messages[last].content.strip():
        raise InputError("messages: the last user message is missing or empty; send a question")
    template = CHAT_QUERY if query_template is None else query_template
    if "{query}" not in template:
        raise InputError(f"query template {template!r}: must contain {{query}}")
    listed = list(messages)
    listed[last] = Message("user", template.replace("{query}", messages[last].content))
    if head and listed[0].role != "system":
        listed.insert(0, Message("system", head))
        last += 1
    return _chat_frame(model, listed, last)


def _chat_frame(model: Model, messages: Sequence[Message], last: int) -> Frame:
    """The chat's text, split before the message at index `last`."""
    ask = messages[last].content
    chat = [
        {"role": message.role, "content": _MARK + message.content if i == last else message.content}
        for i, message in enumerate(messages)
    ]
    rendered = render_chat(model, chat)
    head, mark, tail = rendered.text.partition(_MARK)
    if not mark or _MARK in tail or not tail.startswith(ask.rstrip()):
        raise ModelError(
            f"{_origin(model)} changes the user's message, so it cannot be split into head and tail; use another model"
        )
    return Frame(rendered.cut(0, len(head)), rendered.cut(len(head) + len(_MARK)))


class MarkerQuotes:
    """Placeholders for the markers in what users wrote, which a template copies, and their text in what it wrote."""

    def __init__(self, model: Model) -> None:
        self._model, self._nonce, self._markers = model, secrets.token_hex(8), dict[str, int]()

    def quote(self, value: Any) -> Any:
        """A value of a chat (texts, in lists and objects), with placeholders in place of markers."""
        if isinstance(value, str):
            return self._quoted(value)
        if isinstance(value, Mapping):
            return {self.quote(name): self.quote(entry) for name, entry in value.items()}
        return [self.quote(entry) for entry in value] if isinstance(value, list | tuple) else value

    def read(self, text: str) -> PromptText:
        """What a template wrote of quoted values. Raises ModelError: it changed a placeholder."""
        markers = list(self._markers)
        parts, literals, size = re.split(f"pic{self._nonce}n([0-9]+)e", text), list[tuple[int, int]](), 0
        for index, part in enumerate(parts):
            if index % 2:
                parts[index] = markers[int(part)]
                literals.append((size, size + len(parts[index])))
            size += len(parts[index])
        read = PromptText("".join(parts), tuple(literals))
        if self._nonce in read.text.casefold():
            raise ModelError(f"{_origin(self._model)} changes {markers[0]} in a message; remove it from the message")
        return read

    def _quoted(self, text: str) -> str:
        parts, at = list[str](), 0
        for start, end in self._model.encoder.markers(text):
            number = self._markers.setdefault(text[start:end], len(self._markers))
            parts += [text[at:start], f"pic{self._nonce}n{number}e"]
            at = end
        return "".join([*parts, text[at:]]) if parts else text


def render_chat(
    model: Model, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[Mapping[str, Any]] = (),
) -> PromptText:  # fmt: skip
    """The text of a chat by the model's template, up to where the answer begins; markers in the values are text.

    Args:
        tools: what the model may call, as its template takes them.
        documents: for templates that print some.

    Raises:
        ModelError: the template fails, or does not take these messages.
    """
    from jinja2 import TemplateError

    try:
        template, quotes = model.tokenizer.get_chat_template(), MarkerQuotes(model)
        variables = model.tokenizer.special_tokens_map
        quoted: list[dict[str, Any]] = quotes.quote(messages)
        if _reads_parts(template, tuple(sorted(variables.items()))):
            quoted = [_in_parts(message) for message in quoted]
        more = quotes.quote(tools) or None, quotes.quote(documents) or None
        return quotes.read(_render(template, quoted, variables, *more))
    except ModelError:
        raise
    except Exception as error:  # a template can raise anything; several, and none of them is the default: ValueError
        said = " ".join(str(error).split())[:200]
        if type(error) is TemplateError:  # its own `raise_exception`
            raise ModelError(
                f"{_origin(model)} rejects these messages ({said}); omit --head, the system message"
            ) from error
        raise ModelError(
            f"{_origin(model)} fails: {type(error).__name__}: {said}; correct it, or use another model"
        ) from error


def _render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None, documents: Sequence[Mapping[str, Any]] | None = None,
) -> str:  # fmt: skip
    """The text of a chat, as `transformers` renders it in jinja2's sandbox."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        [messages], tools, documents, chat_template=template, add_generation_prompt=True, **variables
    )
    return str(texts[0])


@lru_cache(16)
def _reads_parts(template: str, variables: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template reads a message's content as a list of parts alone: tried on a small chat."""
    question = {"role": "user", "content": "Question"}

    def keeps(message: Mapping[str, Any]) -> bool:
        try:
            return question["content"] in _render(template, [message], dict(variables))
        except Exception:  # a template can raise anything
            return False

    return not keeps(question) and keeps(_in_parts(question))


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text is a part of its content."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else {**message}


def has_date(model: Model) -> bool:
    """Whether the chat template writes today's date, so that a head is compiled anew each day."""
    return "strftime_now" in (model.tokenizer.get_chat_template() if model.tokenizer.chat_template else "")


def _origin(model: Model) -> str:
    return f"{model.name}: its chat template ({_file(model)})"


def _file(model: Model) -> str:
    """The file that a chat template comes from."""
    name = "chat_template.jinja"
    return name if model.directory is not None and (model.directory / name).exists() else "tokenizer_config.json"

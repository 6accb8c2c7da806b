"""From a call's input, after all below it has run, to a prompt: texts, and the spans that are linked as objects.

A child of a + is a span. All spans from the first to the last, and what is written between them, are documents; what
comes before them is the head, what follows them the tail. Before and after each span that is an object is the model's
separator, as `separator_between` has it; its messages are written as they are. So `g(plus(file(a), file(b)), "Q")` is
the prompt of `pic link a b -q Q`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING

from pictool.compiler.chunking import encode_within
from pictool.core import Chunk, GeneratedChunk, PromptText, Separator
from pictool.errors import InputError, ModelError
from pictool.runtime.chat.template import PLAIN_QUERY, render_chat, separator_between
from pictool.spans.operators.joins import Join, Par, Plus, Seq
from pictool.spans.operators.messages import FileText, Message, Output, Role
from pictool.spans.query import Query

if TYPE_CHECKING:
    from pictool.runtime.model import Model

SEAM = "\n"  # after an output that is a span, so that the next one begins on a line of its own
_OPEN, _CLOSE = "\x02{}\x03", "\x04"


@dataclass(frozen=True)
class MessageSpan:
    """A run of messages that is one piece of a prompt. `is_object` if it is a child of a +."""

    messages: tuple[Message, ...]
    is_object: bool
    source: str


@dataclass(frozen=True)
class CallPrompt:
    """Head, documents and tail, each tokenized on its own."""

    head: PromptText
    documents: tuple[Chunk, ...]
    tail: PromptText


def spans_of(query: Query) -> list[MessageSpan]:
    """The spans of messages and joins; neighbours that are no objects are one span, and empty ones are left out."""
    spans: list[MessageSpan] = []
    for is_object, group in groupby(_walk(query), key=lambda span: span.is_object):
        found = [span for span in group if span.messages]
        if is_object:
            spans += found
        elif found:
            messages = chain.from_iterable(span.messages for span in found)
            spans.append(MessageSpan(tuple(messages), False, found[0].source))
    return spans


def make_prompt(model: Model, query: Query) -> CallPrompt:
    """The prompt of a call's input.

    With a chat template, messages are rendered by it as one chat, in which spans are part of the user's message that
    follows them. Without one texts are written as they are, and a user's message at the end as `pic link` asks it.

    Raises:
        InputError: nothing to answer, a message with the characters that mark spans, or far too many tokens.
        ModelError: a chat template that does not keep the spans.
    """
    spans = spans_of(query)
    if not spans:
        raise InputError("the input is empty; nothing to answer")
    render = _render_chat if model.tokenizer.chat_template else _render_plain
    head, between, tail = render(model, spans)
    objects = [span for span in spans if span.is_object]
    documents: list[Chunk] = []
    num_tokens = 0
    for index, span in enumerate(objects):
        documents.append(_chunk(model, span))
        num_tokens += len(documents[-1])
        if index < len(between) and between[index]:
            text, tokens = between[index].text, encode_within(model, between[index], "the prompt")
            is_text = bool(text.strip())  # of blanks alone, as of a separator, no object is made
            documents.append(Chunk(text, tokens, "between spans") if is_text else Separator(text, tokens, "separator"))
            num_tokens += len(tokens)
        if num_tokens > model.max_positions:  # the rest need not be tokenized
            raise InputError(
                f"the prompt has more tokens than the {model.max_positions} positions that {model.name} takes; "
                "link fewer or shorter documents"
            )
    if not tail and documents:  # the last span is what is answered
        tail = model.encoder.quoted(documents.pop().text)
        if documents and isinstance(documents[-1], Separator):
            tail = PromptText(documents.pop().text) + tail
    return CallPrompt(head, tuple(documents), tail)


def span_text(span: MessageSpan) -> str:
    """A span's text as it is in the prompt: its messages as they are written."""
    text = "".join(message.text for message in span.messages)
    return text + seam_after(text) if isinstance(span.messages[-1], Output) else text


def seam_after(output: str) -> str:
    """What is read after an output that is a span."""
    return "" if output.endswith(SEAM) else SEAM


def _walk(query: Query) -> Iterator[MessageSpan]:
    match query:
        case Message():
            yield MessageSpan((query,) if query.text else (), False, query.role)
        case Plus():
            for child in _children(query):
                messages = tuple(message for span in _walk(child) for message in span.messages)
                if messages:
                    first = messages[0]
                    source = first.source if isinstance(first, Output | FileText) else first.role
                    yield MessageSpan(messages, True, source)
        case Join(parts):
            for part in parts:
                yield from _walk(part)
        case _:
            raise AssertionError(f"a {query.kind} is no result")


def _children(plus: Query) -> Iterator[Query]:
    """The children of a +; those of a + or of a par in it are its own, also where a seq or par has nothing else."""
    for child in map(_unwrapped, plus.children):
        if isinstance(child, Plus | Par):
            yield from _children(child)
        else:
            yield child


def _unwrapped(child: Query) -> Query:
    """What a seq or par is, all other parts of which have no text."""
    while isinstance(child, Seq | Par):
        kept = [part for part in child.parts if any(span.messages for span in _walk(part))]
        if len(kept) != 1:
            break
        (child,) = kept
    return child


def _chunk(model: Model, span: MessageSpan) -> Chunk:
    """A span as a chunk; of a single output the tokens are those that were generated."""
    text = span_text(span)
    first = span.messages[0]
    if len(span.messages) > 1 or not isinstance(first, Output) or not first.tokens:
        return Chunk(text, encode_within(model, text, "the prompt"), span.source)
    tokens = first.tokens + model.encode(text[len(first.text) :])
    return GeneratedChunk(text, tokens, span.source, first.object)


def _render_plain(model: Model, spans: Sequence[MessageSpan]) -> tuple[PromptText, list[PromptText], PromptText]:
    """Head, what is between the objects, and tail, of a model without a chat template."""
    *rest, last = spans
    question = last.messages[-1]
    texts = [span_text(span) for span in spans]
    pieces, before = [""], ""  # pieces: what is written between objects
    if not last.is_object and question.role == "user" and type(question) is Message:
        lead = "".join(message.text for message in last.messages[:-1])
        tail = PLAIN_QUERY.replace("{query}", question.text)
        lead += separator_between(lead, model.separator, tail) if lead else ""
        texts[-1] = lead + tail
        if not rest:  # a prompt without objects: the question is its tail
            pieces, spans, texts = [lead, tail], [], []
    for span, text in zip(spans, texts, strict=True):
        after = "" if span.is_object else text
        pieces[-1] += (separator_between(before, model.separator, after) if before else "") + after
        if span.is_object:
            pieces.append("")
        before = text
    bos = PromptText(model.tokenizer.bos_token or "")
    first, *between = map(model.encoder.quoted, pieces)
    return (bos + first, between[:-1], between[-1]) if between else (bos, [], first)


def _render_chat(model: Model, spans: Sequence[MessageSpan]) -> tuple[PromptText, list[PromptText], PromptText]:
    """As `_render_plain`, of a model with one."""
    chat, count = _chat(model, spans)
    rendered = render_chat(model, chat)
    if not count:  # what comes before the last message is the head
        head, found, tail = rendered.text.rpartition(chat[-1]["content"].strip())
        if not (found and tail):
            return PromptText(""), [], rendered
        return rendered.cut(0, len(head)), [], rendered.cut(len(head))
    between: list[PromptText] = []
    at, text = 0, rendered.text
    for index in range(count):
        mark = _OPEN.format(index)
        start = text.find(mark, at)
        end = text.find(_CLOSE, start + len(mark))
        if start < 0 or end < 0:
            raise ModelError(
                f"{model.name}: its chat template changes the user's message, so it cannot be split at spans"
            )
        between.append(rendered.cut(at, start))
        at = end + len(_CLOSE)
    return between[0], between[1:], rendered.cut(at)


def _chat(model: Model, spans: Sequence[MessageSpan]) -> tuple[list[dict[str, str]], int]:
    """Messages for a chat template, with marks for objects, and the number of these.

    Neighbours of one role are one message, since templates want roles in turn, with separators between them.
    """
    chat: list[tuple[Role, list[str]]] = []
    count, before = 0, ""

    def add(role: Role, text: str, after: str) -> None:
        if chat and chat[-1][0] == role:
            chat[-1][1].extend((separator_between(before, model.separator, after), text))
        else:
            chat.append((role, [text]))

    for span in spans:
        if span.is_object:
            add("user", _OPEN.format(count) + _CLOSE, "")
            count, before = count + 1, span_text(span)
            continue
        for message in span.messages:
            if "\x02" in message.text or _CLOSE in message.text:
                raise InputError("a message contains the control character \\x02 or \\x04; remove it")
            add(message.role, message.text, message.text)
            before = message.text
    return [{"role": role, "content": "".join(texts)} for role, texts in chat], count

"""From a request's messages to the token ids of its prompt, and the objects in them (the backend on the torch engine).

Texts are tokenized as they are between objects, each on its own (docs/design.md §2, rule 1). A chat is rendered by the
model's template with marks in the places of its objects; without a template it has the plain form of `pic link`.
Documents are separated as those of `pic link` are.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import add
from typing import Any, TypeVar

import numpy as np

from pictool.compiler.chunking import FOREIGN, encode_within, is_foreign, marker_note
from pictool.core import PromptText, TokenIds
from pictool.errors import InputError, ModelError
from pictool.recognition.matches import Match
from pictool.runtime.chat.template import PLAIN_QUERY, render_chat, separator_between
from pictool.runtime.model import Model
from pictool.serve.work import (
    Break,
    ChatPrompt,
    CompiledText,
    MarkedText,
    ObjectReference,
    Piece,
    PlainText,
    PromptPart,
    RawPrompt,
    RetrievedObject,
    TokenizedText,
    UnstoredText,
    WrittenPiece,
    separated,
)

Recognise = Callable[[TokenIds], list[Match]]
Open = Callable[
    [ObjectReference | MarkedText], tuple[str, TokenIds]
]  # an object's key, "" if there is none, and its tokens
P = TypeVar("P", bound=Piece | WrittenPiece)
_NUM_SOURCES = {ObjectReference: "cache", RetrievedObject: "retrieved", MarkedText: "marker"}


@dataclass(frozen=True)
class PromptLayout:
    """A prompt's token ids and the objects in it, in order, with how they were found.

    `tail` is its text after the last object, `marked` the objects of marked texts, as far as a backend keeps them here.
    """

    tokens: TokenIds
    matches: tuple[Match, ...]
    sources: tuple[str, ...]  # of each match: cache, retrieved, marker, recognised
    unstored: tuple[PromptPart, ...] = ()  # marked texts that the store has no room for
    tail: str = ""
    marked: tuple[CompiledText, ...] = ()
    notes: tuple[str, ...] = ()  # on its texts


def lay_out(
    model: Model, pieces: Sequence[WrittenPiece], open_object: Open, recognise: Recognise | None
) -> PromptLayout:
    """Tokenize the pieces of a prompt.

    Args:
        recognise: finds stored documents in the tokens of a text; None: they are left as they are.
    """
    parts, matches, sources, at = list[TokenIds](), list[Match](), list[str](), 0
    unstored, notes = list[PromptPart](), list[str | None]()
    objects = {piece: open_object(piece) for piece in pieces if isinstance(piece, ObjectReference | MarkedText)}
    for piece in _without_breaks(model, pieces, objects):
        if isinstance(piece, PromptText | MarkedText):
            notes.append(marker_note(model, piece if isinstance(piece, PromptText) else piece.text, "the prompt"))
        elif type(piece) is TokenizedText and not parts:
            notes.append(_prefix_note(model, piece.ids))
        if isinstance(piece, ObjectReference | MarkedText):
            key, tokens = objects[piece]
            found = [Match(key, 0, tokens)] if key and len(tokens) else []
            source = _NUM_SOURCES[type(piece)]
        else:
            tokens = _text_tokens(model, piece)
            if isinstance(piece, UnstoredText):
                unstored.append(PromptPart(at, at + len(tokens), "not_stored"))
            found, source = (recognise(tokens) if recognise is not None else []), "recognised"
        notes += [FOREIGN] * is_foreign(model, tokens.tolist())
        matches += [replace(match, start=at + match.start) for match in found]
        sources += [source] * len(found)
        parts.append(tokens)
        at += len(tokens)
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    return PromptLayout(
        tokens, tuple(matches), tuple(sources), tuple(unstored), notes=tuple(filter(None, dict.fromkeys(notes)))
    )


def _prefix_note(model: Model, ids: Sequence[int]) -> str | None:
    """What there is to say of a prompt of token ids that begins as no text does."""
    encoder = model.encoder
    if ids[: len(encoder.prefix)] == encoder.prefix:
        return None
    return f"the prompt: its token ids begin without {encoder.prefix_text}, which this model's tokenizer puts there"


def _without_breaks(
    model: Model, pieces: Sequence[WrittenPiece], objects: Mapping[ObjectReference | MarkedText, tuple[str, TokenIds]]
) -> list[PromptText | TokenizedText | ObjectReference | MarkedText]:
    """The pieces with the text of each break in its place, part of the texts beside it."""

    def text_of(piece: WrittenPiece) -> str:
        match piece:
            case PromptText(text) | MarkedText(text):
                return text
            case ObjectReference():
                return str(model.tokenizer.decode(objects[piece][1].tolist()))
            case TokenizedText(ids):
                return str(model.tokenizer.decode(list(ids)))
            case Break():
                raise AssertionError("breaks follow one another")

    found, listed = list[WrittenPiece](), merged(pieces)
    for index, piece in enumerate(listed):
        if isinstance(piece, Break):
            after = listed[index + 1] if index + 1 < len(listed) else None
            text = after.text if isinstance(after, PromptText) else ""
            piece = PromptText(separator_between(text_of(found[-1]), model.separator, text) if found else "")
        found.append(piece)
    return [piece for piece in merged(found) if not isinstance(piece, Break)]


def _text_tokens(model: Model, piece: PromptText | TokenizedText) -> TokenIds:
    if isinstance(piece, PromptText):
        return np.asarray(encode_within(model, piece, "the prompt"), dtype=np.int32)
    if any(not 0 <= token < model.config.vocab_size for token in piece.ids):
        raise InputError(f"prompt: token ids must be from 0 to {model.config.vocab_size - 1}")
    return np.asarray(piece.ids, dtype=np.int32)


def merged(pieces: Iterable[P]) -> list[P]:
    """The pieces with texts that follow one another as one, and without empty ones."""
    result: list[P] = []
    for kind, group in groupby(pieces, key=type):
        if not issubclass(kind, PlainText | PromptText):
            result += group
        elif (text := reduce(add, group)) != kind(""):
            result.append(text)
    return result


def pieces_of(model: Model, prompt: ChatPrompt | RawPrompt) -> list[WrittenPiece]:
    """The pieces of a whole prompt, its template's text among them.

    Raises:
        InputError: tools or roles that a model without a template does not know, or nothing to answer.
        ModelError: a template that fails, refuses these messages, or loses some of their content.
    """
    if isinstance(prompt, RawPrompt):
        return _raw(model, prompt.pieces)
    if model.tokenizer.chat_template:
        return _rendered(model, prompt)
    return _plain(model, prompt)


def _raw(model: Model, pieces: Iterable[Piece]) -> list[WrittenPiece]:
    """A prompt that the client wrote: BOS comes before it, unless it begins with token ids."""
    written = [_written(piece, PromptText) for piece in pieces]
    if isinstance(written[0], TokenizedText) or not model.encoder.prefix:
        return written
    return merged([PromptText("", begins=True), *written])


def _written(piece: Piece, read: Callable[[str], PromptText]) -> WrittenPiece:
    return read(piece.text) if isinstance(piece, PlainText) else piece


class Marks:
    """Marks in the texts of a chat in the places of its objects, which no message can have, and back."""

    def __init__(self) -> None:
        self._nonce, self._objects = secrets.token_hex(8), list[TokenizedText | ObjectReference | MarkedText | Break]()

    def text(self, pieces: Iterable[Piece]) -> str:
        """The texts of pieces, with a mark for each object."""
        return "".join(map(self._written, pieces))

    def messages(self, chat: ChatPrompt) -> list[dict[str, Any]]:
        """The messages of a chat as its template takes them."""
        return [{"role": turn.role, "content": self.text(separated(turn.pieces)), **turn.more} for turn in chat.turns]

    def documents(self, chat: ChatPrompt) -> list[dict[str, Any]]:
        """Its documents as its template takes them."""
        return [{**document.more, "text": self.text([document.piece])} for document in chat.documents]

    def split(self, text: PromptText, name: str) -> list[WrittenPiece]:
        """The pieces of a chat that was rendered with marks.

        Raises:
            InputError: the template of the model `name` lost one of them.
        """
        marks = list(re.finditer(f"\x02{self._nonce}:([0-9]+)\x03", text.text))
        numbers = [int(mark[1]) for mark in marks]
        if set(numbers) != set(range(len(self._objects))):
            raise InputError(
                f"{name}: its chat template drops or changes a part of these messages; use plain text instead"
            )
        pieces, at = list[WrittenPiece](), 0
        for mark, number in zip(marks, numbers, strict=True):
            pieces += [text.cut(at, mark.start()), self._objects[number]]
            at = mark.end()
        return [*pieces, text.cut(at)]

    def _written(self, piece: Piece) -> str:
        if isinstance(piece, PlainText):
            return piece.text
        self._objects.append(piece)
        return f"\x02{self._nonce}:{len(self._objects) - 1}\x03"


def _rendered(model: Model, chat: ChatPrompt) -> list[WrittenPiece]:
    """A chat by the model's template."""
    if "documents" not in model.tokenizer.get_chat_template():  # it prints none
        chat = chat.without_documents()
    try:
        return _split(model, chat)
    except InputError:
        if (plain := chat.without_marks()) == chat:
            raise
        return _split(model, plain)


def tools_text(model: Model, prompt: ChatPrompt | RawPrompt) -> str:
    """What the model's template writes for the tools of a chat, wherever it puts them; empty if there are none."""
    if not isinstance(prompt, ChatPrompt) or not prompt.tools:
        return ""
    asks = [{"role": "user", "content": "?"}]
    try:
        plain, text = (render_chat(model, asks, tools).text for tools in ((), prompt.tools))
    except ModelError:  # such a chat alone is refused; each tool is there in some form
        return json.dumps(prompt.tools, ensure_ascii=False)
    start = _num_equal(plain, text)
    return text[start : len(text) - _num_equal(plain[start:][::-1], text[start:][::-1])]


def _num_equal(a: str, b: str) -> int:
    """The number of characters that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _split(model: Model, chat: ChatPrompt) -> list[WrittenPiece]:
    marks = Marks()
    text = render_chat(model, marks.messages(chat), chat.tools, marks.documents(chat))
    return marks.split(text, model.name)


def _plain(model: Model, chat: ChatPrompt) -> list[WrittenPiece]:
    """A chat in the plain form: BOS, system text, then for each user documents, "Question: …" and "Answer:".

    All texts are separated. Of a user's last text, what follows the last empty line is the question, and what precedes
    it belongs to the documents.
    """
    chat = chat.without_documents()
    if chat.tools:
        raise InputError(f"tools: {model.name} has no chat template, so it does not support tools")
    system = [piece for turn in chat.turns if turn.role in ("system", "developer") for piece in turn.pieces]
    head = separated(system, always=True)
    pieces: list[Piece] = [*head, *([Break()] if head else [])]
    question: list[Piece] = []
    for turn in chat.turns:
        if turn.role == "user":
            question += turn.pieces
        elif turn.role == "assistant":
            answer = "".join(piece.text for piece in turn.pieces if isinstance(piece, PlainText))
            pieces += [*(_question(question) if question else []), PlainText(f" {answer}\n")]
            question = []
        elif turn.role not in ("system", "developer"):
            raise InputError(
                f"messages: {model.name} has no chat template, so it does not support the role {turn.role!r}"
            )
    if not question:
        raise InputError("messages: the last message must come from the user")
    joined = merged([*pieces, *_question(question)])
    bos = PromptText(model.tokenizer.bos_token or "")
    return [bos, *(_written(piece, model.encoder.quoted) for piece in joined)]


def _question(question: Sequence[Piece]) -> list[Piece]:
    *before, last = separated(question, always=True) or [PlainText("")]
    if not isinstance(last, PlainText):
        raise InputError("messages: the last part of a user message must be text, the question")
    documents, _, ask = last.text.rstrip().rpartition("\n\n")
    if not ask.strip():
        raise InputError("messages: the last message ends without a question")
    template_head, _, template_tail = PLAIN_QUERY.partition("{query}")
    if documents:
        before += PlainText(documents), Break()
    return [*before, PlainText(template_head + ask + template_tail)]

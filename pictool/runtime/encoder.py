"""From texts to token ids. What users and documents wrote makes no control token; only a template's own markers do.

A control token is one that the tokenizer declares special, as the marker of a turn. A tokenizer reads its name in any
text as that token, so a document could end the user's turn. Such a text, and a chat that quotes one, is tokenized by a
copy of the tokenizer in which special tokens have secret names: what the template wrote is renamed, the rest is not.
All other texts have the ids that the tokenizer itself gives.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from pictool.core import PromptText
from pictool.errors import InputError
from pictool.lru import Lru

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Span = tuple[int, int]  # characters [start, end)
_KEPT = 4 << 20  # characters of texts whose tokens are kept: some 50 MB of English, and at worst 40 bytes a character
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopqrstuv")  # normalizers leave small letters as they are


class Encoder:
    """Tokenizes texts, without adding special tokens, by a tokenizer of `transformers`.

    Attributes:
        tokenizer: what it was made of.
        kept: what was made of texts: by the text, how it was read, and the tenant's salt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.kept = tokenizer, Lru(_KEPT)

    def encode(self, text: str | PromptText, salt: str = "") -> tuple[int, ...]:
        """The token ids of a text; a text that was read before, with the same salt, is not tokenized again.

        Raises:
            InputError: the text has a marker that cannot be told from a control token.
        """
        kept: tuple[int, ...] = self.kept.get((salt, text), 1 + len(text), lambda: tuple(self._encoded(text, False)[0]))
        return kept

    def encode_with_offsets(self, text: str | PromptText) -> tuple[list[int], list[Span]]:
        """The same, with the characters of each token, as the tokenizer tells them. Raises as `encode` does."""
        return self._encoded(text, True)

    def markers(self, text: str) -> list[Span]:
        """Where a text has names of special tokens."""
        found, at, names = list[Span](), 0, self.control
        while names and (begin := self._beginning.search(text, at)):
            start = begin.start()
            name = next((name for size in self._sizes if (name := text[start : start + size]) in names), "")
            if name:
                found.append((start, start + len(name)))
            at = start + (len(name) or 1)
        return found

    def quoted(self, text: str) -> PromptText:
        """A user's text as a part of a template's."""
        return PromptText(text, tuple(self.markers(text)))

    @cached_property
    def control(self) -> Mapping[str, int]:
        """The control tokens by name: those that are declared special, but for bytes of characters without a token.

        The unknown token is one: a text may name it, or make it of what is unknown.
        """
        entries = (
            (token, entry.content) for token, entry in self.tokenizer.added_tokens_decoder.items() if entry.special
        )
        return {name: token for token, name in entries if name and not _BYTE.fullmatch(name)}

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text (BOS), perhaps nothing."""
        encoded = self.tokenizer("a", return_special_tokens_mask=True)
        pairs = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
        return tuple(token for token, _ in takewhile(lambda pair: pair[1], pairs))

    @cached_property
    def prefix_text(self) -> str:
        """The names of `prefix`."""
        names = {token: name for name, token in self.control.items()}
        return "".join(names.get(token, "") for token in self.prefix)

    def whole(self, text: str | PromptText) -> str:
        """A text with the names of what is put before it."""
        return (self.prefix_text if not isinstance(text, str) and self.has_prefix(text) else "") + str(text)

    def as_tokenized(self, text: str, ids: Sequence[int]) -> str | PromptText:
        """The text of some ids: a template's, if control tokens are among them."""
        return text if self.find_control(ids) is None else PromptText(text)

    def find_control(self, ids: Sequence[int]) -> int | None:
        """The first control token of some ids, but for what is unknown."""
        return next((token for token in ids if token in self._ids and token != self.unknown), None)

    def has_prefix(self, text: PromptText) -> bool:
        """Whether `prefix` is put before a text."""
        return text.begins and bool(self.prefix) and not text.text.startswith(self.prefix_text or "\0")

    # What a kind of tokenizer does in its own way

    @cached_property
    def unknown(self) -> int | None:
        """The token of what the tokenizer does not know."""
        token: int | None = self.tokenizer.unk_token_id
        return token

    def _parsed(self, text: str, has_offsets: bool) -> tuple[list[int], list[Span]]:
        """A text, all markers in which are control tokens."""
        if not has_offsets:
            return list(self.tokenizer.encode(text, add_special_tokens=False)), []
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _separated(self, text: str, own: Sequence[Span], has_offsets: bool) -> tuple[list[int], list[Span]]:
        """A text, of whose markers those at `own` are control tokens, and all others text."""
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            if own or has_offsets:
                raise InputError("the user's text contains markers; use a model with a fast tokenizer (tokenizer.json)")
            return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)), []
        backend, names = self._renamed
        parts, borders, at = list[str](), [(0, 0)], 0  # borders: a character of the renamed text, and of this one
        for start, end in own:
            parts += [text[at:start], names[text[start:end]]]
            first = borders[-1][0] + start - at
            borders += [(first, start), (first + len(parts[-1]), end)]
            at = end
        encoded = backend.encode("".join([*parts, text[at:]]), add_special_tokens=False)
        return list(encoded.ids), [_moved(span, borders) for span in encoded.offsets] if has_offsets else []

    @cached_property
    def _renamed(self) -> tuple[Any, dict[str, str]]:
        """A copy of the tokenizer in which special tokens have secret names, and these, by their own."""
        nonce = secrets.token_hex(8)
        names = {name: f"{nonce}x{i:04x}".translate(_LETTERS) for i, name in enumerate(self.control)}
        return rename_tokens(self.tokenizer.backend_tokenizer, names), names

    # How it is decided

    def _encoded(self, text: str | PromptText, has_offsets: bool) -> tuple[list[int], list[Span]]:
        if isinstance(text, str):
            ids, offsets = self._parsed(text, has_offsets)
            found = self._ids.intersection(ids)
            has_markers = bool(found) and (found != {self.unknown} or bool(self.markers(text)))
            return self._checked(text, (), has_offsets) if has_markers else (ids, offsets)
        ids, offsets = ([], []) if text.literals else self._parsed(text.text, has_offsets)
        if text.literals or self._normalizes:
            own = self._own(text)
            if text.literals or self._num_control(ids) != self._num_own(text.text, own):
                ids, offsets = self._checked(text.text, own, has_offsets)
        before = self.prefix if self.has_prefix(text) else ()
        return [*before, *ids], [(0, 0)] * len(before) * has_offsets + offsets

    def _checked(self, text: str, own: Sequence[Span], has_offsets: bool) -> tuple[list[int], list[Span]]:
        """`_separated`, with as many control tokens as there are to be. Raises InputError."""
        ids, offsets = self._separated(text, own, has_offsets)
        if self._num_control(ids) != self._num_own(text, own):
            name = next((text[start:end] for start, end in self.markers(text)), "of a special token")
            raise InputError(
                f"the text contains the marker {name}, which this tokenizer cannot read as text; remove it"
            )
        return ids, offsets

    def _own(self, text: PromptText) -> list[Span]:
        """The markers that a template wrote itself."""
        found, at = list[Span](), 0
        for start, end in (*text.literals, (len(text), len(text))):
            found += [(at + first, at + last) for first, last in self.markers(text.text[at:start])]
            at = end
        return found

    def _num_control(self, ids: Sequence[int]) -> int:
        """How many of some ids are control tokens, but for what is unknown."""
        return sum(token in self._ids and token != self.unknown for token in ids)

    def _num_own(self, text: str, own: Sequence[Span]) -> int:
        return sum(self.control[text[start:end]] != self.unknown for start, end in own)

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self.control.values())

    @cached_property
    def _normalizes(self) -> bool:
        """Whether what a user wrote may become the name of a special token only when the tokenizer normalizes it."""
        return any(entry.special and entry.normalized for entry in self.tokenizer.added_tokens_decoder.values())

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted({len(name) for name in self.control}, reverse=True)

    @cached_property
    def _beginning(self) -> re.Pattern[str]:
        """How names of special tokens begin."""
        return re.compile("|".join(map(re.escape, sorted({name[:2] for name in self.control}, reverse=True))))


def rename_tokens(backend: Any, names: Mapping[str, str]) -> Any:
    """A copy of a `tokenizers.Tokenizer` that cuts nothing off, whose tokens have other names and the same ids."""
    from tokenizers import Tokenizer

    data = json.loads(backend.to_str())
    data |= {"truncation": None, "padding": None}
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = data["model"]
    if isinstance(vocabulary := model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token for piece, token in vocabulary.items()}
    else:  # of Unigram, with scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # those that make a special token of parts cannot be meant
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    return Tokenizer.from_str(json.dumps(data))


def _makes(merge: str | list[str], names: Mapping[str, str]) -> bool:
    parts = merge.split(" ", 1) if isinstance(merge, str) else merge
    return not names.keys().isdisjoint(("".join(parts), *parts))


def _moved(span: Span, borders: Sequence[Span]) -> Span:
    """A span of the renamed text in that of the text. `borders` are where both texts begin to have other lengths."""
    firsts = [first for first, _ in borders]

    def moved(character: int) -> int:
        at = bisect_right(firsts, character) - 1
        within = borders[at][1] + character - borders[at][0]
        return min(within, borders[at + 1][1]) if at + 1 < len(borders) else within

    return moved(span[0]), moved(span[1])


_REPLACEMENT = "\ufffd"  # the bytes of an incomplete character decode to it
_CHARACTER_BYTES = 4  # at most, and a token has one or more of them
_MAX_PENDING = 8  # tokens that wait for their character; those that cannot be of one are then no text


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text that each token adds, special tokens included. A character of several tokens belongs to the last one."""
    pieces: list[str] = []
    before, done = 0, 0  # tokens [before, done) are decoded again with what follows, for the spaces between
    for end in range(1, len(tokens) + 1):
        pieces.append("")
        old, new = (_decode(tokenizer, tokens[before:to]) for to in (done, end))
        cut, text = end, new
        if new.endswith(_REPLACEMENT) and end < len(tokens):
            if end - done < _MAX_PENDING:
                continue
            cut = end - _CHARACTER_BYTES + 1  # the tokens after it may begin a character
            text = _decode(tokenizer, tokens[before:cut])
            if not new.startswith(text):  # it would cut a character in two
                continue
        pieces[cut - 1] = text[len(old) :]
        before, done = done, cut
    return tuple(pieces)


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

"""The tokenizer in a GGUF file, as llama.cpp runs it, with what the other packages ask of a tokenizer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pictool.engines.llamacpp.library import Weights, api
from pictool.errors import InputError
from pictool.runtime.encoder import Encoder, Span

_PIECE = 256  # bytes of a token at first
_UNKNOWN, _CONTROL, _LSTRIP, _RSTRIP = 1 << 0, 1 << 3, 1 << 7, 1 << 8  # attributes of a token (llama_token_attr)


class GgufTokenizer:
    """Text to token ids and back; none is added.

    Attributes:
        fingerprint: names its content, for `tokenizer_fingerprint`.
    """

    def __init__(self, weights: Weights, fingerprint: str) -> None:
        self._weights, self._vocab, self.fingerprint = weights, weights.vocab, fingerprint

    def __deepcopy__(self, _: object) -> GgufTokenizer:
        return self  # it has no state

    def __len__(self) -> int:
        return self._weights.num_tokens

    @cached_property
    def bos_id(self) -> int | None:
        """The first token of texts, which other tokens attend to; None if the file names none."""
        token = int(api().llama_vocab_bos(self._vocab))
        return token if token >= 0 else None

    @cached_property
    def bos_token_id(self) -> int | None:
        """The same where llama.cpp adds it to prompts."""
        return self.bos_id if api().llama_vocab_get_add_bos(self._vocab) else None

    @cached_property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._text(self.bos_token_id)

    @cached_property
    def eos_token_id(self) -> int | None:
        token = int(api().llama_vocab_eos(self._vocab))
        return token if token >= 0 else None

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(token for token in range(len(self)) if api().llama_vocab_is_eog(self._vocab, token))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        named = {"bos_token": self.bos_id, "eos_token": self.eos_token_id}
        return {name: self._text(token) for name, token in named.items() if token is not None}

    @cached_property
    def chat_template(self) -> str | None:
        return self._weights.metadata("tokenizer.chat_template") or None

    def get_chat_template(self) -> str:
        if self.chat_template is None:
            raise ValueError("the GGUF file has none")
        return self.chat_template

    def encode(self, text: str, add_special_tokens: bool = False, parses: bool = True) -> list[int]:
        """Token ids of a text. Names of control tokens in it are these, as `tokenizers` has it, if it `parses`."""
        assert not add_special_tokens, "prompts have their special tokens in their texts"
        data = text.encode()
        size = len(data) + 16  # a token has a byte at least; some tokenizers put a blank before a text
        buffer = (ctypes.c_int32 * size)()
        count = int(api().llama_tokenize(self._vocab, data, len(data), buffer, size, False, parses))
        if count < 0:
            raise ValueError(f"a text of {len(data)} bytes has {-count} tokens")
        return list(buffer[:count])

    @cached_property
    def control(self) -> dict[str, tuple[int, int]]:
        """The control tokens, the unknown one among them, by name, with their attributes."""
        attributes = ((token, int(api().llama_vocab_get_attr(self._vocab, token))) for token in range(len(self)))
        found = ((token, bits) for token, bits in attributes if bits & (_UNKNOWN | _CONTROL))
        return {name: (token, bits) for token, bits in found if (name := self._text(token))}

    def piece(self, token: int) -> bytes:
        """The text of a token, as bytes."""
        return self._piece(token, True)

    def decode(self, tokens: Sequence[int] | int, skip_special_tokens: bool = False, **_: object) -> str:
        """The text of tokens; what is no whole character is U+FFFD."""
        listed = [tokens] if isinstance(tokens, int) else tokens
        pieces = (self._piece(int(token), not skip_special_tokens) for token in listed)
        return b"".join(pieces).decode(errors="replace")

    def _text(self, token: int) -> str:
        return str(api().llama_vocab_get_text(self._vocab, token).decode(errors="replace"))

    def _piece(self, token: int, shows_special: bool) -> bytes:
        if not 0 <= token < len(self):
            raise ValueError(f"token {token}: there are {len(self)}")
        size = _PIECE
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = int(api().llama_token_to_piece(self._vocab, token, buffer, size, 0, shows_special))
            if count >= 0:
                return buffer.raw[:count]
            size = -count


class GgufEncoder(Encoder):
    """Tokenizes texts as llama.cpp does: it reads what is between markers part by part, each like a text of its own."""

    tokenizer: Any

    @cached_property
    def control(self) -> Mapping[str, int]:
        return {name: token for name, (token, _) in self.tokenizer.control.items()}

    @cached_property
    def unknown(self) -> int | None:
        return next((token for token, bits in self.tokenizer.control.values() if bits & _UNKNOWN), None)

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        bos = self.tokenizer.bos_token_id
        return () if bos is None else (bos,)

    @cached_property
    def _normalizes(self) -> bool:
        return False

    def _parsed(self, text: str, has_offsets: bool) -> tuple[list[int], list[Span]]:
        ids = self.tokenizer.encode(text)
        return ids, self._offsets(text, ids) if has_offsets else []

    def _separated(self, text: str, own: Sequence[Span], has_offsets: bool) -> tuple[list[int], list[Span]]:
        ids, at, strips = list[int](), 0, False
        for start, end in (*own, (len(text), len(text))):
            token, bits = self.tokenizer.control.get(text[start:end], (None, 0))
            between = text[at:start].lstrip() if strips else text[at:start]
            ids += self.tokenizer.encode(between.rstrip() if bits & _LSTRIP else between, parses=False)
            ids += [] if token is None else [token]
            at, strips = end, bool(bits & _RSTRIP)
        return ids, self._offsets(text, ids) if has_offsets else []

    def _offsets(self, text: str, ids: Sequence[int]) -> list[Span]:
        """The characters [start, end) of each token.

        Raises:
            InputError: a tokenizer that changes the text, so that tokens have no place in it.
        """
        data, pieces = text.encode(), [self.tokenizer.piece(token) for token in ids]
        joined = b"".join(pieces)
        excess = len(joined) - len(data)  # a blank before the text
        if excess < 0 or joined[excess:] != data or joined[:excess].strip():
            raise InputError(
                "the tokenizer of this GGUF file changes the text, so it cannot be cut; omit --chunk-tokens"
            )
        characters = np.cumsum([0, *((byte & 0xC0) != 0x80 for byte in data)])  # that begin before each byte
        ends = np.clip(np.cumsum([len(piece) for piece in pieces]) - excess, 0, len(data))
        chars = characters[ends].tolist()
        return list(zip([0, *chars[:-1]], chars, strict=True))

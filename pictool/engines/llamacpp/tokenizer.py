"""The tokenizer in a GGUF file, as llama.cpp runs it, with what the other packages ask of a tokenizer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError

from pictool.engines.llamacpp.library import Weights, api
from pictool.errors import InputError
from pictool.runtime.chat.renderer import Renderer, TemplateFailure, TemplateRefusal

_PIECE = 256  # bytes of a token at first
_renderer = Renderer()


class GgufTokenizer:
    """Text to token ids and back. Special tokens in a text are read as such, as `tokenizers` do; none is added.

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

    def apply_chat_template(self, chat: Sequence[Mapping[str, Any]], **_: object) -> str:
        """The text of a chat up to where the answer begins. Raises TemplateError."""
        try:
            return _renderer.render(self.get_chat_template(), chat, self.special_tokens_map)
        except (TemplateRefusal, TemplateFailure) as error:
            raise TemplateError(str(error)) from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text."""
        assert not add_special_tokens, "prompts have their special tokens in their texts"
        data = text.encode()
        size = len(data) + 16  # a token has a byte at least; some tokenizers put a blank before a text
        buffer = (ctypes.c_int32 * size)()
        count = int(api().llama_tokenize(self._vocab, data, len(data), buffer, size, False, True))
        if count < 0:
            raise ValueError(f"a text of {len(data)} bytes has {-count} tokens")
        return list(buffer[:count])

    def __call__(self, text: str, **_: object) -> dict[str, Any]:
        """`input_ids`, and `offset_mapping`: the characters [start, end) of each token.

        Raises:
            InputError: a tokenizer that changes the text, so that tokens have no place in it.
        """
        ids, data = self.encode(text), text.encode()
        pieces = [self._piece(token, True) for token in ids]
        joined = b"".join(pieces)
        excess = len(joined) - len(data)  # a blank before the text
        if excess < 0 or joined[excess:] != data or joined[:excess].strip():
            raise InputError("the tokenizer of this GGUF file changes the text; it cannot be cut with --chunk-tokens")
        characters = np.cumsum([0, *((byte & 0xC0) != 0x80 for byte in data)])  # that begin before each byte
        ends = np.clip(np.cumsum([len(piece) for piece in pieces]) - excess, 0, len(data))
        chars = characters[ends].tolist()
        return {"input_ids": ids, "offset_mapping": list(zip([0, *chars[:-1]], chars, strict=True))}

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

"""Small tokenizers of the kinds that large models have, trained on the spot; each joins what its kind joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# The patterns by which GPT-4 and Llama 3 split a text, and Qwen 2, whose digits are single.
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIALS = ["<s>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _bpe(texts: Sequence[str], tokenizer: Tokenizer, alphabet: list[str], specials: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level(texts: Sequence[str], split: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    pattern = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pattern, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return _bpe(texts, tokenizer, pre_tokenizers.ByteLevel.alphabet(), SPECIALS)


def _sentencepiece_decoder() -> decoders.Decoder:
    """Llama 2's: a byte of a character that has no piece is a token, and the first space is no text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def _llama2(texts: Sequence[str]) -> Tokenizer:
    """▁ before the text, no split at all: pieces do not cross words because training never saw any that do."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
    tokenizer = _bpe(texts, tokenizer, [], SPECIALS + BYTES)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = _sentencepiece_decoder()
    return tokenizer


def _metaspace(texts: Sequence[str]) -> Tokenizer:
    """▁ before every part between special tokens, split at spaces."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.decoder = _sentencepiece_decoder()
    return _bpe(texts, tokenizer, [], SPECIALS + BYTES)


def _unigram(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=700, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _wordpiece(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=1000, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


KINDS: dict[str, Callable[[Sequence[str]], Tokenizer]] = {
    "gpt2": lambda texts: _byte_level(texts, None),
    "gpt4": lambda texts: _byte_level(texts, GPT4),
    "qwen": lambda texts: _byte_level(texts, QWEN),
    "llama2": _llama2,
    "metaspace": _metaspace,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}


@cache
def train(kind: str, texts: tuple[str, ...]) -> Tokenizer:
    """A tokenizer of this kind, that has seen these texts."""
    return KINDS[kind](texts)

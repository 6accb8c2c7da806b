"""Alignment of tokenizers by characters, over all pairs of kinds, against a naive reference."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pictool.compiler.align import TokenizedParts, map_scores, map_selection, tokenize
from pictool.core import PromptText
from pictool.errors import InputError
from pictool.runtime.model import embedded_path

# The tokenizer kinds

CORPUS = """The harbour was quiet.  It holds a festival in the spring;    nobody knows why. "Really?" she asked.
Numbers such as 1,024 or 3.14 stand here too, and words: naive strasse, tabs\tand\n\nlines.   hello  world cafe au  """
SPECIALS = ["<s>", "</s>", "[UNK]"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def train(backend: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    backend.train_from_iterator([CORPUS] * 4, trainer)
    return backend


def wrap(backend: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **names)


def rebuilt(backend: Tokenizer, change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    """The tokenizer with its description changed."""
    description = json.loads(backend.to_str())
    change(description)
    return Tokenizer.from_str(json.dumps(description))


def byte_level(
    prefix: bool = False, trim: bool = False, regex: bool = True, normalizer: normalizers.Normalizer | None = None
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    if normalizer:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIALS[:2],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=None if regex else 5,
        show_progress=False,
    )
    train(backend, trainer)
    backend.add_tokens(["      ", "\n\n\n", "tool"])  # as GPT-NeoX has them
    backend.post_processor = processors.ByteLevel(add_prefix_space=prefix, trim_offsets=trim)
    return wrap(backend)


def _with_byte_fallback(description: dict[str, Any]) -> None:
    added = description["added_tokens"]
    description["added_tokens"] = [entry for entry in added if entry["content"] not in BYTES]
    description["model"]["byte_fallback"] = True


def byte_fallback(
    pre_tokenizer: pre_tokenizers.PreTokenizer | None, normalizer: normalizers.Normalizer | None = None
) -> PreTrainedTokenizerFast:
    """SentencePiece BPE: what the vocabulary lacks becomes bytes, <0xE6> and so on."""
    backend = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=True))
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer:
        backend.normalizer = normalizer
    train(
        backend,
        trainers.BpeTrainer(vocab_size=640, special_tokens=SPECIALS + BYTES, max_token_length=7, show_progress=False),
    )
    return wrap(rebuilt(backend, _with_byte_fallback), unk_token="[UNK]")


def unigram() -> PreTrainedTokenizerFast:
    """SentencePiece Unigram as T5 has it: NFKC, runs of spaces collapsed, unknown characters fused."""
    backend = Tokenizer(models.Unigram())
    collapse = normalizers.Replace(Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), collapse])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIALS, unk_token="[UNK]", show_progress=False
    )  # fmt: skip
    return wrap(train(backend, trainer), unk_token="[UNK]")


def word_piece() -> PreTrainedTokenizerFast:
    pieces = 'hello world lines cafe au fest ##ival nobody ##s the . , " 1'.split()
    letters = [mark + letter for letter in "abcdefghiklnostuw" for mark in ("", "##")]
    vocabulary = {piece: i for i, piece in enumerate([*SPECIALS, *pieces, *letters])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(SPECIALS)
    return wrap(backend, unk_token="[UNK]")


def embedded(name: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(embedded_path(name))
    return tokenizer


LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "base": lambda: embedded("embedded"),
    "small": lambda: embedded("embedded-small"),
    "bytes": byte_level,
    "bytes-trimmed": lambda: byte_level(trim=True),
    "bytes-prefix": lambda: byte_level(prefix=True, trim=True),
    "bytes-long": lambda: byte_level(trim=True, regex=False),
    "bytes-nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "bytes-nfkd": lambda: byte_level(normalizer=normalizers.NFKD(), trim=True),
    "metaspace": lambda: byte_fallback(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace-first": lambda: byte_fallback(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "prepend": lambda: byte_fallback(None, LLAMA),
    "unigram": unigram,
    "wordpiece": word_piece,
}
PAIRS = list(itertools.product(KINDS, KINDS))
INSERTING = ("bytes-prefix", "metaspace", "metaspace-first", "prepend", "unigram")
all_pairs = pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{source}>{target}" for source, target in PAIRS])


@cache
def kind(name: str) -> PreTrainedTokenizerBase:
    return KINDS[name]()


def read(name: str, *texts: str) -> TokenizedParts:
    return tokenize(kind(name), written(texts))


def written(texts: Sequence[str]) -> list[PromptText]:
    """Texts in which special tokens are such."""
    return [PromptText(text) for text in texts]


def pieces_of(name: str, side: TokenizedParts) -> list[str]:
    pieces: list[str] = kind(name).convert_ids_to_tokens(side.tokens.tolist())
    return pieces


def shown(name: str, *texts: str) -> list[tuple[str, int, int]]:
    """Piece, start and end of every token."""
    side = read(name, *texts)
    return [(piece, *span) for piece, span in zip(pieces_of(name, side), side.spans.tolist(), strict=True)]


def aligned(source: str, target: str, text: str) -> dict[str, list[str]]:
    """For every source piece the target's pieces that it selects, each with its index."""
    source_side, target_side = read(source, text), read(target, text)
    names = pieces_of(target, target_side)
    result = {}
    for i, piece in enumerate(pieces_of(source, source_side)):
        rows = map_selection(np.arange(len(source_side.tokens)) == i, source_side, target_side)
        result[f"{i} {piece}"] = [names[j] for j in np.flatnonzero(rows)]
    return result


# The reference: sets of characters, token by token


def characters(side: TokenizedParts) -> list[set[int]]:
    return [set(range(start, end)) for start, end in side.spans.tolist()]


def naive_scores(scores: Sequence[float], source: TokenizedParts, target: TokenizedParts) -> list[float]:
    rows = list(zip(scores, characters(source), strict=True))
    return [max((score for score, here in rows if here & there), default=0.0) for there in characters(target)]


def naive_selection(selected: NDArray[np.bool_], source: TokenizedParts, target: TokenizedParts) -> list[bool]:
    rows = [here for here, is_selected in zip(characters(source), selected, strict=True) if is_selected]
    return [any(here & there for here in rows) for there in characters(target)]


# Texts

FRAGMENTS = [
    "hello", " world", "the harbour", "Café", "cafe\u0301 au", "Straße", "\u0301", "ﬁn", "½", "…", "ﷺ", "Å\u0301\u0323",
    "東京は", "한국", "שלום עולם", "مرحبا", "🙂", "👩\u200d👩\u200d👧", "a\u200bb", "\u00a0", "\u2003", "\u3000",
    "\x00", "\x85", "\ufeff", "\r\n", " ", "  ", "   ", "      ", "\n", "\n\n", "\n\n\n", "\t", " \n ",
    "tool", "1,024", ".", "Ġ", "▁", "##", "<0x41>",
]  # fmt: skip
NAMES = ["<s>", "</s>", "[UNK]", "<S>"]


def texts_of(fragments: list[str]) -> st.SearchStrategy[str]:
    any_text = st.text(st.characters(codec="utf-8"), max_size=8)
    return st.lists(st.sampled_from(fragments) | any_text, max_size=8).map("".join)


PLAIN = texts_of(FRAGMENTS).filter(lambda text: not any(name in text for name in NAMES))
PARTS = st.lists(texts_of(FRAGMENTS + NAMES), max_size=3)
many = settings(max_examples=100, deadline=None)


@st.composite
def selections(draw: st.DrawFn, size: int) -> NDArray[np.bool_]:
    return np.asarray(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)


# Properties


@many
@given(st.sampled_from(PAIRS), PARTS, st.data())
def test_as_the_naive_reference(pair: tuple[str, str], parts: list[str], data: st.DataObject) -> None:
    source, target = (read(name, *parts) for name in pair)
    selected = data.draw(selections(len(source.tokens)))
    scores = data.draw(st.lists(st.floats(-9, 9, width=32), min_size=len(selected), max_size=len(selected)))
    assert map_selection(selected, source, target).tolist() == naive_selection(selected, source, target)
    result = map_scores(np.asarray(scores, np.float32), source, target)
    assert result.dtype == np.float32
    assert result.tolist() == naive_scores(scores, source, target)


@many
@given(st.sampled_from(PAIRS), PARTS, st.data())
def test_the_targets_tokens_cover_what_is_selected(
    pair: tuple[str, str], parts: list[str], data: st.DataObject
) -> None:
    source, target = (read(name, *parts) for name in pair)
    selected = data.draw(selections(len(source.tokens)))
    rows = map_selection(selected, source, target)
    expected = set().union(*itertools.compress(characters(source), selected))
    covered = set().union(*itertools.compress(characters(target), rows))
    assert expected & set().union(*characters(target)) <= covered
    assert all(there & expected for there in itertools.compress(characters(target), rows))
    back = map_selection(rows, target, source)
    assert all(back[i] for i in np.flatnonzero(selected) if characters(source)[i] & covered)


@many
@given(st.sampled_from(PAIRS), PARTS, st.data())
def test_more_selected_is_never_less_mapped(pair: tuple[str, str], parts: list[str], data: st.DataObject) -> None:
    source, target = (read(name, *parts) for name in pair)
    fewer, more = data.draw(selections(len(source.tokens))), data.draw(selections(len(source.tokens)))
    rows, wider = (map_selection(selected, source, target) for selected in (fewer, fewer | more))
    assert (rows <= wider).all()
    assert not map_selection(np.zeros(len(fewer), bool), source, target).any()


@many
@given(st.sampled_from(PAIRS), st.lists(PLAIN, max_size=3))
def test_all_selected_is_all_mapped(pair: tuple[str, str], parts: list[str]) -> None:
    """But for the parts of which the source has no token at all, such as WordPiece of spaces."""
    source, target = (read(name, *parts) for name in pair)
    rows = map_selection(np.ones(len(source.tokens), bool), source, target)
    is_known = [len(read(pair[0], part).tokens) > 0 for part in parts]
    sizes = np.diff([*target.starts, len(target.tokens)])
    assert rows.tolist() == np.repeat(is_known, sizes).tolist()


@many
@given(st.sampled_from(list(KINDS)), PARTS)
def test_every_token_but_a_special_one_has_text(name: str, parts: list[str]) -> None:
    side = read(name, *parts)
    for piece, (start, end) in zip(pieces_of(name, side), side.spans.tolist(), strict=True):
        covered = "".join(parts)[start:end]
        assert 0 <= start <= end <= len("".join(parts))
        assert (covered == "") if piece in ("<s>", "</s>") else (covered != "" or piece == "[UNK]")


@many
@given(st.sampled_from(list(KINDS)), PARTS)
def test_parts_are_tokenized_on_their_own(name: str, parts: list[str]) -> None:
    side = read(name, *parts)
    alone = [kind(name).encode(part, add_special_tokens=False) for part in parts]
    assert side.tokens.dtype == np.int32 and side.tokens.tolist() == list(itertools.chain(*alone))
    assert side.starts == tuple(np.cumsum([0, *map(len, alone)])[:-1])
    before = np.cumsum([0, *map(len, parts)])
    for i, (start, end) in enumerate(itertools.pairwise([*side.starts, len(side.tokens)])):
        assert (side.spans[start:end] - before[i]).tolist() == read(name, parts[i]).spans.tolist()


@many
@given(st.sampled_from(list(KINDS)), PARTS, st.data())
def test_the_same_tokenizer_keeps_what_is_selected(name: str, parts: list[str], data: st.DataObject) -> None:
    side = read(name, *parts)
    selected = data.draw(selections(len(side.tokens)))
    rows = map_selection(selected, side, side)
    has_text = side.spans[:, 0] < side.spans[:, 1]
    assert (rows >= selected & has_text).all()
    assert not rows[~has_text].any()


@many
@given(st.sampled_from(list(KINDS)), st.lists(st.sampled_from(["hello", "world", "lines", "a"]), max_size=6), st.data())
def test_the_same_tokenizer_is_the_identity_on_words(name: str, words: list[str], data: st.DataObject) -> None:
    side = read(name, " ".join(words))
    own = (side.spans[1:, 0] >= side.spans[:-1, 1]).all()
    assert own or name in INSERTING  # a space, which shares a character
    if own:
        selected = data.draw(selections(len(side.tokens)))
        assert (map_selection(selected, side, side) == selected).all()


@settings(max_examples=200, deadline=None)
@given(st.booleans(), st.booleans(), st.booleans(), PARTS)
def test_trimmed_offsets_are_restored_to_what_they_were(
    prefix: bool, regex: bool, compose: bool, parts: list[str]
) -> None:
    trimmed, whole = (tokenize(twin(prefix, regex, compose, trim), written(parts)) for trim in (True, False))
    assert (trimmed.tokens == whole.tokens).all()
    assert trimmed.spans.tolist() == whole.spans.tolist()


@cache
def twin(prefix: bool, regex: bool, compose: bool, trim: bool) -> PreTrainedTokenizerFast:
    """Byte-level tokenizers that differ in `trim_offsets` only."""
    if not trim:
        return byte_level(prefix, False, regex, normalizers.NFC() if compose else None)
    backend = twin(prefix, regex, compose, False).backend_tokenizer
    return wrap(rebuilt(backend, lambda description: description["post_processor"].update(trim_offsets=True)))


# Cases by hand


def touching(side: TokenizedParts, start: int, end: int) -> NDArray[np.bool_]:
    """The tokens that have a character of [start, end)."""
    result: NDArray[np.bool_] = (side.spans[:, 0] < end) & (side.spans[:, 1] > start)
    return result


@all_pairs
def test_every_word_finds_its_tokens(source: str, target: str) -> None:
    text = "The festival nobody knows"
    source_side, target_side = read(source, text), read(target, text)
    for word in text.split():
        start, end = text.index(word), text.index(word) + len(word)
        rows = map_selection(touching(source_side, start, end), source_side, target_side)
        assert (rows >= touching(target_side, start, end)).all()
        if not {source, target} & {"bytes-long", "metaspace-first", "prepend"}:  # these have tokens across words
            assert (rows <= touching(target_side, start - 1, end + 1)).all()


@all_pairs
def test_a_character_in_pieces_is_selected_whole(source: str, target: str) -> None:
    for text in ("a東b", "a🙂b", "a\u20acb"):
        source_side, target_side = read(source, text), read(target, text)
        rows = map_selection(touching(source_side, 1, 2), source_side, target_side)
        assert rows.any() and (rows >= touching(target_side, 1, 2)).all()


@all_pairs
def test_special_tokens_never_align(source: str, target: str) -> None:
    source_side, target_side = read(source, "hello<s>world</s>"), read(target, "hello<s>world</s>")
    is_special = [
        np.isin(side.tokens, kind(name).all_special_ids)
        for side, name in ((source_side, source), (target_side, target))
    ]
    assert is_special[0].sum() == is_special[1].sum() == 2
    assert not map_selection(is_special[0], source_side, target_side).any()
    assert (map_selection(np.ones(len(source_side.tokens), bool), source_side, target_side) == ~is_special[1]).all()
    assert (map_scores(np.ones(len(source_side.tokens), np.float32), source_side, target_side) == ~is_special[1]).all()


def test_special_tokens_align_with_no_plain_ones_either() -> None:
    plain = tokenize(byte_level(), written(["hello<s>world"]))
    unnamed = rebuilt(byte_level().backend_tokenizer, lambda description: description["added_tokens"].clear())
    spelled = tokenize(PreTrainedTokenizerFast(tokenizer_object=unnamed), ["hello<s>world"])
    inside = (spelled.spans[:, 0] >= 5) & (spelled.spans[:, 1] <= 8)
    assert inside.sum() >= 1
    assert not map_selection(inside, spelled, plain).any()
    assert (map_selection(np.ones(len(plain.tokens), bool), plain, spelled) == ~inside).all()


def test_any_special_token_has_no_text() -> None:
    """Whether it has a role or not, and whatever the post-processor makes of its offsets."""
    backend = byte_level(trim=True).backend_tokenizer
    backend.add_special_tokens(["<tool>", " \n"])
    side = tokenize(wrap(backend), written(["a<tool>a \na"]))
    assert (side.spans[:, 0] == side.spans[:, 1]).tolist() == [False, True, False, True, False]
    backend = word_piece().backend_tokenizer  # it is matched once the text is normalized
    backend.add_special_tokens([AddedToken("<tool>", normalized=True)])
    assert tokenize(wrap(backend), written(["hello <tool> world"])).spans.tolist() == [[0, 6], [6, 6], [12, 18]]


def test_a_trimmed_space_is_not_shared_by_an_inserted_one() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate([*alphabet, "aĠ"])}, [("a", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    for trim in (False, True):
        backend.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=trim)
        assert tokenize(wrap(backend), ["a b"]).spans.tolist() == [[0, 1], [0, 2], [2, 3]]


def test_an_appended_token_shares_the_last_character() -> None:
    backend = byte_level(trim=True).backend_tokenizer
    backend.normalizer = normalizers.Replace(Regex("$"), " ")
    assert tokenize(wrap(backend), ["aa", "a", ""]).spans.tolist() == [[0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]


def test_byte_pieces_align_in_both_directions() -> None:
    names = ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert aligned("bytes", "small", "🙂a") == {
        "0 ð": names, "1 Ł": names, "2 Ļ": names, "3 Ĥ": names, "4 a": ["a"],
    }  # fmt: skip
    assert aligned("wordpiece", "small", "🙂 a") == {"0 [UNK]": names, "1 a": ["▁a"]}
    assert set(map(tuple, aligned("small", "wordpiece", "🙂").values())) == {("[UNK]",)}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # byte-level: the trimmed spaces come back, those of a token of only spaces too
        ("bytes-trimmed", "a    b", [("a", 0, 1), ("ĠĠĠ", 1, 4), ("Ġ", 4, 5), ("b", 5, 6)]),
        ("bytes-trimmed", "  hello", [("Ġ", 0, 1), ("Ġhello", 1, 7)]),
        ("bytes-trimmed", "a \n", [("a", 0, 1), ("Ġ", 1, 2), ("Ċ", 2, 3)]),
        ("bytes-trimmed", "a\n ", [("a", 0, 1), ("Ċ", 1, 2), ("Ġ", 2, 3)]),
        ("bytes-trimmed", "a\n\n\nb", [("a", 0, 1), ("\n\n\n", 1, 4), ("b", 4, 5)]),
        ("bytes-trimmed", "a      b", [("a", 0, 1), ("      ", 1, 7), ("b", 7, 8)]),
        # an inserted space is a part of its word, or shares the next character
        ("bytes-prefix", "hello", [("Ġhello", 0, 5)]),
        ("bytes-prefix", "\n", [("Ġ", 0, 1), ("Ċ", 0, 1)]),
        ("bytes-prefix", "  hello", [("Ġ", 0, 1), ("Ġhello", 1, 7)]),
        ("bytes-prefix", "a<s>world", [("Ġa", 0, 1), ("<s>", 1, 1), ("Ġworld", 4, 9)]),
        ("metaspace", "hello", [("▁hello", 0, 5)]),
        ("prepend", "\n\n", [("▁", 0, 1), ("\n\n", 0, 2)]),
        ("unigram", "\u00bc", [("▁", 0, 1), ("1", 0, 1), ("[UNK]", 0, 1), ("4", 0, 1)]),
        # SentencePiece collapses spaces; the token takes them all
        ("unigram", "a    b", [("▁a", 0, 1), ("▁", 1, 5), ("b", 5, 6)]),
        # composed characters keep their accents, all their pieces do
        ("bytes-nfc", "e\u0301 a", [("Ã", 0, 2), ("©", 0, 2), ("Ġa", 2, 4)]),
        ("bytes-nfc", "e\u0301", [("Ã", 0, 2), ("©", 0, 2)]),
        # compatibility characters become several: each of their tokens has the whole character
        ("bytes-nfkd", "ﬁ½", [("f", 0, 1), ("i", 0, 1), ("1", 1, 2), *((piece, 1, 2) for piece in "âģĦ"), ("2", 1, 2)]),
        ("bytes-nfkd", "\u00a8a", [("Ġ", 0, 1), ("Ì", 0, 1), ("Ī", 0, 1), ("a", 1, 2)]),
        # WordPiece drops whitespace, accents, controls
        ("wordpiece", "hello\n world", [("hello", 0, 5), ("world", 5, 12)]),
        ("wordpiece", "hello \n\t world  ", [("hello", 0, 5), ("world", 5, 16)]),
        ("wordpiece", "  HELLO", [("hello", 0, 7)]),
        ("wordpiece", "cafe\u0301 au", [("cafe", 0, 5), ("au", 5, 8)]),
        ("wordpiece", "café au", [("cafe", 0, 4), ("au", 4, 7)]),
        ("wordpiece", "\u0301a", [("a", 0, 2)]),
        ("wordpiece", "a\x00 \u200da", [("a", 0, 2), ("a", 2, 5)]),
        ("wordpiece", "東京 שלום", [("[UNK]", 0, 1), ("[UNK]", 1, 2), ("[UNK]", 2, 7)]),
        ("wordpiece", "a <s> a", [("a", 0, 2), ("<s>", 2, 2), ("a", 5, 7)]),
        ("wordpiece", "<s> </s>", [("<s>", 0, 0), ("</s>", 4, 4)]),
        # the unknown token stands for text, unless the text names it
        ("wordpiece", "[UNK] 🙂", [("[UNK]", 0, 0), ("[UNK]", 5, 7)]),
        ("unigram", "東 京", [("▁", 0, 1), ("[UNK]", 0, 1), ("▁", 1, 2), ("[UNK]", 2, 3)]),
        ("unigram", "[UNK]", [("[UNK]", 0, 0)]),
        # nothing to stand for
        ("wordpiece", "  ", []),
        *((name, "", []) for name in KINDS),
    ],
)
def test_spans(name: str, text: str, expected: list[tuple[str, int, int]]) -> None:
    assert shown(name, text) == expected


@all_pairs
def test_whitespace_is_never_lost(source: str, target: str) -> None:
    for space in (" ", "   ", "      ", "\n", "\n\n", " \n\t ", "\u00a0", "\u2003\u3000"):
        for text in (f"hello{space}world", f"{space}hello", f"hello{space}"):
            source_side, target_side = read(source, text), read(target, text)
            assert map_selection(np.ones(len(source_side.tokens), bool), source_side, target_side).all()


def test_scores_are_the_highest_of_those_that_overlap() -> None:
    source_side = TokenizedParts(np.arange(4, dtype=np.int32), np.asarray([[0, 2], [2, 3], [3, 3], [3, 6]]), (0,))
    target_side = TokenizedParts(
        np.arange(5, dtype=np.int32), np.asarray([[0, 1], [1, 4], [4, 4], [4, 6], [8, 9]]), (0,)
    )
    assert map_scores(np.asarray([1, 3, 9, 2], np.float32), source_side, target_side).tolist() == [1, 3, 0, 2, 0]
    assert map_scores(np.asarray([-1, -3, 9, -2], np.float32), source_side, target_side).tolist() == [-1, -1, 0, -2, 0]
    assert map_selection(np.asarray([False, True, True, False]), source_side, target_side).tolist() == [0, 1, 0, 0, 0]


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(InputError, match=r"^ByT5Tokenizer: "):
        tokenize(ByT5Tokenizer(), ["text"])

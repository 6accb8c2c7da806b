"""The two tokenizers: byte-level BPE (base), metaspace BPE with byte fallback, SentencePiece style (small)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.world.generate import BOOKS, World, question_text, write_prompt

SPECIALS = ["<s>", "</s>", "<pad>"]


def words(world: World) -> list[str]:
    """Every name of a world: its subjects, then the values of their attributes."""
    values = [attribute.values for kind in world.kinds for attribute in kind.attributes]
    return [name for kind in world.kinds for name in kind.subjects] + [
        word for some in values if not isinstance(some, str) for word in some
    ]


def corpus(world: World = BOOKS, prompts: int = 1500) -> Iterator[str]:
    """Texts of a world; every name often enough to become one token."""
    for word in words(world):
        yield from [f" {word}"] * 40
    for index in range(prompts):
        prompt = write_prompt(random.Random(f"tokenizer-{index}"), 6, world=world)
        yield from prompt.pages
        for question in prompt.questions:
            yield question_text(question.text)
            yield " " + question.answer


def byte_level(vocab: int, world: World = BOOKS) -> Tokenizer:
    """Byte-level BPE, as of GPT-2 and Llama 3: any text, no normalisation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus(world), trainer)
    return tokenizer


def metaspace(vocab: int, world: World = BOOKS) -> Tokenizer:
    """BPE over metaspace words with byte fallback, as of Llama 2 and Mistral."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<0x00>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\n|[.,:?]"), "isolated"), pre_tokenizers.Metaspace(prepend_scheme="never")
    ])  # fmt: skip
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[*SPECIALS, *bytes_], show_progress=False)
    tokenizer.train_from_iterator(corpus(world), trainer)
    return _with_plain_bytes(tokenizer)


def _with_plain_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer takes the byte tokens in as specials only; they are ordinary text."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))

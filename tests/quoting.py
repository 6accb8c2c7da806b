"""Texts with names of special tokens, for tokenizers of every kind: whatever they say, a prompt's control tokens are
those of its template. The tests call `problem_of`; `make fuzz` runs `quote`."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import small_tokenizers
import tiny
from transformers import LlamaConfig, PreTrainedTokenizerFast

from pictool.compiler.chunking import make_chunks
from pictool.core import Message
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, wrap_model
from pictool.serve.prompts.layout import lay_out, pieces_of
from pictool.serve.work import ChatPrompt, PlainText, TemplateDocument, Turn

MARKERS = ("<s>", "</s>", "<unk>")
LOSSLESS = ("gpt2", "gpt4", "qwen")  # kinds whose tokens give the text back
TEMPLATES = {
    "turns": "{{ bos_token }}{% if tools %}<s>{{ tools | tojson }}</s>{% endif %}{% for m in messages %}"
    "<s>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endfor %}<s>assistant\n",
    "thoughts": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}</s>{% endfor %}<s>",
    "parts": "{% for m in messages %}<s>{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
    "<s>",
    "json": "{% if documents %}<s>{{ documents | tojson }}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }} {{ m.content | tojson }}</s>{% endfor %}<s>",
    "none": "",
}
_WORDS = ("The fee", " is 41.", "\n", "\n\n", " ", "s>", "<", "</", "<s", "/s>", "unk", "</think>", '"', "\\", "é",
          "字", "🙂", "{{ m }}", "pic0n0e", "\t", "system\n", "Answer 52.")  # fmt: skip
_TRAINED = ("The fee is 41. The harbour was quiet; nobody knows why. system user assistant </think> Answer 52.\n" * 3,)


@cache
def model_of(kind: str, template: str) -> Model:
    """A model with a tokenizer of a kind of `small_tokenizers`, and a chat template; `none`: without one."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizers.train(kind, _TRAINED), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATES[template] or None
    return wrap_model(tiny.random_module(LlamaConfig(**tiny.SIZE | {"vocab_size": 1200})), tokenizer, kind)


def write_text(draw: random.Random) -> str:
    """A text with markers at random places."""
    parts = draw.choices((*_WORDS, *MARKERS), [*[2] * len(_WORDS), *[5] * len(MARKERS)], k=draw.randint(1, 14))
    return draw.choice(("", "x")) + "".join(parts) + draw.choice(("?", "?", *MARKERS))


def without_markers(text: str) -> str:
    """A text in which every marker is a word."""
    for marker in MARKERS:
        text = text.replace(marker, "word")
    return without_markers(text) if any(marker in text for marker in MARKERS) else text


def problem_of(kind: str, template: str, draw: random.Random) -> str | None:
    """What is wrong with how random texts become tokens; None if nothing is."""
    model, texts = model_of(kind, template), [write_text(draw) for _ in range(5)]
    plain = [without_markers(text) for text in texts]
    for text, bare in zip(texts, plain, strict=True):
        ids = model.encode(text)
        if controls(model, ids):
            return f"{text!r}: has control tokens {ids}"
        if kind in LOSSLESS and model.tokenizer.decode(ids) != text:
            return f"{text!r}: is {model.tokenizer.decode(ids)!r} of {ids}"
        if list(model.encode(bare)) != model.tokenizer.encode(bare, add_special_tokens=False):
            return f"{bare!r}: has other tokens than its tokenizer gives"
        chunks = make_chunks(model, text, "a", draw.randint(1, 9))
        if "".join(chunk.text for chunk in chunks) != text or any(controls(model, chunk.tokens) for chunk in chunks):
            return f"{text!r}: has control tokens in its pieces, or other text"
    lays = (chat_tokens,) if template in ("thoughts", "json") else (chat_tokens, frame_tokens)
    for lay in lays:  # these two change questions, so that they cannot be split there
        found, wanted = (controls(model, lay(model, listed)) for listed in (texts, plain))
        if found != wanted:
            return f"{texts!r}: control tokens {found} of a prompt, not {wanted}"
    return None


def controls(model: Model, ids: Sequence[int]) -> Counter[int]:
    """How often which control tokens are among some ids; what is unknown is none."""
    return Counter(token for token in ids if token in model.tokenizer.convert_tokens_to_ids(["<s>", "</s>"]))


def chat_tokens(model: Model, texts: Sequence[str]) -> list[int]:
    """A chat of a server, with a document, and a tool if the model knows some."""
    question, name, *earlier, document = texts
    turns: tuple[Turn, ...] = (
        Turn("user", (PlainText(earlier[0]),)),
        Turn("assistant", (PlainText(earlier[1]),), {"name": name}),
    )
    turns += (Turn("user", (PlainText(question[:4]), PlainText(question[4:]))),)
    tool = {"type": "function", "function": {"name": "f", "description": name, "parameters": {name: [name]}}}
    tools = (tool,) if model.tokenizer.chat_template else ()
    chat = ChatPrompt(turns, tools, (TemplateDocument(PlainText(document), {"title": name}),))
    ids: list[int] = lay_out(model, pieces_of(model, chat), _no_objects, None).tokens.tolist()
    return ids


def _no_objects(_: object) -> Any:
    raise AssertionError("there are none")


def frame_tokens(model: Model, texts: Sequence[str]) -> list[int]:
    """Head and tail of a question of `pic link`, or of a conversation."""
    question, head, *earlier, last = texts
    if model.tokenizer.chat_template:
        roles = zip(("user", "assistant", "user"), (*earlier, last), strict=True)
        frame = Spec(messages=tuple(Message(role, text) for role, text in roles), head=head).frame(model)
    else:
        frame = Spec(question, head=head).frame(model)
    return [*model.encode(frame.head), *model.encode(frame.tail)]


def quote() -> None:
    """Say what is wrong with some texts: a program of `make fuzz`."""
    parser = argparse.ArgumentParser()
    for name in ("kind", "template", "seed"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(sys.argv[2:])
    print(problem_of(options.kind, options.template, random.Random(options.seed)))

"""Splitters: the pieces are those of the real packages, and an edit changes only the chunks around it."""

from __future__ import annotations

import json
import random

import pytest
import tiny
from commands.conftest import save
from commands.run import pic, write
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core.node_parser import SentenceSplitter

from pictool.compiler.chunking import make_chunks
from pictool.compiler.splitters import make_splitter, split, splitters
from pictool.errors import InputError
from pictool.runtime.model import wrap_model
from training.world.generate import write_prompt

MODEL = wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())
TEXT = "\n\n".join(page for seed in range(4) for page in write_prompt(random.Random(seed), 12).pages)


def pieces(spec: str, text: str = TEXT) -> list[str]:
    return [chunk.text for chunk in split(MODEL, text, "a", make_splitter(spec))]


def test_langchain_s_own_splitter_gives_the_same_pieces() -> None:
    theirs = RecursiveCharacterTextSplitter(chunk_size=300, chunk_overlap=40).split_text(TEXT)
    assert pieces("langchain:size=300,overlap=40") == theirs and len(theirs) > 20


def test_llama_index_s_own_splitter_gives_the_same_pieces() -> None:
    theirs = SentenceSplitter(chunk_size=120, chunk_overlap=20, tokenizer=lambda text: list(MODEL.encode(text)))
    assert pieces("llama-index:size=120,overlap=20") == theirs.split_text(TEXT)


def test_content_chunks_join_to_the_text_and_keep_to_the_limit() -> None:
    for size in (16, 64, 300):
        found = list(make_splitter(f"content:size={size}").pieces(MODEL, TEXT))
        assert "".join(found) == TEXT and max(len(MODEL.encode(piece)) for piece in found) <= size
    assert "".join(pieces("content:size=64", "word " * 900)) == "word " * 900


def both(text: str) -> dict[str, list[str]]:
    at_tokens = [chunk.text for chunk in make_chunks(MODEL, text, "a", 64)]
    return {"content": pieces("content:size=128", text), "tokens": at_tokens}


def test_an_edit_changes_the_content_chunks_around_it_alone() -> None:
    """The same edits of one text, cut by content and at numbers of tokens: what would be compiled again."""
    rng, text = random.Random(2), TEXT
    known, total, again = {name: {*chunks} for name, chunks in both(text).items()}, 0, {"content": 0, "tokens": 0}
    for version in range(12):
        at = text.index(". ", rng.randrange(len(text) // 10, len(text) // 2)) + 2
        text = f"{text[:at]}Version {version} says more of it. {text[at:]}"
        total += len(text)
        for name, chunks in both(text).items():
            again[name] += sum(len(chunk) for chunk in chunks if chunk not in known[name])
            known[name] |= {*chunks}
    assert again["content"] < 0.05 * total < 0.25 * total < again["tokens"], (again, total)


def test_wrong_ones_are_named() -> None:
    assert [*splitters()] == ["content", "langchain", "llama-index"]
    for spec, named in {
        "nope": "'nope'", "content:sise=3": "content: 'sise=3'", "content:size=-3": "content: 'size=-3'",
        "content:size=3": "content: .*3", "langchain:size=1,overlap=5": "langchain",
        "llama-index:size=1,overlap=5": "llama-index",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=f"^splitter {named}"):
            pieces(spec)


def test_pic_compile_cuts_by_a_splitter_and_reads_lines_of_json(tmp_path: object) -> None:
    model = save(write("tiny/x", "").parent)
    write("a.txt", TEXT)
    after = ("--after", "text", "-m", model, "--json")
    report = pic("compile", "a.txt", "--splitter", "langchain:size=300,overlap=40", *after).json
    theirs = RecursiveCharacterTextSplitter(chunk_size=300, chunk_overlap=40).split_text(TEXT)
    write("chunks.jsonl", "".join(json.dumps({"text": text, "id": f"n{at}"}) + "\n" for at, text in enumerate(theirs)))
    lines = pic("compile", "chunks.jsonl", "--id-column", "id", *after).json
    assert [one["key"] for one in lines["objects"]] == [one["key"] for one in report["objects"]]
    assert not any(one["new"] for one in lines["objects"]) and lines["objects"][1]["source"] == "n1"
    write("bad.jsonl", '{"text": "a"}\n{"txt": 1}\n')
    assert "bad.jsonl#1: text must be a text" in pic("compile", "bad.jsonl", "-m", model).err
    for wrong in (("--splitter", "nope"), ("--splitter", "content", "--chunk-tokens", 5)):
        assert pic("compile", "a.txt", *wrong, "-m", model).code == 2

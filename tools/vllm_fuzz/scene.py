"""What the fuzzer's requests are about: tenants, documents in a store, and prompts that have some of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import tiny
import vllm_rig as rig

from pictool.api import compile
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import object_key
from pictool.core import Chunk, CompileOptions, PromptText
from pictool.recognition.matches import NamedObject, locate
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store

SALTS = ("", "the salt of alice", "bob-0123456789abcdef", "pic:looks-like-one-of-the-connector")  # "": of nobody
AFTER = ("none", "text")  # what documents are computed after
LENGTHS = (3, 9, 20, 33, 37, 48, 70, 110)  # of documents of random tokens; the shortest is not recognised
HEADS = ("", "<s>", "<s>You are a harbour.", "<s>" + tiny.TEXT[:150])
TAILS = (" Numbers?", " Numbers? She asked why.", tiny.TEXT + " Why?")
BETWEEN = ("", "", " and", "\n\n", " " + tiny.TEXT[20:60])
LAYOUTS = ("{}", "Context:\n{}\n\nWhy?", "<doc>{}</doc> Why?", '1. "{}"\nWhy?')  # of chats
NUM_PROMPTS = 72
TEMPLATE = "<s>user:", "assistant:"  # rig.set_chat_template


@dataclass(frozen=True)
class Document:
    """A document, and the tenants that have compiled it, in every way of `AFTER`."""

    chunk: Chunk
    salts: frozenset[str]


@dataclass(frozen=True)
class Place:
    """The tokens of a prompt from `start` on that are a document's from its token `offset` on."""

    start: int
    document: int
    offset: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the documents in them. `message` is a chat's, whose prompt this is."""

    tokens: tuple[int, ...]
    places: tuple[Place, ...]
    message: str | None = None


@dataclass(frozen=True)
class Scene:
    """A model, the store that is served, which faults may spoil, an unspoilt copy of it, documents and prompts."""

    world: rig.World
    unspoilt: Store
    documents: tuple[Document, ...]
    prompts: tuple[Prompt, ...]
    uncompiled: tuple[Chunk, ...]  # texts that requests compile

    @property
    def model(self) -> Model:
        """As the server has it, with its chat template: contexts begin as that does."""
        return of_salt(self.world.directory, "")

    def key(self, document: int, salt: str, after: str) -> str:
        """The key under which a tenant has a document, or would have it."""
        model = of_salt(self.world.directory, salt)
        return object_key(model, self.documents[document].chunk, CompileOptions(after=after))

    def keys(self) -> list[str]:
        """All keys of the store as it was made."""
        return self.unspoilt.keys()


def make_scene(directory: Path, seed: int = 0) -> Scene:
    """Make a scene below a directory. It is a function of the seed."""
    world = rig.make_world(directory, "llama")
    rig.set_chat_template(world)
    draw = random.Random(f"scene {seed}")
    chunks = [_random_chunk(world.model, draw, length) for length in LENGTHS] + rig.text_chunks(world.model)
    documents = tuple(
        Document(chunk, frozenset(salt for j, salt in enumerate(SALTS) if not j or (i + j) % 2))
        for i, chunk in enumerate(chunks)
    )
    for salt in SALTS:
        own = [document.chunk for document in documents if salt in document.salts]
        for after in AFTER:
            compile(of_salt(world.directory, salt), world.store, own, after=after)
    unspoilt = directory / "unspoilt"
    shutil.copytree(world.store.root / "objects", unspoilt / "objects")
    prompts = tuple(_make_prompt(world.model, chunks, draw) for _ in range(NUM_PROMPTS))
    uncompiled = tuple(make_chunk(world.model, f"Entry {i} of the log: {tiny.TEXT[i:50]}", "new") for i in range(8))
    return Scene(world, Store(unspoilt), documents, prompts, uncompiled)


@cache
def of_salt(directory: Path, salt: str) -> Model:
    """The model for a tenant."""
    return load_model(str(directory), "cpu", "float32", salt)


def _random_chunk(model: Model, draw: random.Random, length: int) -> Chunk:
    """Random tokens, of which those at the ends have a text that no blank is in."""
    solid = [token for token in range(3, tiny.VOCAB) if model.tokenizer.decode([token]).isalnum()]
    tokens = [draw.choice(solid), *(draw.randrange(3, tiny.VOCAB) for _ in range(length - 2)), draw.choice(solid)]
    return Chunk(f"chunk of {length}", tuple(tokens), "test")


def _make_prompt(model: Model, chunks: Sequence[Chunk], draw: random.Random) -> Prompt:
    if draw.random() < 0.3:
        return _make_chat(model, chunks, draw)
    tokens = [*model.encode(PromptText(draw.choice(HEADS)))]
    places = []
    for document in draw.sample(range(len(chunks)), draw.choice((0, 1, 2, 3, 4))):
        whole = list(chunks[document].tokens)
        cut = draw.random() < 0.1 and len(whole) > 20  # a document that is not whole is none
        part = whole[len(whole) // 2 :] if cut else whole
        if not cut:
            places.append(Place(len(tokens), document, 0, len(part)))
        tokens += [*part, *model.encode(draw.choice(BETWEEN))]
    tokens += model.encode(draw.choice(TAILS))
    return Prompt(tuple(tokens), tuple(places))


def _make_chat(model: Model, chunks: Sequence[Chunk], draw: random.Random) -> Prompt:
    """A message with texts of documents, whose first and last characters a tokenizer may join with others."""
    texts = [i for i, chunk in enumerate(chunks) if chunk.source != "test"]
    chosen = draw.sample(texts, draw.choice((1, 2, 3)))
    message = draw.choice(LAYOUTS).format("\n".join(chunks[i].text for i in chosen))
    tokens = model.encode(PromptText(message.join(TEMPLATE)))
    named = [NamedObject(str(i), np.asarray(chunks[i].tokens, dtype=np.int32)) for i in chosen]
    matches = locate(named, np.asarray(tokens, dtype=np.int32), lambda ids: str(model.tokenizer.decode(ids)))
    places = [Place(match.start, int(match.key), match.offset, len(match.tokens)) for match in matches]
    return Prompt(tokens, tuple(places), message)

"""The same documents and question have the same token ids on every route, however the documents end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from pictool.compiler.chunking import make_chunk
from pictool.conversation import Conversation
from pictool.core import PromptText, Text, TokenIds
from pictool.documents.library import LibraryReader
from pictool.engines.torch import TorchEngine
from pictool.engines.vllm.request import FIELD
from pictool.eval.cases import SpecOptions, group_cases
from pictool.eval.datasets.base import Case
from pictool.linker.policies import make_policy
from pictool.linker.resolve import lay_out_spec
from pictool.linker.spec import Spec
from pictool.runtime.model import Model
from pictool.serve.backends.upstream.engine import link_params
from pictool.serve.prompts import layout
from pictool.serve.prompts.requests import documents_of, turns_of
from pictool.serve.routes.link import _spec_of
from pictool.serve.schema import ChatMessage, DocumentText, LinkRequest
from pictool.serve.work import ChatPrompt, MarkedText, ObjectReference, Turn
from pictool.spans.operators.joins import Plus, Seq
from pictool.spans.operators.messages import Message
from pictool.spans.prompt import make_prompt
from pictool.store.leases import Lease, LeasedObject
from pictool.store.store import Store
from serve.live import DOCS, NAME, TEMPLATE, serving, tiny_model

QUESTION = "Who asked for the tabs of the harbour?"
ENDINGS = ("", "\n", "\n\n", ".\n\n\n")
Route = Callable[[Model, Sequence[str]], list[int]]


def linked(model: Model, spec: Spec) -> list[int]:
    with ExitStack() as opened:
        tokens: list[int] = lay_out_spec(model, Store(Path("store")), spec, opened).layout.tokens.tolist()
    return tokens


def link(model: Model, texts: Sequence[str]) -> list[int]:
    return linked(model, Spec(QUESTION, [Text(text) for text in texts]))


def link_of_files(model: Model, texts: Sequence[str]) -> list[int]:
    for number, text in enumerate(texts):
        Path(f"{number}.txt").write_text(text)
    return linked(model, Spec(QUESTION, [f"{number}.txt" for number in range(len(texts))]))


def link_of_objects(model: Model, texts: Sequence[str]) -> list[int]:
    done = TorchEngine(model, Store(Path("store"))).compile(texts)
    return linked(model, Spec(QUESTION, [each.key for each in done[:-1]] + [str(done[-1].path)]))


def link_by_server(model: Model, texts: Sequence[str]) -> list[int]:
    body = {"query": QUESTION, "documents": [{"text": text} for text in texts], "policy": {"algo": "naive"}}
    return linked(model, _spec_of(LinkRequest.model_validate(body)))


def evaluation(model: Model, texts: Sequence[str]) -> list[int]:
    (group,) = group_cases(model, [Case("1", tuple(texts), QUESTION, ("x",))], SpecOptions()).groups
    tokens = linked(model, group.cases[0].spec)
    assert len(tokens) == group.cases[0].num_tokens
    return tokens


def query(model: Model, texts: Sequence[str]) -> list[int]:
    spans = Plus(tuple(Message("user", text) for text in texts))
    prompt = make_prompt(model, Seq((spans, Message("user", QUESTION))))
    return linked(model, Spec.raw(prompt.documents, prompt.tail, make_policy("naive"), prompt.head))


def vllm(model: Model, texts: Sequence[str]) -> list[int]:
    """What the engine `vllm` prepares; its connector is told of objects alone."""
    with ExitStack() as opened:
        prompt = lay_out_spec(model, Store(Path("store")), Spec(QUESTION, [Text(text) for text in texts]), opened)
    laid_out = prompt.layout
    params = link_params(model, prompt.parts[1:], laid_out, make_policy("naive"))
    assert params is not None and len(params[FIELD]["chunks"]) == len(texts)
    return [int(token) for token in laid_out.tokens]


def served(model: Model, chat: ChatPrompt, texts: Sequence[str]) -> list[int]:
    """The ids of a chat; an object's key is the number of its text."""

    def open_object(piece: ObjectReference | MarkedText) -> tuple[str, TokenIds]:
        text = piece.text if isinstance(piece, MarkedText) else texts[int(piece.key)]
        return "", np.asarray(make_chunk(model, text, "text").tokens, dtype=np.int32)

    return [int(token) for token in layout.lay_out(model, layout.pieces_of(model, chat), open_object, None).tokens]


def chat_of(parts: Sequence[dict[str, object]], texts: Sequence[str], cache_ids: Sequence[str] = ()) -> ChatPrompt:
    content = [*parts, {"type": "text", "text": QUESTION}]
    message = ChatMessage.model_validate({"role": "user", "content": content})

    def find_cache(name: str, param: str) -> Lease:
        numbers = range(len(texts)) if name == "all" else [int(name)]
        return Lease(name, "t", "m", tuple(LeasedObject(str(number), 1) for number in numbers), 0.0, 1.0, 1.0)

    return ChatPrompt(turns_of([message], find_cache, lambda name: texts[int(name)], cache_ids))


def chat_documents(model: Model, texts: Sequence[str]) -> list[int]:
    documents = documents_of([DocumentText(text=text) for text in texts])
    return served(model, ChatPrompt(chat_of([], texts).turns, (), documents), texts)


def cache_parts(model: Model, texts: Sequence[str]) -> list[int]:
    parts: list[dict[str, object]] = [{"type": "cache", "cache_id": str(number)} for number in range(len(texts))]
    return served(model, chat_of(parts, texts), texts)


def one_cache(model: Model, texts: Sequence[str]) -> list[int]:
    return served(model, chat_of([], texts, ["all"]), texts)


def files(model: Model, texts: Sequence[str]) -> list[int]:
    parts: list[dict[str, object]] = [
        {"type": "file", "file": {"file_id": str(number)}} for number in range(len(texts))
    ]
    return served(model, chat_of(parts, texts), texts)


def document_parts(model: Model, texts: Sequence[str]) -> list[int]:
    return served(model, chat_of([{"type": "document", "text": text} for text in texts], texts), texts)


def marked_texts(model: Model, texts: Sequence[str]) -> list[int]:
    mark = {"type": "ephemeral"}
    return served(
        model, chat_of([{"type": "text", "text": text, "cache_control": mark} for text in texts], texts), texts
    )


ROUTES: dict[str, Route] = {
    route.__name__: route
    for route in (
        link_of_files, link_of_objects, link_by_server, evaluation, query, vllm, chat_documents, cache_parts, one_cache,
        files, document_parts, marked_texts,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    line = tiny_model()
    line.separator = "\n"
    return {"plain": tiny_model(), "chat": tiny_model(TEMPLATE), "line": line}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_has_the_ids_of_link(models: dict[str, Model], route: str) -> None:
    for model in models.values():
        for ending in ENDINGS:
            texts = [doc.rstrip("\n") + end for doc, end in zip(DOCS, ("", "\n", ending), strict=True)]
            assert ROUTES[route](model, texts) == link(model, texts), (model.name, ending)


def test_the_ids_are_those_of_the_texts_with_a_blank_line_between_them(models: dict[str, Model]) -> None:
    model, (first, second, _) = models["plain"], DOCS
    parts: list[str | PromptText] = [
        PromptText("<s>"),
        first.rstrip(),
        "\n\n",
        second,
        f"\nQuestion: {QUESTION}\nAnswer:",
    ]
    assert link(model, [first.rstrip(), second]) == [token for part in parts for token in model.encode(part)]
    chat = models["chat"]
    parts = [PromptText("<s>[user]"), first.rstrip(), "\n\n", second, f"\n{QUESTION}\n[assistant]"]
    assert link(chat, [first.rstrip(), second]) == [token for part in parts for token in chat.encode(part)]


def test_a_conversation_over_files_has_the_ids_of_link(models: dict[str, Model], tmp_path: Path) -> None:
    model, paths = models["plain"], [tmp_path / f"{number}.txt" for number in range(len(DOCS))]
    for path, text in zip(paths, DOCS, strict=True):
        path.write_text(text)
    with LibraryReader(model) as reader:
        talk = Conversation(TorchEngine(model, Store(tmp_path / "store")), reader.read(paths), Spec(max_new_tokens=1))
        reply = talk.ask(QUESTION)
    order = sorted(reply.sources, key=lambda found: found.at)
    assert len(order) > 1
    assert reply.answer.link.layout.tokens.tolist() == link(model, [found.passage.text for found in order])
    assert len(reply.report()["sources"]) == len(order)


def test_texts_beside_a_document_are_apart_and_pieces_of_one_text_are_not(models: dict[str, Model]) -> None:
    model, text = models["chat"], DOCS[0].rstrip()
    pieces = (ObjectReference("0"), ObjectReference("1", continues=True))
    texts = [text, ", and it is loud."]
    chat = ChatPrompt((Turn("user", (*turns_of([_user("Read:")], _no, _no)[0].pieces, *pieces)),))
    wanted: list[str | PromptText] = [PromptText("<s>[user]Read:\n\n"), *texts, "\n[assistant]"]
    assert served(model, chat, texts) == [token for part in wanted for token in model.encode(part)]


def _user(text: str) -> ChatMessage:
    return ChatMessage.model_validate({"role": "user", "content": text})


def _no(*names: str) -> NoReturn:
    raise AssertionError(names)


def test_documents_that_were_pasted_with_blank_lines_are_recognised(tmp_path: Path) -> None:
    model, texts = tiny_model(), [doc.rstrip() for doc in DOCS]
    with serving(model, Store(tmp_path / "objects")) as live:
        for text in texts:
            live.cache(text)
        live.backend.index.refresh()
        pasted = live.chat("\n\n".join([*texts, QUESTION]))
        documents = live.ok("POST", "/v1/chat/completions", json={
            "model": NAME, "temperature": 0, "max_tokens": 8, "documents": [{"text": text} for text in texts],
            "messages": [{"role": "user", "content": QUESTION}],
        })  # fmt: skip
    assert pasted["pic"]["chunks"] == documents["pic"]["chunks"] == len(texts)
    assert pasted["pic"]["source"] == "recognised"


def test_a_setting_of_the_server_holds_for_its_chats(models: dict[str, Model]) -> None:
    model = copy.copy(models["plain"])
    model.separator = ""
    assert chat_documents(model, DOCS) == linked(models["plain"], Spec(QUESTION, [*map(Text, DOCS)], separator=""))

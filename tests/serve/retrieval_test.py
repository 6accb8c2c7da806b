"""Documents that a chat names by a query: found among its tenant's own, linked, and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pictool.serve.tenants import Keys, Tenant
from pictool.store.folders import set_folder
from pictool.store.sources import Source, add_sources
from pictool.store.store import Store
from serve.live import DOCS, QUESTION, TEMPLATE, Live, serving, text_of, tiny_model

KEYS = Keys({"key-of-a": Tenant("a", "salt of a"), "key-of-b": Tenant("b", "salt of b"), "key-of-c": Tenant("c")})


def retrieved(live: Live, query: str, **more: Any) -> dict[str, Any]:
    got: dict[str, Any] = live.chat(QUESTION, documents={"query": query} | more, pic={"explain": True})
    return got


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_the_best_documents_are_linked_and_told(tmp_path: Path, template: str | None) -> None:
    with serving(tiny_model(template), Store(tmp_path / "store")) as live:
        for doc in DOCS:
            live.cache(doc)
        live.backend.index.refresh()
        got = retrieved(live, "Which numbers and words are in the Straße?", k=1)
        report = got["pic"]
        (document,) = report["retrieved"]
        (part,) = [part for part in report["parts"] if part["state"] == "linked"]
        assert DOCS[1].startswith(part["text"].strip()) and part["key"] == document["key"]
        assert (report["source"], part["reason"], report["chunks"]) == ("retrieved", "retrieved", 1)
        assert document["score"] > 0 and document["tokens"] == part["end"] - part["start"]
        assert document["source"] == "text"
        named = live.chat(QUESTION, documents=[{"text": DOCS[1] + " " * 64}], pic={"policy": "full"})
        assert named["pic"]["chunks"] == 0 and "retrieved" not in named["pic"]
        both = retrieved(live, "festival of the harbour", k=2)
        scores = [entry["score"] for entry in both["pic"]["retrieved"]]
        assert len(scores) == both["pic"]["chunks"] == 2 and scores == sorted(scores, reverse=True)
        exact = live.chat(QUESTION, documents={"query": "Straße", "k": 1}, pic=False)
        everything = live.chat(QUESTION, documents={"query": "Straße", "k": 1}, pic={"policy": "legolink:k=999"})
        assert (
            text_of(exact) == text_of(everything) and exact["usage"]["prompt_tokens"] == got["usage"]["prompt_tokens"]
        )


def test_a_new_document_is_found_and_a_removed_one_is_not(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path / "store")) as live:
        live.cache(DOCS[0])
        live.backend.index.refresh()
        assert len(retrieved(live, "harbour")["pic"]["retrieved"]) == 1
        live.cache(DOCS[2])
        live.backend.index.refresh()
        assert len(retrieved(live, "harbour")["pic"]["retrieved"]) == 2
        for key in live.store.keys():
            live.store.path(key).unlink()
        for _ in range(2):  # before and after the index notices
            error = live.error(400, "POST", "/v1/chat/completions", json=_body("harbour"))
            assert "no stored document" in error["message"]
            live.backend.index.refresh()


def _body(query: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "documents": {"query": query} | more
    }  # fmt: skip


def test_a_tenant_finds_its_own_documents_only(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path / "store"), KEYS, key="key-of-a") as live:
        live.cache(DOCS[0])
        live.backend.index.refresh()
        assert len(retrieved(live, "harbour")["pic"]["retrieved"]) == 1
        nothing = live.error(400, "POST", "/v1/chat/completions", json=_body("zebra"))
        for key in ("key-of-b", "key-of-c"):
            other = Live(live.url, live.backend, live.service, live.store, key)
            assert other.error(400, "POST", "/v1/chat/completions", json=_body("harbour")) == nothing
            other.client.close()


def test_folders_and_sources_are_those_of_the_store_without_a_salt(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path / "store"), KEYS, key="key-of-c") as live:
        for doc in DOCS:
            live.cache(doc)
        keys = {live.store.peek(key).text(): key for key in live.store.keys()}
        set_folder(live.store.root, "/srv/notes", "target", {keys[DOCS[2]]: "/srv/notes/two.txt"})
        add_sources(live.store.root, {keys[DOCS[2]]: Source("notes/two.txt, p. 3", "tiny")})
        live.backend.index.refresh()
        (found,) = retrieved(live, "harbour", folder="/srv/notes")["pic"]["retrieved"]
        assert found["key"] == keys[DOCS[2]][:12] and found["source"] == "notes/two.txt, p. 3"
        other = live.client_of("key-of-a")
        for client, folder in ((live.client, "/srv/other"), (other, "/srv/notes")):
            response = client.post("/v1/chat/completions", json=_body("harbour", folder=folder))
            assert response.status_code == 404 and response.json()["error"]["code"] == "folder_not_found"
        other.close()


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    model = tiny_model()
    with serving(model, Store(tmp_path / "store")) as live:
        live.cache(DOCS[0])
        live.cache("harbour festival " * 40)
        live.backend.index.refresh()
        found = live.chat(QUESTION, documents={"query": "harbour"}, max_tokens=model.max_positions // 2)
        assert [entry["tokens"] for entry in found["pic"]["retrieved"]] == [len(model.encode(DOCS[0]))]


@pytest.mark.parametrize("documents", [{}, {"query": ""}, {"query": "a", "k": 0}, {"query": "a", "path": "x"}])
def test_a_wrong_query_is_refused(live: Live, documents: dict[str, Any]) -> None:
    body = _body("x") | {"documents": documents}
    response = live.client.post("/v1/chat/completions", json=body)
    assert response.status_code in (400, 422) or documents == {}

"""What a server calls its model: the name of its folder or file. Requests may use the path, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny

from pictool.compiler.compile import compile_chunks
from pictool.linker.resolve import head_chunk
from pictool.runtime.chat.template import render_chat
from pictool.runtime.model import api_name, load_model
from pictool.serve.tenants import Tenant
from pictool.store.store import Store
from serve.live import QUESTION, TEMPLATE, serving, tiny_model

ASK: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": QUESTION}]}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"max_tokens": 1, "prompt": QUESTION},
    "/v1/messages": ASK,
    "/v1/responses": {"max_output_tokens": 1, "input": QUESTION},
    "/v1/caches": {"text": QUESTION * 20},
}


def test_folders_and_files_are_called_by_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "small.v1"
    folder.mkdir(parents=True)
    (folder / "tiny-q4.gguf").touch()
    (tmp_path / "embedded").mkdir()
    for name in (str(folder), "models/small.v1", "./models/small.v1/", "models/../models/small.v1"):
        assert api_name(name) == "small.v1"
    assert api_name("models/small.v1/tiny-q4.gguf") == "tiny-q4"
    for name in ("embedded", "owner/small", "ollama:small:1b", "in-memory"):
        assert api_name(name) == name


def test_every_dialect_takes_the_name_and_the_path(tmp_path: Path) -> None:
    path = tiny.save_model(tmp_path / "models" / "small", tiny.CONFIGS["llama"]())
    with serving(load_model(str(path)), Store(tmp_path / "store")) as live:
        assert live.ok("GET", "/v1/models")["data"][0]["id"] == "small"
        assert live.ok("GET", "/v1beta/models")["models"][0]["name"] == "models/small"
        assert live.ok("GET", f"/v1/models/{path}")["id"] == live.ok("GET", "/v1/models/small")["id"] == "small"
        for route, body in DIALECTS.items():
            for name in ("small", str(path)):
                assert live.ok("POST", route, json={"model": name, **body})["model"] == "small"
            assert live.client.post(route, json={"model": "other", **body}).status_code == 404
        gemini = {"contents": [{"role": "user", "parts": [{"text": QUESTION}]}]}
        answer = live.ok("POST", "/v1beta/models/small:generateContent", json=gemini)
        assert answer["modelVersion"] == "small"
        query = {"g": {"model": str(path), "max_tokens": 1, "input": {"user": QUESTION}}}
        assert httpx.post(f"{live.url}/v1/query/execute", json=query, timeout=60).status_code == 200


def test_the_head_of_a_prompt_is_not_a_document_of_it(tmp_path: Path) -> None:
    """`pic link` stores heads of prompts, too."""
    system = {"role": "system", "content": "You answer about harbours, festivals and numbers, in a few words. " * 3}
    messages = [system, {"role": "user", "content": QUESTION}]
    with serving(tiny_model(TEMPLATE), Store(tmp_path / "store")) as live:
        model = live.backend.engine_of(Tenant("default")).model
        whole = render_chat(model, messages)
        head = head_chunk(model, whole.cut(0, str(whole).index(QUESTION)))
        compile_chunks(model, live.store, [head])
        live.backend.index.refresh()
        assert len(live.backend.index.find(np.asarray(head.tokens))) == 1
        report = live.chat("", messages=messages)["pic"]
    assert (report["chunks"], report["linked_tokens"], report["source"]) == (0, 0, "none")
    assert report["reason"] == "no_object"

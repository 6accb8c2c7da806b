"""Replay: what is predicted of documents that are given as documents is what a server reports, to the token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from serve.live import DOCS, TEMPLATE, serving, tiny_model

from pictool.errors import InputError
from pictool.estimate.forms import Forms
from pictool.estimate.replay import ReplayServer, replay
from pictool.runtime.model import Model
from pictool.store.store import Store

SHORT = [{"type": "document", "text": text} for text in ("short", DOCS[0])]


@pytest.fixture(scope="module", params=[None, TEMPLATE], ids=["plain", "template"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(request.param)


def test_predictions_are_what_the_server_reports(model: Model, tmp_path: Path) -> None:
    marker = {"cache_control": {"type": "ephemeral"}}
    question = {"type": "text", "text": "Really?"}
    records = [
        {"messages": [{"role": "user", "content": [{"type": "document", "text": doc} for doc in docs] + [question]}]}
        for docs in (DOCS, DOCS[::-1])
    ]
    records += [
        {"messages": [{"role": "user", "content": "Really?"}], "documents": [{"text": DOCS[1]}, {"text": DOCS[0]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": DOCS[2], **marker}, question]}]},
        {"messages": [{"role": "user", "content": "no document"}]},
        {"messages": [{"role": "user", "content": [*SHORT, question]}]},
    ]  # fmt: skip
    prompts = (prompt for record in records for prompt in Forms().prompts(record))
    with serving(model, Store(tmp_path / "store")) as live:
        compared = list(replay(ReplayServer(live.url), prompts, model.encode, 10))
    assert len(compared) == 5
    assert [row.predicted for row in compared] == [row.reported for row in compared]
    assert compared[0].again == 0 and all(row.again == row.predicted > 0 for row in compared[1:])


def test_of_pasted_documents_what_the_tokenizer_leaves_of_their_edges_is_reported(model: Model, tmp_path: Path) -> None:
    draw = random.Random(3)
    documents = [" ".join(draw.choices("".join(DOCS).split(), k=30)) for _ in range(4)]
    records = []
    for _ in range(6):
        shown = draw.sample(documents, 3)
        pasted = "".join(f"\nDocument {number}:\n{text}\n" for number, text in enumerate(shown, 1))
        records.append({"messages": [{"role": "user", "content": f"Read.{pasted}\n---\nReally?"}]})
    prompts = [prompt for record in records for prompt in Forms().prompts(record)]
    with serving(model, Store(tmp_path / "store")) as live:
        compared = list(replay(ReplayServer(live.url), prompts, model.encode, 10))
    assert len(compared) == 6 and all(row.is_as_predicted for row in compared)
    assert [row.predicted - row.edges for row in compared] == [row.reported for row in compared]
    assert all(row.edges < 0.1 * row.predicted for row in compared) and compared[-1].again > 0


def test_what_is_no_server_is_told(tmp_path: Path) -> None:
    prompts = Forms().prompts({"prompt": f"<doc>{DOCS[0] * 20}</doc>"})
    with pytest.raises(InputError, match="no server answers"):
        list(replay(ReplayServer("http://127.0.0.1:9"), prompts, lambda text: [1], 1))
    with pytest.raises(InputError, match="no request of this log has documents"):
        list(replay(ReplayServer("http://127.0.0.1:9"), [], lambda text: [1], 1))

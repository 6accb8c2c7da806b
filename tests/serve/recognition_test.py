"""Documents in ordinary messages: found by content, whatever surrounds them; markers; the start-up check."""

from __future__ import annotations

from pathlib import Path

import pytest

from pictool.core import Sampling
from pictool.errors import InputError
from pictool.linker.grid import parse_policy
from pictool.runtime.model import Model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.engine_thread import EngineTask
from pictool.serve.check import check_linking
from pictool.serve.start import start_backend
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, MarkedText, PlainText, RawPrompt, StartEvent
from pictool.store.store import Store
from serve.live import DOCS, NAME, QUESTION, TEMPLATE, Live, serving, text_of, tiny_model

LONG = DOCS[0] + DOCS[1]


@pytest.fixture(scope="module")
def known(live: Live) -> Live:
    """A server that has all documents, and has read its store."""
    for doc in [*DOCS, LONG]:
        live.cache(doc)
    live.backend.index.refresh()
    return live


SURROUNDED = [
    "{doc}", "  \n{doc}\n\n  ", "Here:\n---\n{doc}---\n", "<doc>{doc}</doc>", '"""{doc}"""', "- {doc}", "({doc})",
    "Before it. {doc} After it.", "\t{doc}",
]  # fmt: skip


@pytest.mark.parametrize("form", SURROUNDED)
@pytest.mark.parametrize("is_stripped", [False, True])
def test_a_document_is_found_whatever_surrounds_it(known: Live, form: str, is_stripped: bool) -> None:
    doc = DOCS[1].strip() if is_stripped else DOCS[1]
    content = form.format(doc=doc) + "\n\n" + QUESTION
    got = known.chat(content, pic={"policy": "naive"})
    report, usage = got["pic"], got["usage"]
    assert (report["chunks"], report["source"]) == (1, "recognised")
    total = len(known.backend.engine_of(known.service.keys._default).model.encode(DOCS[1]))
    assert total - 8 <= report["linked_tokens"] <= total
    assert report["exact_tokens"] + report["linked_tokens"] + report["recomputed_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == report["linked_tokens"]
    everything = known.chat(content, pic={"policy": "legolink:k=999"})
    assert text_of(everything) == text_of(known.chat(content, pic=False)), "all rows recomputed is full"


def test_a_changed_document_is_not_found(known: Live) -> None:
    for text in (DOCS[1].replace("3.14", "3.15"), DOCS[1][:40], DOCS[1].upper()):
        assert known.chat(text + "\n\n" + QUESTION)["pic"]["source"] == "none"


def test_the_longest_documents_are_taken_and_many_are(known: Live) -> None:
    content = DOCS[2] + "And then:\n" + LONG + DOCS[2] + "\n" + QUESTION
    report = known.chat(content)["pic"]
    assert report["chunks"] == 3 and report["source"] == "recognised"


def test_recognition_and_caches_go_together_and_can_be_turned_off(known: Live) -> None:
    parts = [
        {"type": "text", "text": "Read " + DOCS[0]},
        {"type": "cache", "cache_id": known.cache(DOCS[2])},
        {"type": "text", "text": DOCS[1] + "\n\n" + QUESTION},
    ]
    both, named = known.chat(parts), known.chat(parts, pic={"recognise": False})
    assert (both["pic"]["chunks"], both["pic"]["source"]) == (3, "cache+recognised")
    assert (named["pic"]["chunks"], named["pic"]["source"]) == (1, "cache")
    assert both["usage"]["prompt_tokens"] == named["usage"]["prompt_tokens"], "the prompt is the same"
    exact = known.chat(parts, pic=False)
    assert exact["usage"]["prompt_tokens"] == both["usage"]["prompt_tokens"]


def test_documents_are_found_in_completions_and_token_ids(known: Live, model: Model) -> None:
    prompt = "Text: " + DOCS[1] + "Answer:"
    body = {"model": NAME, "temperature": 0, "max_tokens": 4}
    for form in (prompt, list(model.encode(prompt))):
        got = known.ok("POST", "/v1/completions", json=body | {"prompt": form})
        assert got["pic"]["source"] == "recognised"


@pytest.mark.parametrize("marker", [{"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": True}])
def test_markers_are_borders_of_chunks(live: Live, marker: dict[str, object]) -> None:
    texts = [doc + f"Marked {len(marker)} {next(iter(marker))}." for doc in DOCS]
    parts: list[dict[str, object]] = [{"type": "text", "text": text} for text in texts]
    parts[0] |= marker
    parts[2] |= marker  # with the one before it: one chunk
    content = [*parts, {"type": "text", "text": QUESTION}]
    got = live.chat(content, pic={"recognise": False})
    assert (got["pic"]["chunks"], got["pic"]["source"]) == (2, "marker")
    again = live.chat(content, pic={"recognise": False})
    written, rewritten = (answer["usage"]["prompt_tokens_details"].pop("cache_write_tokens") for answer in (got, again))
    assert written > 100 and rewritten == 0
    assert again["choices"] == got["choices"] and again["usage"] == got["usage"]
    short = [{"type": "text", "text": "Hi."} | marker, {"type": "text", "text": QUESTION}]
    assert live.chat(short)["pic"]["chunks"] == 0


def test_marked_texts_are_compiled_a_step_each_so_that_others_come_between(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pictool.serve.backends.torch.engine_thread.QUANTUM_S", float("inf"))  # no step within one
    texts = tuple(MarkedText(f"{doc}It is marked, and it is new.") for doc in DOCS)
    sent, engine = list[object](), live.backend.engine_of(Tenant("default"))
    work = AnswerRequest(Tenant("default"), RawPrompt((*texts, PlainText(QUESTION))), Sampling(0.0), 2)
    task = EngineTask("default", lambda _: live.backend._answer(work, engine, sent.append), lambda _: None)
    before, sizes = set(live.store.keys()), []
    while not sent:
        task.advance()
        sizes.append(len(set(live.store.keys()) - before))
    assert sizes == [1, 2, 3, 3] and isinstance(sent[0], StartEvent) and sent[0].reuse.chunks == 3


def test_with_a_chat_template_markers_stand_in_system_text_too(tmp_path: Path) -> None:
    with serving(tiny_model(TEMPLATE), Store(tmp_path / "objects")) as live:
        marked = {"type": "text", "text": DOCS[0], "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        messages = [{"role": "system", "content": [marked]}, {"role": "user", "content": QUESTION}]
        first, second = (live.chat(None, messages=messages)["pic"] for _ in range(2))
        assert first == second and (first["chunks"], first["source"]) == (1, "marker")
        messages[0] = {"role": "system", "content": DOCS[0]}
        live.backend.index.refresh()
        assert live.chat(None, messages=messages)["pic"]["source"] == "recognised"


# The start-up check


def test_the_check_is_zero_for_exact_policies_and_not_for_blind_reuse(model: Model) -> None:
    exact, naive = (check_linking(model, parse_policy(name), "none") for name in ("legolink:k=999", "naive"))
    assert exact.nats == pytest.approx(0, abs=1e-6) and exact.share < 1e-3
    assert naive.nats > 1e-6 and naive.share == 1


def test_a_model_that_links_badly_is_answered_exactly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pictool.fidelity.divergence.FEW_NATS", 0.0)
    said: list[str] = []
    settings = BackendSettings(parse_policy("naive"), refresh_s=3600, after="none")
    with start_backend(tiny_model(), Store(tmp_path / "objects"), settings, 0.5, warn=said.append) as backend:
        status = backend.status()
        assert status.policy == "full" and status.problem and status.divergence["naive"] > 0
    assert "answered exactly" in said[0]
    with pytest.raises(InputError, match=r"nats.*--algo"):
        start_backend(tiny_model(), Store(tmp_path / "objects"), settings, 0.5, refuses=True)
    with start_backend(tiny_model(), Store(tmp_path / "objects"), settings, 2) as backend:
        assert backend.status().policy == "naive" and backend.status().problem is None
    assert not list(tmp_path.glob("objects/*")), "the check has a store of its own"


def test_health_and_metrics_have_the_figure(live: Live) -> None:
    live.backend.divergence = {"legolink-4": 0.25}
    try:
        assert live.ok("GET", "/health")["divergence_nats"] == {"legolink-4": 0.25}
        assert 'pic_divergence_nats{policy="legolink-4"} 0.25' in live.client.get("/metrics").text
    finally:
        live.backend.divergence = {}


DOCUMENTS = "{% for d in documents or [] %}<doc {{ d.title }}>{{ d.text }}</doc>{% endfor %}"


@pytest.mark.parametrize("template", [None, TEMPLATE, DOCUMENTS + TEMPLATE], ids=["plain", "messages", "documents"])
def test_documents_beside_messages_have_exact_borders(tmp_path: Path, template: str | None) -> None:
    """A template that prints documents does; with others they come before the text of the last user's message."""
    texts = [doc.strip() * 2 for doc in DOCS]
    with serving(tiny_model(template), Store(tmp_path / "store")) as live:
        got = live.chat("\n" + QUESTION, documents=[{"title": "it", "text": text} for text in texts])
        model = live.backend.engine_of(live.service.keys._default).model
        report = got["pic"]
        assert (report["chunks"], report["source"]) == (len(texts), "marker")
        total = sum(len(model.encode(text)) for text in texts)
        assert report["linked_tokens"] + report["recomputed_tokens"] == total
        parts = [{"type": "document", "text": texts[0]}, {"type": "document", "source": {"data": texts[1]}}]
        again = live.chat([*parts, {"type": "text", "text": "\n" + QUESTION}])["pic"]
        assert (again["chunks"], again["source"]) == (2, "marker")
        assert live.error(400, "POST", "/v1/chat/completions", json={
            "model": NAME, "messages": [{"role": "user", "content": [{"type": "document"}]}]
        })["param"] == "messages"  # fmt: skip

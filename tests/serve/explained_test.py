"""What became of each part of a prompt, and why: `pic: {"explain": true}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pictool.serve.tenants import Keys, Tenant
from pictool.serve.work import REASONS
from pictool.store.store import Store
from serve.live import DOCS, QUESTION, Live, serving, tiny_model

KEYS = Keys({"key-a": Tenant("a", "salt of a"), "key-b": Tenant("b", "salt of b")})


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tiny_model(), Store(tmp_path / "objects")) as live:
        yield live


def test_a_response_says_why_nothing_was_reused(live: Live) -> None:
    got = live.chat("A text that nobody has stored. " * 4, pic={"policy": "legolink-4"})["pic"]
    assert (got["linked_tokens"], got["reason"], got["hint"]) == (0, "no_object", REASONS["no_object"])
    reused = live.chat(marked(DOCS[0], DOCS[1]), pic={"policy": "legolink-4"})["pic"]
    assert reused["linked_tokens"] and "reason" not in reused


def explained(live: Live, content: object, **pic: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The parts of a prompt, which are all of it, and agree with what else is reported."""
    got = live.chat(content, pic={"explain": True, "policy": "legolink-4", **pic})
    parts, report = got["pic"]["parts"], got["pic"]
    assert [part["start"] for part in parts] == [0, *(part["end"] for part in parts[:-1])]
    assert parts[-1]["end"] == got["usage"]["prompt_tokens"]
    linked = [part for part in parts if part["state"] == "linked"]
    assert len(linked) == report["chunks"]
    recomputed = sum(part["recomputed_tokens"] for part in linked)
    assert report["recomputed_tokens"] <= recomputed <= report["recomputed_tokens"] + len(linked)
    assert sum(part["end"] - part["start"] for part in linked) == report["linked_tokens"] + report["recomputed_tokens"]
    assert {part["reason"] for part in parts if part["state"] == "computed"} <= REASONS.keys()
    return parts, report


def reasons(parts: list[dict[str, Any]]) -> list[str]:
    return [part["reason"] for part in parts]


def marked(*texts: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]
    return [*parts, {"type": "text", "text": QUESTION}]


def test_parts_are_told_only_if_they_are_asked_for(live: Live) -> None:
    assert "parts" not in live.chat(QUESTION)["pic"]


def test_a_marked_text_is_compiled_once_and_then_recognised(live: Live) -> None:
    first, _ = explained(live, marked(DOCS[0], DOCS[1]))
    assert reasons(first) == ["too_short", "marker", "too_short", "marker", "no_object"]  # with a separator
    assert [part["compiled"] for part in first if part["state"] == "linked"] == [True, True]
    assert first[1]["text"] and DOCS[0].startswith(first[1]["text"])
    again, _ = explained(live, marked(DOCS[1], DOCS[0]))
    assert [part["compiled"] for part in again if part["state"] == "linked"] == [False, False]
    assert [part["key"] for part in again[1:4:2]] == [part["key"] for part in (first[3], first[1])]
    live.backend.index.refresh()
    pasted, _ = explained(live, f"{DOCS[0]}\n\n{QUESTION}")
    assert "recognised" in reasons(pasted)
    off, _ = explained(live, f"{DOCS[0]}\n\n{QUESTION}", recognise=False)
    assert reasons(off) == ["not_searched"]


def test_unknown_texts_exact_policies_and_caches(live: Live) -> None:
    unknown, _ = explained(live, f"{DOCS[2]}\n\n{QUESTION}")
    assert reasons(unknown) == ["no_object"]
    exact, _ = explained(live, f"{DOCS[2]}\n\n{QUESTION}", policy="full")
    assert reasons(exact) == ["policy"]
    cache = live.cache(DOCS[2])
    named, _ = explained(live, [{"type": "cache", "cache_id": cache}, {"type": "text", "text": QUESTION}])
    assert "cache" in reasons(named)


def test_a_store_without_room_is_named(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path, 1)) as live:
        parts, report = explained(live, marked(DOCS[0]))
    assert "not_stored" in reasons(parts) and report["problem"] is not None


def test_another_tenant_s_document_is_not_told_of(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path / "objects"), KEYS, key="key-a") as live:
        explained(live, marked(DOCS[0]))
        live.backend.index.refresh()
        other = Live(live.url, live.backend, live.service, live.store, "key-b")
        parts, _ = explained(other, f"{DOCS[0]}\n\n{QUESTION}")
        other.client.close()
    assert reasons(parts) == ["no_object"]


def test_tokens_are_counted_by_reason(live: Live) -> None:
    total = live.chat(marked(DOCS[0]), pic={"policy": "legolink-4"})["usage"]["prompt_tokens"]
    found = {
        (sample.labels["reason"], sample.labels["state"]): sample.value
        for family in text_string_to_metric_families(live.client.get("/metrics").text)
        for sample in family.samples
        if sample.name == "pic_part_tokens_total"
    }
    assert math.isclose(sum(found.values()), total) and {state for _, state in found} == {"linked", "computed"}


def test_a_line_of_the_log_tells_what_became_of_a_prompt(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Its parts, the largest first."""
    with caplog.at_level(logging.INFO, "pictool.serve"):
        total = live.chat(marked(DOCS[1]), pic={"policy": "legolink-4"})["usage"]["prompt_tokens"]
    (line,) = [record.getMessage() for record in caplog.records if "a request of default" in record.getMessage()]
    sizes, whats = zip(*(part.split(" ", 1) for part in line.rpartition(": ")[2].split(", ")), strict=True)
    assert sorted(map(int, sizes), reverse=True) == [*map(int, sizes)] and sum(map(int, sizes)) == total
    assert whats[0] == "linked (marker)"

"""The log that `pic serve` writes: no text, keys for their owner, bounds, a full disk; and that it is read back."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import tiny
from serve.live import NAME, TEMPLATE, serving, text_of, tiny_model, until
from transformers import LlamaConfig

from pictool.errors import InputError
from pictool.estimate.bodies import FormError
from pictool.estimate.forms import Forms
from pictool.estimate.measure import Measure
from pictool.estimate.readers import LogReader
from pictool.estimate.request_log import Named, Request, RequestLog
from pictool.estimate.segments import Segment
from pictool.linker.grid import parse_policy
from pictool.runtime.model import Model, wrap_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store

DOCUMENTS = [" ".join(f"{name}{number}" for number in range(300)) for name in ("harbour", "festival", "river")]
KEYS = Keys({"key-of-a": Tenant("a", "salt of a"), "key-of-b": Tenant("b", "salt of b")})


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def request(*texts: str, tenant: str = "a") -> Request:
    segments = tuple(Segment("user", text) for text in texts)
    return Request(1.7e9, tenant, segments, 10, 0, 0.5)


def measured(path: Path) -> Measure:
    measure = Measure()
    for prompt in LogReader().read([str(path)]):
        measure.add(prompt)
    measure.finish()
    return measure


def test_a_server_s_log_tells_what_its_requests_repeat(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log, documents = RequestLog(path, 1 << 20, print), [document[:160] for document in DOCUMENTS]
    with serving(model, Store(tmp_path / "store"), KEYS, key="key-of-a", request_log=log) as live:
        cache = live.cache(documents[2])
        for order in ([0, 1], [1, 0]):
            parts = [{"type": "document", "text": documents[i]} for i in order]
            live.chat([*parts, {"type": "cache", "cache_id": cache}, {"type": "text", "text": "Which?"}])
        with live.client_of("key-of-b") as other:
            assert other.post("/v1/completions", json={"model": NAME, "prompt": documents[0]}).status_code == 200
    log.close()
    text = path.read_text()
    assert len(text.splitlines()) == 3 and "harbour" not in text and "Which" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(f"{path}.keys").stat().st_mode) == 0o600
    assert len(set(json.loads(Path(f"{path}.keys").read_text()).values())) == 2
    measure = measured(path)
    totals = measure.finish()
    second = json.loads(text.splitlines()[1])
    again = sum(len(documents[i]) for i in range(2)) + second["segments"][-2][2][0][1]
    per_byte = second["tokens"] / sum(length for _, _, blocks in second["segments"] for _, length in blocks)
    assert abs(totals.tokens.linked + totals.tokens.prefix - again * per_byte) <= 16  # in the server's own tokens
    assert totals.tenants["b"].linked == 0


def test_the_estimate_of_its_log_is_what_the_server_counts(tmp_path: Path) -> None:
    """A history that grows, is edited and grows on. The log has no answers, and cuts where content does; the server
    keeps whole blocks, and has a text as an object once two requests had it."""
    rng, path, words = random.Random(0), tmp_path / "requests.jsonl", tiny.TEXT.split()
    model = tiny_model(TEMPLATE)
    model = wrap_model(
        tiny.random_module(LlamaConfig(**tiny.SIZE | {"max_position_embeddings": 4096})), model.tokenizer, NAME
    )  # fmt: skip
    log = RequestLog(path, 1 << 20, print)
    settings = BackendSettings(parse_policy("legolink-4"), refresh_s=3600, pool_bytes=None, learned_bytes=1 << 30)
    messages: list[dict[str, str]] = [{"role": "system", "content": " ".join(rng.choices(words, k=60))}]
    reports = list[dict[str, Any]]()
    with serving(model, Store(tmp_path / "store"), settings=settings, request_log=log) as live:
        for turn in range(8):
            messages.append({"role": "user", "content": " ".join(rng.choices(words, k=30))})
            if turn == 5:
                messages[0] = {"role": "system", "content": " ".join(rng.choices(words, k=20))}
            answer = live.chat("", messages=messages, pic={"explain": True})
            reports.append(answer["pic"] | {"prompt": answer["usage"]["prompt_tokens"]})
            until(lambda: live.backend.status().active == live.backend.status().waiting == 0)
            live.backend.index.refresh()
            messages.append({"role": "assistant", "content": text_of(answer)})
        text = live.service.metrics.text().decode()
        counted = dict(re.findall(r'^pic_tokens_total{kind="(\w+)"} (\S+)$', text, re.MULTILINE))
    log.close()
    measure = measured(path)
    rows = [[*measure.series[at + 1 : at + 4]] for at in range(0, len(measure.series), 4)]  # tokens, prefix, linked
    edge = 16 + 8 + 8  # a block, an answer, what templates write around it
    for turn, (own, (total, prefix, linked)) in enumerate(zip(reports, rows, strict=True)):
        assert abs(own["prompt"] - total) <= 3
        served, moved = own["prefix_tokens"], own["linked_tokens"] + own["recomputed_tokens"]
        ends = 16 * own["chunks"]  # of blocks in which a linked text begins or ends
        if turn < 5:
            assert abs(served - prefix) <= edge and moved == own["moved_tokens"] == linked == 0
        elif turn == 5:  # the last message that was repeated is not an object yet
            assert served <= prefix + edge and 100 < moved <= linked + edge and linked - moved < 160
        else:
            assert abs(served + moved - prefix - linked) <= edge + ends
        found = [part["end"] - part["start"] for part in own["parts"] if part["state"] == "prefix"]
        assert sum(found) == served and own["moved_tokens"] == own["linked_tokens"]
    for kind in ("prefix", "moved", "linked"):
        assert float(counted[kind]) == sum(own[f"{kind}_tokens"] for own in reports)


def test_hashes_differ_by_tenant_and_by_log(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        log = RequestLog(tmp_path / name, 1 << 20, print)
        log.add(request(DOCUMENTS[0]))
        log.add(request(DOCUMENTS[0], tenant="b"))
        log.close()
    lines = [line for name in ("a.jsonl", "b.jsonl") for line in (tmp_path / name).read_text().splitlines()]
    first = [json.loads(line)["segments"][0][2][0][0] for line in lines]
    assert len(set(first)) == 4


def test_a_log_goes_on_with_its_keys_and_is_rotated_within_its_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(3):
        log = RequestLog(path, 64 << 10, print)
        for _ in range(60):
            log.add(request(*DOCUMENTS))
        log.close()
    old = Path(f"{path}.1")
    assert old.exists() and path.stat().st_size + old.stat().st_size <= 64 << 10
    names = {json.dumps(json.loads(line)["segments"]) for part in (path, old) for line in part.read_text().splitlines()}
    assert len(names) == 1


def test_a_full_disk_ends_the_log_and_not_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    path = tmp_path / "log"
    log = RequestLog(path, 1 << 20, warned.append)
    log.add(request(DOCUMENTS[0]))
    log._thread.submit(lambda: None).result()
    whole, write = path.read_bytes(), os.write

    def full(file: int, data: bytes) -> int:
        write(file, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        log.add(request(DOCUMENTS[1]))
    log.close()
    assert len(warned) == 1 and "No space left" in warned[0] and path.read_bytes() == whole


@pytest.mark.parametrize(("content", "mode"), [("{}", 0o644), ("[]", 0o600), ('{"a": "00"}', 0o600)])
def test_keys_that_cannot_be_used_are_refused(tmp_path: Path, content: str, mode: int) -> None:
    keys = tmp_path / "log.keys"
    keys.write_text(content)
    keys.chmod(mode)
    with pytest.raises(InputError, match=f"^{keys}: "):
        RequestLog(tmp_path / "log", 1 << 20, print)


@pytest.mark.parametrize("name", ["log", "log.1"])
def test_a_file_of_somebody_else_is_neither_appended_to_nor_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("My notes.")
    with pytest.raises(InputError, match=f"^--request-log {tmp_path / 'log'}"):
        RequestLog(tmp_path / "log", 1 << 20, print)
    assert (tmp_path / name).read_text() == "My notes."


def test_a_pipe_is_no_log_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(InputError, match=f"^--request-log {tmp_path / 'log'}: "):
        RequestLog(tmp_path / "log", 1 << 20, print)


def test_an_object_is_named_by_its_hash_and_its_tokens(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", 1 << 20, print)
    log.add(Request(1.0, "a", (Named("f" * 64, 100),), 100, 100, 0.1))
    log.close()
    (segment,) = json.loads((tmp_path / "log").read_text())["segments"]
    assert segment[0] == "document" and segment[2][0][1] == 400 and "ffff" not in segment[2][0][0]


def test_a_segment_of_no_known_kind_is_told_and_not_counted(tmp_path: Path) -> None:
    record = {"pic_request": 1, "segments": [["odd", False, [["ff", 4]]]]}
    with pytest.raises(FormError, match="'odd'"):
        Forms().prompts(record)


@pytest.mark.filterwarnings("error")
def test_tokens_that_no_prompt_has_are_an_error() -> None:
    record = {"pic_request": 1, "tokens": 1e30, "segments": [["document", False, [["ff", 4]]]]}
    with pytest.raises(FormError, match=r"1e\+30"):
        Forms().prompts(record)


def test_a_pipe_that_nobody_writes_to_is_at_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(InputError, match="log: "):
        list(LogReader().read([str(tmp_path / "log")]))


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"prompt": "Who knows why?"}\n')
    os.close(writing)
    assert len(list(LogReader().read([f"/dev/fd/{reading}"]))) == 1
    os.close(reading)

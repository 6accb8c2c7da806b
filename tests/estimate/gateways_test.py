"""Each prompt of a gateway's log counts once, nothing else does, and what is left out is told by its reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands.run import pic

from estimate.gateways import (
    CHATS,
    EMBEDDED,
    Chat,
    Line,
    anthropic_batch,
    bedrock,
    helicone,
    helicone_camel_case,
    helicone_logger,
    kong,
    langfuse,
    langfuse_page,
    litellm_payloads,
    litellm_spend,
    openai,
    openai_batch,
    openai_embedding,
    openllmetry,
    otel_events,
    otel_log_records,
    otel_messages,
    otlp,
    rendered,
    span,
    vllm_old,
    vllm_today,
)
from estimate.references import prefixes
from pictool.errors import InputError
from pictool.estimate.measure import Measure
from pictool.estimate.readers import LogReader
from pictool.estimate.segments import LoggedPrompt

ERASED = "cut or redacted"
# (how the chats are logged, how many records are left out by the beginning of each reason)
GATEWAYS: dict[str, tuple[Callable[[Sequence[Chat]], list[Line]], dict[str, int]]] = {
    "LiteLLM spend logs": (
        litellm_spend,
        {"failed (429)": 1, "logged twice": 1, "embeddings": 1, "moderations": 1, ERASED: 1},
    ),
    "LiteLLM payloads": (litellm_payloads, {"failed (503)": 1, "logged twice": 1, "embeddings": 1}),
    "Langfuse": (langfuse, {"no requests": 5, "within": 4, "failed": 1, "embeddings": 1}),
    "a page of Langfuse": (langfuse_page, {"no requests": 5, "within": 4, "failed": 1, "embeddings": 1}),
    "Helicone": (helicone, {"failed (429)": 1, "failed (503)": 1, "embeddings": 1, "logged twice": 1}),
    "Helicone, camelCase": (
        helicone_camel_case,
        {"failed (429)": 1, "failed (503)": 1, "embeddings": 1, "logged twice": 1},
    ),
    "Helicone's logger": (helicone_logger, {"failed (500)": 1, "embeddings": 1}),
    "OpenAI batch": (openai_batch, {"without a prompt": 1, "logged twice": 1, "embeddings": 1, "moderations": 1}),
    "Anthropic batch": (anthropic_batch, {"logged twice": 1, "without a prompt": 1}),
    "Bedrock": (bedrock, {"failed": 1, "logged twice": 1, "embeddings": 1, "without a prompt": 1}),
    "Kong": (kong, {"failed (429)": 1, "no requests": 1, "logged twice": 1, "embeddings": 1, "without a prompt": 1}),
    "OTel messages": (otel_messages, {"no requests": 5, "failed": 1, "embeddings": 1, "without a prompt": 1}),
    "OTel events": (otel_events, {}),
    "OTel log records": (otel_log_records, {}),
    "OpenLLMetry": (openllmetry, {}),
    "vLLM, old": (vllm_old, {"lines of vLLM's log": 1, "logged twice": 1}),
    "vLLM, today": (vllm_today, {}),
}


def written(path: Path, lines: Sequence[Line]) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def bytes_of(prompt: LoggedPrompt) -> bytes:
    return b"".join(str(segment.content).encode() for segment in prompt.segments)


@pytest.mark.parametrize("name", GATEWAYS)
def test_each_prompt_of_a_gateway_counts_once(name: str, tmp_path: Path) -> None:
    log, left_out = GATEWAYS[name]
    reader, measure, found = LogReader(), Measure(), list[bytes]()
    for prompt in reader.read([written(tmp_path / "log", log(CHATS))]):
        measure.add(prompt)
        found.append(bytes_of(prompt))
    truth = [rendered(chat).encode() for chat in CHATS]
    assert sorted(found) == sorted(truth)
    tokens = measure.finish().tokens
    assert (tokens.prompts, tokens.total) == (len(CHATS), sum(map(len, truth)) / 4)
    assert tokens.prefix == sum(prefixes(found, 64)) / 4 > 100
    reasons = {
        start: sum(n for reason, n in reader.forms.left_out.items() if reason.startswith(start)) for start in left_out
    }
    assert (reasons, reader.forms.left_out.total()) == (left_out, sum(left_out.values()))
    assert reader.unread.lines == 0


NEEDS: dict[str, list[Line]] = {
    "store_prompts_in_spend_logs": [
        {"request_id": "1", "call_type": "acompletion", "spend": 1.0, "messages": "{}", "proxy_server_request": "{}"}
    ],
    "--include-body": [{"request_id": "1", "request_created_at": "2026-01-01T00:00:00Z", "response_status": 200}],
    "GENERATION": [{"id": "1", "traceId": "1", "type": "GENERATION", "input": None}],
    "log_payloads": [{"ai": {"proxy": {"meta": {}, "usage": {}}}, "started_at": 1, "request": {}}],
    "inputBodyS3Path": [
        {
            "schemaType": "ModelInvocationLog",
            "modelId": "m",
            "operation": "Converse",
            "input": {"inputBodyS3Path": "s3://b/k"},
        }
    ],
    "CAPTURE_MESSAGE_CONTENT": [otlp([span("a", {"gen_ai.request.model": "m"})])],
    "input file": [{"id": "b", "custom_id": "1", "response": {"status_code": 200, "body": {}}, "error": None}],
    "DEBUG": ["INFO 11-28 10:00:00 [request_logger.py:65] Received request a: params: P(), lora_request: None."],
    "--enable-log-requests": ["INFO 11-28 10:00:00 [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s"],
    "embeddings": [openai_embedding()],
}


@pytest.mark.parametrize("needed", NEEDS)
def test_a_log_without_prompts_says_what_it_needs(needed: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"log: .*{needed}"):
        list(LogReader().read([written(tmp_path / "log", NEEDS[needed])]))


def test_results_of_a_batch_may_come_before_its_requests(tmp_path: Path) -> None:
    results = written(tmp_path / "results", NEEDS["input file"])
    requests = written(tmp_path / "requests", openai_batch(CHATS)[1:5])
    assert len(list(LogReader().read([results, requests]))) == len(CHATS)


@pytest.mark.parametrize(
    "body",
    [
        {"input": [EMBEDDED, "b"], "model": "bge-m3"},
        {"input": EMBEDDED, "encoding_format": "float"},
        {"input": EMBEDDED, "response": {"object": "list", "data": [{"embedding": [0.5]}]}},
        {"input": [[1, 2]], "url": "/embeddings"},
    ],
)
def test_embeddings_are_told_by_what_they_have(body: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="embeddings"):
        list(LogReader().read([written(tmp_path / "log", [body])]))


def test_equal_ids_of_other_prompts_are_other_requests(tmp_path: Path) -> None:
    rows = [{"id": "1", **openai(chat)} for chat in CHATS]
    assert len(list(LogReader().read([written(tmp_path / "log", rows)]))) == len(CHATS)


def test_within_a_memory_the_latest_ids_are_kept(tmp_path: Path) -> None:
    rows = [{"id": f"{number}", **openai(CHATS[number % 4])} for number in range(40)]
    log = written(tmp_path / "log", [*rows, *rows[-3:]])
    assert len(list(LogReader(memory=10 * 3 * 128).read([log]))) == 40


def test_a_bad_record_of_a_line_does_not_hide_the_others(tmp_path: Path) -> None:
    reader = LogReader()
    log = written(
        tmp_path / "log", [{"data": [openai(CHATS[0]), {"messages": 3}, {"messages": [3]}, openai(CHATS[1])]}]
    )
    assert len(list(reader.read([log]))) == reader.forms.found.total() == 2 and reader.unread.lines == 1


def test_a_line_of_vllm_s_log_is_read_once(tmp_path: Path) -> None:
    """660 KB of the text that ends a prompt took minutes: each was tried as the prompt's end."""
    start, text = "INFO 11-24 10:00:00 [logger.py:43] Received request a: prompt: ", "it's', params: " * 60_000
    rest = ", params: SamplingParams(stop=['prompt_token_ids: [1]']), prompt_token_ids: None, lora_request: None."
    (prompt,) = LogReader().read(
        [written(tmp_path / "log", [f"{start}'{', params: ' * 60_000}", f"{start}{text!r}{rest}"])]
    )
    assert bytes_of(prompt).decode() == text


def test_the_report_names_what_is_left_out(tmp_path: Path) -> None:
    log = written(tmp_path / "log", helicone(CHATS))
    counted = {"embeddings": 1, "failed (429)": 1, "failed (503)": 1, "logged twice": 1}
    assert json.loads(pic("estimate", log, "--json").out)["left_out"] == {"records": 4, "reasons": counted}
    told = " ".join(pic("estimate", log).out.split())
    assert "skipped" in told and all(f"1 {reason}" in told for reason in counted)
    nothing = pic("estimate", written(tmp_path / "none", NEEDS["log_payloads"]))
    assert (nothing.code, nothing.out, nothing.err.count("\n")) == (1, "", 1)

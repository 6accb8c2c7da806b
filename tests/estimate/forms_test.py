"""Every form of a log: which prompts are read from a record, and how bad records are told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pictool.estimate.bodies import FormError
from pictool.estimate.forms import Forms
from pictool.estimate.segments import LoggedPrompt

LONG = "a document of more than sixty-four characters, so that it is compiled and linked"
TEXT = {"type": "text", "text": "x"}
MARK = {"cache_control": {"type": "ephemeral"}}
CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "why?"}]
KINDS: list[tuple[str, ...]] = [("system", "be kind"), ("user", "why?")]

# (record, segments without templates, marked ones in the third place)
FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, ...]]]] = {
    "chat": ({"messages": CHAT}, KINDS),
    "tools": ({"messages": CHAT, "tools": [{"name": "f"}]}, [("system", '{"name":"f"}'), *KINDS]),
    "documents": ({"messages": CHAT, "documents": [{"text": LONG}]}, [KINDS[0], ("document", LONG, "m"), KINDS[1]]),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"data": LONG}}, TEXT]}]},
        [("document", LONG, "m"), ("user", "x")],
    ),
    "anthropic": (
        {"system": [{"type": "text", "text": LONG, **MARK}], "messages": [
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "found"}]}]},
            {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]},
        [("system", LONG, "m"), ("user", "found"), ("assistant", '{"name":"f","input":{}}')],
    ),
    "batch file": ({"custom_id": "1", "method": "POST", "url": "/v1/x", "body": {"messages": CHAT}}, KINDS),
    "in a request": ({"request": json.dumps({"messages": CHAT}), "time": 5}, KINDS),
    "completion": ({"prompt": "text"}, [("prompt", "text")]),
    "token ids": ({"prompt": [1, 2, 3]}, [("prompt", "1 2 3")]),
    "responses": (
        {"instructions": "be kind", "input": [{"role": "user", "content": [{"type": "input_text", "text": "why?"}]},
                                              {"type": "function_call_output", "output": "o"}]},
        [*KINDS, ("tool", "o")],
    ),
    "responses of text": ({"input": "why?"}, [("user", "why?")]),
    "LMCache's agents": ({"session_id": "s", "input": CHAT, "output_length": 5, "pre_gap": 0.1}, KINDS),
    "Gemini": (
        {"systemInstruction": {"parts": [{"text": "be kind"}]},
         "contents": [{"role": "user", "parts": [{"text": "why?"}]}]},
        KINDS,
    ),
    "LiteLLM": ({"messages": CHAT, "startTime": 1.7e9, "metadata": {"user_api_key_hash": "k"}, "response": {}}, KINDS),
    "LangSmith": (
        {"run_type": "llm", "inputs": {"messages": [[
            {"lc": 1, "type": "constructor", "id": ["langchain", "SystemMessage"], "kwargs": {"content": "be kind"}},
            {"type": "human", "data": {"content": "why?"}}]]}, "start_time": "2026-01-01T00:00:00"},
        KINDS,
    ),
}  # fmt: skip


def shown(prompt: LoggedPrompt) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for segment in prompt.segments:
        content = segment.content
        text = " ".join(map(str, content)) if isinstance(content, np.ndarray) else str(content)
        if segment.kind != "template":
            found.append((segment.kind, text, "m") if segment.is_marked else (segment.kind, text))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read(name: str) -> None:
    record, segments = FORMS[name]
    (prompt,) = Forms().prompts(record)
    assert shown(prompt) == segments


def test_a_chat_of_the_embedded_model_is_no_embedding() -> None:
    """Its name, which requests to `pic serve` have, begins like those of other models."""
    for name in ("embedded", "embedded-small"):
        assert len(Forms().prompts({"model": name, "messages": [{"role": "user", "content": "Why?"}]})) == 1


def test_several_prompts_of_one_record_are_several() -> None:
    assert len(Forms().prompts({"prompt": ["a", "b"]})) == 2
    assert len(Forms().prompts({"prompt": [[1], [2], [3]]})) == 3


def test_times_and_tenants_are_those_of_the_record() -> None:
    inner = {"messages": CHAT}
    (prompt,) = Forms().prompts({"timestamp": 1.7e12, "team_id": "t", "body": inner})
    assert (prompt.time, prompt.tenant) == (1.7e9, "t")
    (prompt,) = Forms().prompts({"messages": CHAT, "created_at": "2026-01-01T00:00:00Z", "cache_salt": "s"})
    assert prompt.time == 1767225600 and prompt.tenant == "s"


@pytest.mark.parametrize(
    ("line", "segments"),
    [
        (r"INFO 11-24 10:00:00 [logger.py:43] Received request cmpl-1: prompt: 'it\'s', params: SamplingParams(n=1), "
         "prompt_token_ids: [1, 2], lora_request: None.", [("prompt", "1 2")]),
        ("DEBUG 11-24 10:00:00 [logger.py:40] Request cmpl-1 details: prompt: \"it's\", prompt_token_ids: None, "
         "prompt_embeds shape: None.", [("prompt", "it's")]),
    ],
)  # fmt: skip
def test_lines_of_vllm_s_log_are_read(line: str, segments: list[tuple[str, ...]]) -> None:
    (found,) = Forms().line(line)
    assert Forms.is_line(line) and shown(found) == segments and found.time is not None
    assert not Forms.is_line("Received requests: 3") and not Forms.is_line("12")


@pytest.mark.parametrize(
    "record", [{"a": 1}, [], 3, {"messages": 3}, {"messages": [3]}, {"prompt": [1.5]}, {"input": {"a": 1}}]
)
def test_another_form_is_told(record: Any) -> None:
    with pytest.raises((FormError, TypeError)):
        Forms().prompts(record)

"""Real clients, unmodified."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serve.live import DOCS, NAME, QUESTION, Live, text_of


@pytest.fixture(autouse=True)
def _no_keys_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OPENAI_", "GEMINI_", "GOOGLE_", "LANGCHAIN_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def docs_content(live: Live) -> list[Any]:
    return [*({"type": "cache", "cache_id": live.cache(doc)} for doc in DOCS), {"type": "text", "text": QUESTION}]


# openai


def test_openai_chat(client: openai.OpenAI, live: Live) -> None:
    ask: dict[str, Any] = {"model": NAME, "temperature": 0, "max_completion_tokens": 8}
    messages: list[Any] = [{"role": "user", "content": docs_content(live)}]
    done = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, n=2, seed=3, **ask)
    assert done.choices[0].message.content == text_of(live.chat(messages[0]["content"]))
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens == done.pic["linked_tokens"]  # type: ignore[attr-defined]
    assert done.choices[1].logprobs is not None and done.choices[1].logprobs.content
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **ask
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == done.choices[0].message.content and chunks[-1].usage is not None
    more = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], extra_headers={"X-Pic-Policy": "naive"},
        extra_body={"cache_ids": [live.cache(DOCS[0])], "verify": True}, **ask,
    )  # fmt: skip
    assert more.pic["policy"] == "naive" and more.pic["verify"]["kl"] >= 0  # type: ignore[attr-defined]


def test_openai_completions_and_models(client: openai.OpenAI, live: Live) -> None:
    done = client.completions.create(model=NAME, prompt="The harbour", max_tokens=6, temperature=0, logprobs=2)
    parts = client.completions.create(model=NAME, prompt="The harbour", max_tokens=6, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == done.choices[0].text
    assert [model.id for model in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME


def test_openai_files_and_errors(client: openai.OpenAI, live: Live) -> None:
    file = client.files.create(file=("a.txt", io.BytesIO(DOCS[0].encode())), purpose="user_data")
    assert file.id in {each.id for each in client.files.list()}
    assert client.files.content(file.id).text == DOCS[0]
    cache = client.post("/caches", body={"model": NAME, "file_id": file.id}, cast_to=dict[str, Any])
    assert cache["object"] == "cache"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    ask: Any = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}]}
    with pytest.raises(openai.NotFoundError, match="'x'"):
        client.chat.completions.create(**(ask | {"model": "x"}))
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.chat.completions.create(logit_bias={"x": 1}, **ask)
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        client.chat.completions.create(temperature=9, **ask)


def test_openai_async_streams_side_by_side(live: Live) -> None:
    async def ask(client: openai.AsyncOpenAI, question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        stream = await client.chat.completions.create(
            model=NAME, messages=messages, temperature=0, max_tokens=8, stream=True
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of(questions: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    questions = [f"Really {i}?" for i in range(6)]
    assert asyncio.run(all_of(questions)) == [text_of(live.chat(question)) for question in questions]


# Others


def test_langchain(live: Live) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{live.url}/v1", api_key="none", model=NAME, temperature=0, max_tokens=8)  # type: ignore[arg-type, call-arg]
    marked = {"type": "text", "text": DOCS[0] + DOCS[1], "cache_control": {"type": "ephemeral"}}
    messages = [
        SystemMessage("Be brief."), HumanMessage([marked, {"type": "text", "text": QUESTION}])
    ]  # fmt: skip
    done = chat.invoke(messages)
    want = live.chat(
        None, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": messages[1].content}]
    )  # fmt: skip
    assert done.content == text_of(want) and want["pic"]["source"] == "marker"
    assert done.usage_metadata is not None and done.usage_metadata["input_token_details"]["cache_read"] > 0
    assert "".join(str(part.content) for part in chat.stream(messages)) == done.content


def test_llama_index(live: Live) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=NAME, api_base=f"{live.url}/v1", api_key="none", is_chat_model=True, temperature=0, max_tokens=8,
        context_window=512,
    )  # fmt: skip
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
    want = live.chat(
        None, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    )  # fmt: skip
    assert model.chat(messages).message.content == text_of(want)
    assert [part.message.content for part in model.stream_chat(messages)][-1] == text_of(want)
    plain = OpenAILike(model=NAME, api_base=f"{live.url}/v1", api_key="none", temperature=0, max_tokens=8)
    assert plain.complete("The harbour").text


def test_llm_command(live: Live, tmp_path: Path) -> None:
    """Simon Willison's `llm`, which reads extra models from a file of YAML."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "here", "model_name": NAME, "api_base": f"{live.url}/v1", "api_key_name": "here"}])
    )
    arguments = ["-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "8", "--key", "none", "--no-log", QUESTION]
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments], env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == text_of(live.chat(QUESTION)).strip()


def test_google_genai(live: Live) -> None:
    from google import genai
    from google.genai import errors, types

    client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=live.url))
    cache = client.caches.create(
        model=NAME,
        config=types.CreateCachedContentConfig(
            contents=[types.Content(role="user", parts=[types.Part(text=doc)]) for doc in DOCS],  # type: ignore[arg-type]
            system_instruction="Be brief.", ttl="300s", display_name="books",
        ),
    )  # fmt: skip
    assert cache.name is not None and cache.name.startswith("cachedContents/")
    config = types.GenerateContentConfig(cached_content=cache.name, temperature=0, max_output_tokens=8)
    done = client.models.generate_content(model=NAME, contents=QUESTION, config=config)
    assert done.usage_metadata is not None and (done.usage_metadata.cached_content_token_count or 0) > 0
    parts = client.models.generate_content_stream(model=NAME, contents=QUESTION, config=config)
    assert "".join(part.text or "" for part in parts) == done.text
    assert cache.name in {each.name for each in client.caches.list()}
    before = client.caches.get(name=cache.name).expire_time
    after = client.caches.update(name=cache.name, config=types.UpdateCachedContentConfig(ttl="900s")).expire_time
    assert before is not None and after is not None and after > before
    client.caches.delete(name=cache.name)
    with pytest.raises(errors.ClientError) as caught:
        client.caches.get(name=cache.name)
    assert caught.value.code == 404 and caught.value.status == "NOT_FOUND"


def test_spnl(live: Live) -> None:
    """Its wheel runs a query on the client's side, call by call, over OpenAI's API."""
    pytest.importorskip("spnl", reason="spnl has wheels for Linux on x86-64 only")
    call = {"model": f"openai/{NAME}", "max_tokens": 8, "temperature": 0}
    documents = {"plus": [{"user": doc} for doc in DOCS]}
    query = {"g": call | {"input": {"cross": [documents, {"user": QUESTION}]}}}
    script = (
        "import asyncio, json, spnl, sys\n"
        "async def run(): return (await spnl.execute(sys.argv[1])).data\n"
        "print('\\n' + json.dumps(asyncio.run(run())))"  # it prints the answer itself, too
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(query)], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OPENAI_API_BASE": f"{live.url}/v1", "OPENAI_API_KEY": "k"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    messages = [{"role": "user", "content": text} for text in [*DOCS, QUESTION]]
    assert json.loads(done.stdout.splitlines()[-1]) == text_of(live.chat(None, messages=messages))

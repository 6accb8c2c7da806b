"""The recipes of docs/recipes, as they are written there, with the real packages against the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.recipes import ROOT, block, commands, continue_request
from clients.conftest import serving

CHECK = """
messages = [{{"role": "user", "content": question}}]
body = {{"model": MODEL, "temperature": 0, "messages": messages, "cache_ids": {ids}}}
raw = httpx.post(f"{{SERVER}}/chat/completions", json=body, timeout=60).json()
print("same", raw["choices"][0]["message"]["content"] == answer.text)
"""  # that the answer is that of raw HTTP
QUESTION = "Where does Hurtron have an office?"
IDS = {"langchain": "[document.metadata['cache_id'] for document in found]", "llama-index": "[*ids]"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A directory with notes, compiled for `llm` as its page says."""
    directory = tmp_path_factory.mktemp("home")
    (directory / "notes").mkdir()
    for number in range(1, 5):
        page = ROOT / "fixtures" / "docs" / f"book-3-page-{number}.txt"
        (directory / "notes" / f"{number}.txt").write_text(
            page.read_text() * 4
        )  # auto links prompts of 320 tokens and more
    (words,) = commands("llm", "pic compile")
    words = [word.replace("smollm2", "embedded") for word in words[:-1]]
    notes = sorted(map(str, directory.glob(commands("llm", "pic compile")[0][-1])))
    assert len(notes) == 4
    run(directory, "-m", "pictool", *words, *notes, "--store", str(store), PYTHONPATH=str(ROOT))
    return directory


@pytest.fixture(scope="module")
def address(store: Path, home: Path) -> Iterator[str]:
    with serving("--store", str(store), "--check", "off") as url:
        yield url


def run(home: Path, *words: str, **variables: str) -> str:
    done = subprocess.run([sys.executable, *words], env=os.environ | {"LANGSMITH_TRACING": "false"} | variables,
                          cwd=home, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("page", IDS)
def test_documents_are_named_and_not_pasted(address: str, home: Path, page: str) -> None:
    program = block(page, "python", address).replace('"smollm2"', '"embedded"')
    printed = run(home, "-c", program + CHECK.format(ids=IDS[page]), QUESTION)
    assert re.findall(r"^same (.*)$", printed, re.M) == ["True"], printed
    (cached,) = re.findall(r"(?:'cache_read': |cached_tokens=)(\d+)", printed)
    assert int(cached) > 200


def test_llm_pastes_files_that_are_linked_in_any_order(address: str, home: Path) -> None:
    config = block("llm", "yaml", address).replace("model_name: smollm2", "model_name: embedded")
    (home / "extra-openai-models.yaml").write_text(config)
    (keys,) = commands("llm", "llm keys")
    run(home, "-m", "llm", *keys, LLM_USER_PATH=str(home))
    orders = [[word for word in words if word.endswith(".txt")] for words in commands("llm", "llm -m")]
    assert len(orders) == 2 and sorted(orders[0]) == sorted(orders[1]) != orders[1]
    for words in commands("llm", "llm -m"):
        before = linked(address)
        assert run(home, "-m", "llm", *words, LLM_USER_PATH=str(home)).strip()
        assert linked(address) - before > 150


def linked(address: str) -> float:
    """Tokens that the server has linked so far."""
    found = re.findall(
        r'^pic_tokens_total\{kind="linked"\} (\S+)$', httpx.get(f"{address}/metrics", timeout=60).text, re.M
    )
    return sum(map(float, found))


def test_continue_s_requests_are_answered(address: str, home: Path) -> None:
    """The file is valid, and a chat in Continue's own form is answered as it comes; the editor is not run."""
    config = yaml.safe_load(block("continue", "yaml", address))
    assert (config["schema"], {"name", "version"} <= set(config)) == ("v1", True)
    (model,) = config["models"]
    assert model["provider"] == "openai" and model["model"] == "smollm2" and model["apiBase"] == f"{address}/v1"
    given: dict[str, Any] = model | {"model": "embedded"}
    files = {f"notes/{number}.txt": (home / "notes" / f"{number}.txt").read_text() for number in (2, 1)}
    response = httpx.post(**continue_request(given, files, QUESTION), timeout=600).raise_for_status()
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 2 and events[-1] == "[DONE]" and '"content"' in response.text

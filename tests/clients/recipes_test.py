"""The recipes of the guide, as they are written there, with the real packages against the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from clients.conftest import serving
from clients.table import ROOT

CHECK = """
messages = [{{"role": "user", "content": question}}]
body = {{"model": "embedded", "temperature": 0, "messages": messages, "cache_ids": {ids}}}
raw = httpx.post(f"{{SERVER}}/chat/completions", json=body, timeout=60).json()
print("same", raw["choices"][0]["message"]["content"] == answer.text)
"""  # that the answer is that of raw HTTP


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving("--store", str(tmp_path_factory.mktemp("store")), "--check", "off") as url:
        yield url


def test_documents_are_named_and_not_pasted(address: str) -> None:
    guide = (ROOT / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
    recipes = [code for code in re.findall(r"```python\n(.*?)```", guide, re.S) if "cache_id(text)" in code]
    assert len(recipes) == 2
    named = ("[document.metadata['cache_id'] for document in found]", "[*ids]")
    checked = [code + CHECK.format(ids=ids) for code, ids in zip(recipes, named, strict=True)]
    program = "\n".join(checked).replace("http://localhost:8000", address)
    environment = os.environ | {"LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.findall(r"^same (.*)$", done.stdout, re.M) == ["True", "True"], done.stdout
    cached = [int(number) for number in re.findall(r"(?:'cache_read': |cached_tokens=)(\d+)", done.stdout)]
    assert len(cached) == 2 and min(cached) > 100

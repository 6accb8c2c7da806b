"""These tests need llama.cpp (`make test-llamacpp`); elsewhere they are not collected, and not reported as skipped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import tiny

HAS_LLAMA = all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))
collect_ignore_glob = [] if HAS_LLAMA else ["*_test.py"]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fingerprints and trials are kept for the session, and not with the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _kept_cache(_cache: None, _surroundings: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """That cache, in place of one for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache0"))


@pytest.fixture(scope="session")
def embedded_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a GGUF file."""
    from pictool.runtime.model import load_model

    model = load_model("embedded")
    return gguf_files.write_gguf(tmp_path_factory.mktemp("gguf") / "embedded.gguf", model.module, model.tokenizer)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return gguf_files.write_gguf(
        path, gguf_files.random_module("llama"), tiny.tokenizer(), template=gguf_files.TEMPLATE
    )

"""Where GGUF files are found that other programs keep, and what needs no llama.cpp. The folders are made here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from pictool.engines.llamacpp.model import GgufConfig
from pictool.engines.llamacpp.names import find_files
from pictool.errors import ModelError
from pictool.runtime.support import rope_parameters

CONTENT = b"GGUF" + bytes(20)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pull(models: Path, name: str) -> Path:
    """What `ollama pull` leaves: a manifest, whose layers are blobs."""
    digest = hashlib.sha256(name.encode() + CONTENT).hexdigest()
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}", "size": 1},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(CONTENT)},
    ]
    put(models / "manifests" / name, json.dumps({"schemaVersion": 2, "layers": layers}))
    return put(models / "blobs" / f"sha256-{digest}", CONTENT)


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("ollama:llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("ollama:qwen2.5:7b", "registry.ollama.ai/library/qwen2.5/7b"),
        ("ollama:someone/own:v1", "registry.ollama.ai/someone/own/v1"),
        ("ollama:host.example/someone/own", "host.example/someone/own/latest"),
    ],
)
@pytest.mark.parametrize("moved", [False, True])
def test_ollama(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, manifest: str, moved: bool) -> None:
    models = home / ("elsewhere" if moved else ".ollama/models")
    if moved:
        monkeypatch.setenv("OLLAMA_MODELS", str(models))
    blob = pull(models, manifest)
    assert find_files(name) == [blob]


@pytest.mark.parametrize(
    "name",
    [
        "ollama:",
        "ollama:../../etc/passwd",
        "ollama:a/b/c/d",
        "ollama:a:../b",
        "ollama:nosuch",
        "lmstudio:",
        "lmstudio:nosuch",
    ],
)
def test_names_that_nothing_has(name: str) -> None:
    with pytest.raises(ModelError, match=f"^{name}: "):
        find_files(name)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"layers": []}', '{"layers": [{"mediaType": 1}]}', "[" * 9999])
def test_manifests_that_are_damaged(home: Path, content: str) -> None:
    put(home / ".ollama/models/manifests/registry.ollama.ai/library/x/latest", content)
    with pytest.raises(ModelError, match=str(home)):
        find_files("ollama:x")


def test_a_blob_that_is_gone(home: Path) -> None:
    pull(home / ".ollama/models", "registry.ollama.ai/library/x/latest").unlink()
    with pytest.raises(ModelError, match=str(home / ".ollama" / "models" / "blobs")):
        find_files("ollama:x")


@pytest.mark.parametrize("folder", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studio(home: Path, folder: str) -> None:
    first = put(home / folder / "org/Own-7B-GGUF/own-7b-Q4_K_M.gguf", CONTENT)
    put(home / folder / "org/Own-7B-GGUF/mmproj-own-7b.gguf", CONTENT)
    split = [put(home / folder / f"org/Big-GGUF/big-0000{part}-of-00002.gguf", CONTENT) for part in (1, 2)]
    assert find_files("lmstudio:own-7b") == [first]
    assert find_files("lmstudio:big") == split
    with pytest.raises(ModelError, match=r"^lmstudio:org: "):
        find_files("lmstudio:org")


def test_parts_of_a_split_file(home: Path) -> None:
    first, second = (put(home / f"m-0000{part}-of-00002.gguf", CONTENT) for part in (1, 2))
    assert find_files(str(first)) == [first, second]
    with pytest.raises(ModelError, match=f"^{second}: "):
        find_files(str(second))
    second.unlink()
    with pytest.raises(ModelError, match=f"^{second}: "):
        find_files(str(first))


def test_its_rotation_is_read_without_a_registry_of_families() -> None:
    config: Any = GgufConfig("gguf.llama", 8, None, None)
    assert rope_parameters(config) == [{"rope_type": "default"}]

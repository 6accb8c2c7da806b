"""Model directories that cannot be used: one line that names the directory, what is wrong and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from commands.run import Objects, pic, write

Spoil = Callable[[Path], object]


def config(**changes: Any) -> Spoil:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def content(name: str, text: str) -> Spoil:
    return lambda model: write(model / name, text)


def without(pattern: str) -> Spoil:
    def remove(model: Path) -> None:
        for path in model.glob(pattern):
            path.unlink()

    return remove


def cut_weights(size: int) -> Spoil:
    """Keep the first `size` bytes (or all but the last, if negative)."""

    def cut(model: Path) -> None:
        path = model / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return cut


CASES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no config": (without("config.json"), ("no config.json",)),
    "no tokenizer": (without("token*"), ("no tokenizer", "tokenizer.json", "save")),
    "no weights": (without("*.safetensors"), ("no weights", "*.safetensors")),
    "another architecture": (lambda m: GPT2Config().save_pretrained(m), ("'gpt2'", "not supported", "llama", "qwen3")),
    "an architecture nobody knows": (config(model_type="nosuch"), ("nosuch",)),
    "config is no JSON": (content("config.json", "{"), ("config.json", "JSON")),
    "config is a list": (content("config.json", "[]"), ("config.json",)),
    "config is empty": (content("config.json", "{}"), ("config.json", "model_type")),
    "tokenizer is no JSON": (content("tokenizer.json", "{"), ("tokenizer",)),
    "weights are empty": (cut_weights(0), ("model.safetensors", "truncated", "copy the model again")),
    "weights are cut in the header": (cut_weights(100), ("model.safetensors", "truncated", "copy the model again")),
    "weights are cut": (cut_weights(-10), ("model.safetensors", "truncated", "copy the model again")),
    "weights have other shapes": (config(intermediate_size=64), ("weights",)),
    "weights lack a layer": (config(num_hidden_layers=4), ("weights", "missing", "model.layers.3")),
    "config of another type": (config(num_hidden_layers="3"), ("config.json", "num_hidden_layers")),
    "config with no RoPE": (config(rope_parameters=7), ("config.json", "rope_parameters")),
    "tokenizer is a list": (content("tokenizer.json", "[]"), ("tokenizer",)),
}


def require_one_line(outcome: Any, says: tuple[str, ...]) -> None:
    assert (outcome.code, outcome.out) == (1, ""), outcome
    assert outcome.err.startswith("pic: error: ") and outcome.err.count("\n") == 1, outcome.err
    assert [part for part in says if part not in outcome.err] == [], outcome.err


@pytest.mark.parametrize("name", CASES)
def test_a_spoilt_model_is_refused(name: str, model: Path, texts: tuple[Path, Path]) -> None:
    spoil, says = CASES[name]
    directory = Path(shutil.copytree(model, "spoilt"))
    spoil(directory)
    require_one_line(pic("compile", "a.txt", "-m", directory), ("spoilt", *says))
    assert list(Path().rglob("*.kvo")) == [] == list(Path(".pic").glob("tmp/*"))


def test_a_model_that_cannot_answer_is_refused(model: Path) -> None:
    directory = Path(shutil.copytree(model, "spoilt"))
    write(directory / "generation_config.json", "{")
    require_one_line(pic("link", "-q", "why?", "-m", directory), ("spoilt", "generation_config.json"))


@pytest.mark.parametrize("name", ["./nosuch", "/nosuch", "a.txt"])
def test_what_is_no_directory_is_refused(name: str, texts: tuple[Path, Path]) -> None:
    require_one_line(pic("compile", "a.txt", "-m", name), (name, "not a model directory"))


def test_an_unknown_hub_name_is_refused(texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    require_one_line(pic("compile", "a.txt", "-m", "nosuch-model"), ("nosuch-model", "Hub"))


def test_a_text_can_be_no_tokens_at_all(model: Path) -> None:
    directory = Path(shutil.copytree(model, "stripping"))
    path = directory / "tokenizer.json"
    drop = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": drop}))
    write("w.txt", "~~")
    require_one_line(pic("compile", "w.txt", "-m", directory), ("w.txt", "no tokens"))


def both_keys(one: Path, other: Path, field: str) -> tuple[str, str]:
    return tuple(pic("inspect", path, "--json").json[field][:12] for path in (one, other))  # type: ignore[return-value]


def test_an_object_of_another_model_is_refused_and_both_are_named(model: Path, objects: Objects) -> None:
    says = both_keys(objects.mine, objects.foreign, "model")
    require_one_line(pic("link", objects.foreign, "-q", "why?", "-m", model), (str(objects.foreign), *says, "compile"))


def test_an_object_of_another_dtype_is_refused_and_both_are_named(model: Path, objects: Objects) -> None:
    says = both_keys(objects.mine, objects.half, "dtype")
    assert says == ("float32", "bfloat16")
    require_one_line(pic("link", objects.half, "-q", "why?", "-m", model), (str(objects.half), *says, "compile"))

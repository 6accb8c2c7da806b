"""Model directories of strangers: every variation gives a model that works, or one line with the remedy."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import spoilt
import tiny
from transformers import LlamaConfig

from pictool.api import answer
from pictool.errors import ModelError, PicError
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import load_model
from pictool.runtime.support import require_sound
from pictool.store.store import Store

CASES = 30  # of each model; `python -m pytest` with more takes minutes
LIMIT_S, LIMIT_MB = 60.0, 1024  # a hang, on a machine that may be busy; memory


def in_shards(directory: Path) -> Path:
    """A Gemma 3, whose layers have types, with its weights in three files."""
    tiny.random_module(tiny.CONFIGS["gemma3"]()).save_pretrained(directory, max_shard_size="40KB")
    tiny.tokenizer().save_pretrained(directory)
    return directory


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama3": lambda directory: tiny.save_model(directory, tiny.CONFIGS["llama3"]()),
    "phi3-long": lambda directory: tiny.save_model(directory, tiny.CONFIGS["phi3-long"]()),
    "gemma3": in_shards,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories to copy."""
    root = tmp_path_factory.mktemp("whole")
    return {name: make(root / name) for name, make in MODELS.items()}


def use(directory: Path) -> None:
    """Compile and link with a model, and answer."""
    Path("a.txt").write_text("The harbour was quiet. It holds a festival.")
    shutil.rmtree("store", ignore_errors=True)
    model = load_model(str(directory), device="cpu")
    policy = make_policy("legolink", {"k": 2})
    answer(model, Store("store"), Spec("why?", ["a.txt"], policy, max_new_tokens=2)).trace()


def refusal(directory: Path) -> str:
    """The line with which a model is refused."""
    with pytest.raises(PicError) as caught:
        use(directory)
    message = str(caught.value)
    assert str(directory) in message and "; " in message and "\n" not in message and len(message) < 700, message
    return message


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.parametrize("name", MODELS)
def test_every_variation_works_or_is_refused(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    refused, directory = 0, tmp_path / "spoilt"
    use(models[name])
    for variation in spoilt.sample(models[name], CASES, seed=0):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(models[name], directory)
        variation.spoil(directory)
        started, before = time.monotonic(), peak_mb()
        try:
            use(directory)
        except PicError as error:
            refused += 1
            message = str(error)
            assert str(directory) in message and "; " in message and "\n" not in message, (variation.name, message)
        except BaseException as error:
            raise AssertionError(variation.name) from error
        assert time.monotonic() - started < LIMIT_S and peak_mb() - before < LIMIT_MB, variation.name
    assert refused > CASES / 3


def changed(source: Path, name: str, **changes: Any) -> Path:
    """A copy of a model with other fields in a file."""
    directory = Path(shutil.copytree(source, "spoilt"))
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    return directory


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 10**12}, "vocab_size .*1000000000000"),
    "embedding": ({"vocab_size": 10**9}, "config.json .* 64"),
    "layers": ({"num_hidden_layers": 10**6}, " 1000000 .* model.layers.3 "),
    "width": ({"intermediate_size": 10**9}, "config.json"),
    "no heads": ({"num_key_value_heads": 0}, "num_key_value_heads .*0"),
    "heads": ({"num_attention_heads": 3}, r"\(3\)"),
    "head_dim": ({"head_dim": 7}, "head_dim.*7"),
    "other head_dim": ({"head_dim": 16}, "config.json"),
    "positions": ({"max_position_embeddings": -1}, "max_position_embeddings .*-1"),
    "activation": ({"hidden_act": "nosuch"}, "hidden_act .*'nosuch'"),
    "a list": ({"hidden_size": [32]}, "hidden_size"),
    "padding": ({"pad_token_id": 10**6}, "pad_token_id .*1000000.* vocab_size"),
    "epsilon": ({"rms_norm_eps": -1.0}, "rms_norm_eps .*-1.0"),
    "architecture": ({"model_type": "nosuch"}, "nosuch"),
    "architecture of a list": ({"model_type": ["llama"]}, "llama"),
    "architecture of an object": ({"model_type": {"a": None}}, "'a'"),
    "RoPE": ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta"),
    "RoPE 0": ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta .*0"),
    "RoPE without base": ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta"),
    "RoPE factor": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2}}, "factor .*-2"),
    "NaN": ({"rms_norm_eps": float("nan")}, "config.json: .*NaN"),
}


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("mistral4", {"head_dim": 8}, "head_dim"),  # of which 8 / 14 are rotated
        ("mistral4", {"rope_parameters": ROPE | {"llama_4_scaling_beta": None}}, "llama_4_scaling_beta"),
        ("ministral3", {"rope_parameters": ROPE}, "llama_4_scaling_beta"),
        ("deepseek_v3", {"qk_rope_head_dim": 6, "head_dim": 8}, "head_dim"),
    ],
)
def test_what_a_family_s_attention_reads_is_there(name: str, changes: dict[str, Any], field: str) -> None:
    config = tiny.CONFIGS[name]()
    require_sound(config, name)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(ModelError, match=f"{name}: config.json: {field}"):
        require_sound(config, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_no_model_has_is_refused(name: str, models: dict[str, Path]) -> None:
    changes, message = CONFIGS[name]
    before, started = peak_mb(), time.monotonic()
    with pytest.raises(ModelError, match=message):
        use(changed(models["llama3"], "config.json", **changes))
    assert peak_mb() - before < LIMIT_MB and time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("kinds", [["full_attention"], ["x", "x", "x"], "full_attention", ["full_attention"] * 4])
def test_layer_types_are_those_of_the_layers(kinds: Any, models: dict[str, Path]) -> None:
    assert "layer_types" in refusal(changed(models["gemma3"], "config.json", layer_types=kinds))


@pytest.mark.parametrize("name", ["nosuch.safetensors", "../whole.safetensors", "/etc/passwd", ".", "pipe.safetensors"])
def test_an_index_names_files_of_its_directory(name: str, models: dict[str, Path]) -> None:
    index = json.loads((models["gemma3"] / "model.safetensors.index.json").read_bytes())
    weights = dict.fromkeys(index["weight_map"], name)
    directory = changed(models["gemma3"], "model.safetensors.index.json", weight_map=weights)
    if name.startswith("pipe"):
        os.mkfifo(directory / name)
    assert name in refusal(directory)


def test_a_tokenizer_of_another_model_is_refused(models: dict[str, Path]) -> None:
    """Its tokens are beyond the model's: an index error in the embedding, or memory that is not its own on a GPU."""
    directory = tiny.save_model(Path("small"), LlamaConfig(**tiny.SIZE | {"vocab_size": 100}))
    assert "the tokenizer produced token" in (message := refusal(directory)) and "100 tokens" in message


@pytest.mark.parametrize("ids", ["x", [1, "x"], -1, 0.5, {"a": 1}, [[1]], True])
def test_tokens_that_end_an_answer_are_token_ids(ids: Any, models: dict[str, Path]) -> None:
    assert "eos_token_id" in refusal(changed(models["llama3"], "generation_config.json", eos_token_id=ids))


def test_a_damaged_cache_of_weight_hashes_is_computed_again(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pictool.reading._COARSE_NS", 0)  # the fixture has just written the weights
    first = load_model(str(models["llama3"]), device="cpu").fingerprint
    (kept,) = (tmp_path / "cache/pictool/fingerprints").iterdir()
    for content in (b"", b"[1, 2]", b'{"x": 1}', b'{"x": "y"}', b"[" * 100_000, b"\xff", b"null"):
        kept.write_bytes(content)
        assert load_model(str(models["llama3"]), device="cpu").fingerprint == first

"""KV is stored under the key of the weights that computed it, or not at all, whatever happens to files and modules."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import logging

from pictool import api
from pictool.core import Text
from pictool.errors import ModelError
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.reading import FileState
from pictool.runtime import checkpoint, fingerprint
from pictool.runtime.memory.user_cache import cache_dir
from pictool.runtime.model import Model, load_model, wrap_model
from pictool.store.store import Store

TEXT = "The harbour was quiet. It holds a festival."
CHANGED = re.escape(fingerprint.LOAD_AGAIN)
Change = Callable[[Path], None]


def weights_of(model_dir: Path) -> Path:
    return model_dir / "model.safetensors"


def other_weights(model_dir: Path) -> bytes:
    """A checkpoint of the same shape and size, whose numbers are others."""
    other = model_dir.with_name("other")
    if not other.exists():
        tiny.save_model(other, tiny.CONFIGS["llama"](), seed=9)
    return weights_of(other).read_bytes()


def write_in_place(model_dir: Path) -> None:
    weights_of(model_dir).write_bytes(other_weights(model_dir))


def write_and_restore_times(model_dir: Path) -> None:
    status = weights_of(model_dir).stat()
    write_in_place(model_dir)
    os.utime(weights_of(model_dir), ns=(status.st_atime_ns, status.st_mtime_ns))


def move_into_place(model_dir: Path) -> None:
    (model_dir / "new").write_bytes(other_weights(model_dir))
    (model_dir / "new").replace(weights_of(model_dir))


def move_the_directory(model_dir: Path) -> None:
    other_weights(model_dir)
    model_dir.rename(model_dir.with_name("old"))
    model_dir.with_name("other").rename(model_dir)


def add_an_adapter(model_dir: Path) -> None:
    (model_dir / "adapter_config.json").write_text("{}")


def in_shards(model_dir: Path) -> None:
    """The same tensors, but one, in files of an index, which do not count while a single file is there."""
    tensors = load_file(weights_of(model_dir))
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model_dir / "pytorch_model.safetensors")
    weights_of(model_dir).unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model.safetensors")}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))


WRITES: list[Change] = [write_in_place, write_and_restore_times]
REPLACEMENTS: list[Change] = [move_into_place, move_the_directory, in_shards, add_an_adapter]


def settle(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files had been written long ago: only their state is compared while it is the same."""
    monkeypatch.setattr("pictool.reading._COARSE_NS", -1)


@pytest.mark.parametrize("change", [*WRITES, *REPLACEMENTS])
@pytest.mark.parametrize("is_old", [True, False])
def test_a_checkpoint_that_changes_between_fingerprint_and_load_is_not_loaded(
    change: Change, is_old: bool, model_dir: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old:
        settle(model_dir, monkeypatch)
    model = load_model(str(model_dir))
    assert model.target
    change(model_dir)
    with pytest.raises(ModelError):
        api.compile(model, store, TEXT)
    assert not store.keys()


@pytest.mark.parametrize("change", [*WRITES, *REPLACEMENTS])
def test_a_checkpoint_that_changes_while_it_is_loaded_is_refused(
    change: Change, model_dir: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it before the first byte is read: what was checked before is checked again afterwards."""
    require_weights = checkpoint.require_weights

    def change_and_require(*arguments: Any) -> None:
        require_weights(*arguments)
        change(model_dir)

    monkeypatch.setattr(checkpoint, "require_weights", change_and_require)
    with pytest.raises(ModelError):
        api.compile(load_model(str(model_dir)), store, TEXT)
    assert not store.keys()


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("change", WRITES)
def test_a_file_that_is_written_after_loading_ends_linking_and_storing(
    change: Change, is_old: bool, model_dir: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are mapped: a model that was loaded computes with what is written to its files."""
    if is_old:
        settle(model_dir, monkeypatch)
    model, policy = load_model(str(model_dir)), make_policy("naive")
    api.compile(model, store, TEXT)
    before = store.keys()
    change(model_dir)
    for _ in range(2):
        with pytest.raises(ModelError, match=f"model.safetensors: .*{CHANGED}"):
            api.compile(model, store, "Another text.")
        with pytest.raises(ModelError, match=CHANGED):
            api.link(model, store, [Text(TEXT)], "Why?", policy)
        with pytest.raises(ModelError, match=CHANGED):
            api.link(model, store, (), "A prompt without documents. " * 9, make_policy("prefix"))
    assert store.keys() == before
    again = load_model(str(model_dir))
    api.compile(again, store, TEXT)
    assert len(store.keys()) == 2


@pytest.mark.parametrize("change", REPLACEMENTS)
def test_files_that_are_replaced_after_loading_are_of_no_interest(
    change: Change, model_dir: Path, store: Store
) -> None:
    """The model goes on with the files that it has open, under the key of those."""
    model = load_model(str(model_dir))
    (first,) = api.compile(model, store, TEXT)
    written = first.path.read_bytes()
    change(model_dir)
    assert api.compile(model, store, TEXT, force=True)[0].path.read_bytes() == written


def test_what_only_touches_the_inode_is_no_change(
    model_dir: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(model_dir, monkeypatch)
    model = load_model(str(model_dir))
    api.compile(model, store, TEXT)
    weights_of(model_dir).chmod(0o600)
    os.link(weights_of(model_dir), model_dir / "backup")
    api.compile(model, store, "Another text.")
    assert len(store.keys()) == 2


def test_a_change_within_the_same_tick_is_seen_by_its_content(
    model_dir: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither times nor hashes that were kept are trusted while a file is so young that a write may leave its times."""
    states: dict[int, FileState] = {}
    of = FileState.of

    def frozen(status: os.stat_result) -> FileState:
        return states.setdefault(status.st_ino, of(status))

    monkeypatch.setattr(FileState, "of", frozen)
    model = load_model(str(model_dir))
    api.compile(model, store, TEXT)
    write_in_place(model_dir)
    with pytest.raises(ModelError, match=CHANGED):
        api.compile(model, store, "Another text.")
    assert load_model(str(model_dir)).fingerprint != model.fingerprint


def test_a_file_that_is_written_while_it_is_hashed_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(model_dir, monkeypatch)
    hash_file = fingerprint._hash_file

    def hash_and_write(path: Path, name: str) -> dict[str, str]:
        hashes = hash_file(path, name)
        write_in_place(model_dir)
        return hashes

    monkeypatch.setattr(fingerprint, "_hash_file", hash_and_write)
    with pytest.raises(ModelError, match=CHANGED):
        _ = load_model(str(model_dir)).fingerprint
    monkeypatch.undo()
    shutil.rmtree(cache_dir(), ignore_errors=True)
    assert load_model(str(model_dir)).fingerprint


def test_a_link_stats_and_does_not_hash(model_dir: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(model_dir, monkeypatch)
    model = load_model(str(model_dir))
    api.compile(model, store, TEXT)
    monkeypatch.setattr(fingerprint, "_hash_file", lambda *_: pytest.fail("hashed again"))
    api.link(model, store, [Text(TEXT)], "Why?", make_policy("naive"))
    api.compile(model, store, "Another text.")


def test_loading_shows_no_bar(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Library code never prints, even where the bars of transformers are on."""
    enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        _ = load_model(str(model_dir)).module
    finally:
        if not enabled:
            logging.disable_progress_bar()
    assert capfd.readouterr() == ("", "")


def test_a_model_that_another_engine_runs_is_compared_too(model_dir: Path) -> None:
    """vLLM has the weights; of the model here only the files are known."""
    model = load_model(str(model_dir))
    model.require_storable()
    write_in_place(model_dir)
    with pytest.raises(ModelError, match=CHANGED):
        model.require_storable()


# Models in memory


def module_of(seed: int = 0, architecture: str = "llama") -> Any:
    return tiny.random_module(tiny.CONFIGS[architecture](), seed)


def wrap(module: Any) -> Model:
    return wrap_model(module, tiny.tokenizer())


class Lora(nn.Module):
    """An adapter as PEFT puts it in the place of a linear layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) * 2
        return out


def first_attention(module: Any) -> Any:
    return module.model.layers[0].self_attn


def add(module: Any) -> None:
    with torch.no_grad():
        first_attention(module).q_proj.weight.add_(1)


def add_by_data(module: Any) -> None:
    first_attention(module).k_proj.weight.data += 0.5


def swap_data(module: Any) -> None:
    weight = first_attention(module).v_proj.weight
    weight.data = weight.data * 2


def replace_weight(module: Any) -> None:
    first_attention(module).o_proj.weight = nn.Parameter(torch.zeros_like(first_attention(module).o_proj.weight))


def replace_layer(module: Any) -> None:
    module.model.layers[1] = module.model.layers[2]


def load_state(module: Any) -> None:
    module.load_state_dict(module_of(7).state_dict())


def other_frequencies(module: Any) -> None:
    module.model.rotary_emb.inv_freq *= 0.5


def new_frequencies(module: Any) -> None:
    module.model.rotary_emb.inv_freq = module.model.rotary_emb.inv_freq * 0.5


def hook(module: Any) -> None:
    first_attention(module).register_forward_hook(lambda _, __, out: (out[0] * 2, *out[1:]))


def pre_hook(module: Any) -> None:
    module.model.layers[1].mlp.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))


def own_forward(module: Any) -> None:
    layer = module.model.layers[0].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2


def adapter(module: Any) -> None:
    first_attention(module).q_proj = Lora(first_attention(module).q_proj)


def other_attention(module: Any) -> None:
    module.set_attn_implementation("sdpa")


IN_PLACE = [add, add_by_data, swap_data, load_state, other_frequencies]
REPLACED = [replace_weight, replace_layer, new_frequencies, other_attention]
REFUSED: dict[Callable[[Any], None], str] = {
    hook: "self_attn ", pre_hook: "mlp ", own_forward: "mlp ", adapter: "q_proj .*Lora",
}  # fmt: skip


@pytest.mark.parametrize("change", [*IN_PLACE, *REPLACED, *REFUSED])
def test_a_module_that_changes_stores_nothing_any_more(change: Callable[[Any], None], store: Store) -> None:
    module = module_of()
    model = wrap(module)
    api.compile(model, store, TEXT)
    before = store.keys()
    change(module)
    for _ in range(2):
        with pytest.raises(ModelError, match=REFUSED.get(change, CHANGED) + "|" + CHANGED):
            api.compile(model, store, "Another text.")
        with pytest.raises(ModelError):
            api.link(model, store, (), "A prompt without documents. " * 9, make_policy("prefix"))
    assert store.keys() == before
    if change not in REFUSED:
        assert wrap(module).fingerprint != model.fingerprint or change is other_attention


@pytest.mark.parametrize("change", REFUSED)
def test_hooks_and_adapters_are_refused_by_name(change: Callable[[Any], None]) -> None:
    module = module_of()
    change(module)
    with pytest.raises(ModelError, match=f"in-memory: model.layers.*{REFUSED[change]}"):
        wrap(module)


@pytest.mark.parametrize("change", IN_PLACE[:-1])
def test_objects_of_other_weights_are_not_linked(change: Callable[[Any], None], store: Store) -> None:
    module = module_of()
    model = wrap(module)
    api.compile(model, store, TEXT)
    change(module)
    if change is not add_by_data:  # shows in a sample only, which no link reads
        with pytest.raises(ModelError, match=CHANGED):
            api.link(model, store, [Text(TEXT)], "Why?", make_policy("naive"))


@pytest.mark.parametrize("architecture", ["llama", "llama-dynamic", "phi3-long", "gemma3"])
def test_frequencies_are_part_of_a_fingerprint_if_they_are_not_the_configurations(architecture: str) -> None:
    module = module_of(architecture=architecture)
    fingerprint_of = wrap(module).fingerprint
    for model in (wrap(module_of(architecture=architecture)), wrap(module)):
        model.stack.rotary_tables(torch.arange(300))  # dynamic and long ones change by themselves
        assert wrap(model.module).fingerprint == fingerprint_of
    rotary = module.model.rotary_emb
    for name, buffer in list(rotary.named_buffers(remove_duplicate=False)):
        setattr(rotary, name, buffer * 0.5)
    assert wrap(module).fingerprint != fingerprint_of


def test_frequencies_in_half_precision_are_others() -> None:
    module = module_of().half()
    fingerprint_of = wrap(module).fingerprint
    assert module.model.rotary_emb.inv_freq.dtype == torch.float16
    module.model.rotary_emb = module_of().model.rotary_emb
    assert wrap(module).fingerprint != fingerprint_of


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_a_checkpoint_is_read_as_transformers_writes_it(architecture: str, tmp_path: Path) -> None:
    """In whose files some weights have other names than in the module."""
    module = module_of(architecture=architecture)
    module.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    read = dict(load_model(str(tmp_path), "cpu").module.named_parameters())
    assert all(torch.equal(parameter, dict(module.named_parameters())[name]) for name, parameter in read.items())


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_what_a_model_does_by_itself_is_no_change(architecture: str, store: Store) -> None:
    """Long prompts, decoding, transformers' own hooks, and weights without versions."""
    with torch.inference_mode():
        module = module_of(architecture=architecture)
    model, policy = wrap(module), make_policy("legolink", {"k": 2})
    for text in (TEXT, "The market. " * 30):
        api.compile(model, store, text)
        api.answer(model, store, replace(Spec.raw([Text(text)], "Why?", policy), max_new_tokens=4))
    with torch.no_grad():
        api.compile(model, store, "Another text.")
    assert len(store.keys()) >= 3

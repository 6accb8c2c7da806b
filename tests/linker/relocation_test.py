"""Relocation and repair of caches of `transformers`: against links of the same chunks, and against its own forward."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import reference
import tiny
import torch
from subjects import LENGTHS, Subject, make_chunks, run, subject
from torch import Tensor
from transformers import DynamicCache, StaticCache

import pictool
from pictool.errors import InputError, ModelError
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.runtime.architectures import cache_name
from pictool.runtime.rope import RotaryTables, tables_between
from pictool.store.store import Store

ARCHITECTURES = [
    "llama", "llama-yarn", "mistral-window", "qwen2", "phi3-partial", "gemma3", "glm4", "smollm3", "llama4", "gpt_oss",
    "mixtral", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v3-yarn", "ministral3", "in gemma3",
]  # fmt: skip
NUM_NEW = 12
ROOT = Path(__file__).parents[2]


@torch.no_grad()
def filled(module: Any, tokens: Sequence[int], start: int = 0, cache: Any = None) -> Any:
    """A cache as the model's own forward of tokens at the positions from `start` on fills it."""
    cache = DynamicCache() if cache is None else cache
    positions = torch.arange(start, start + len(tokens))[None]
    module(input_ids=torch.tensor([list(tokens)]), position_ids=positions, **{cache_name(module): cache})
    return cache


def changeable(architecture: str) -> Any:
    """A copy of transformers' own model, which no other test has."""
    return copy.deepcopy(subject(architecture).pristine)


def joined(caches: Sequence[Any]) -> Any:
    """Caches one after the other, as one."""
    whole = DynamicCache()
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        parts = ([layer.keys for layer in layers], [layer.values for layer in layers])
        whole.update(*(torch.cat(part, 2) for part in parts), index)
    return whole


def parts_of(linked: Linked) -> list[tuple[int, list[int]]]:
    """Where head and chunks begin, and their tokens."""
    layout = linked.image.layout
    return [(start, layout.tokens[start:end].tolist()) for start, end in (layout.head, *layout.chunks)]


def assembled(module: Any, linked: Linked) -> Any:
    """Head and chunks of a link, each computed by transformers alone, from 0 on, and relocated."""
    parts = [part for _, part in parts_of(linked)]
    cache = joined([filled(module, part) for part in parts])
    alone = [position for part in parts for position in range(len(part))]
    return pictool.relocate(cache, alone, range(len(alone)), module)


def apart(cache: Any, kv: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of a number; a layer with a window has the last tokens alone."""
    pairs = [
        (mine, theirs[:, :, theirs.shape[2] - mine.shape[2] :])
        for layer, of_layer in zip(cache.layers, kv, strict=True)
        for mine, theirs in zip((layer.keys, layer.values), of_layer, strict=True)
    ]
    return max(float((mine.float() - theirs.float()).abs().max()) for mine, theirs in pairs)


def kv_of(linked: Linked) -> list[tuple[Tensor, Tensor]]:
    """Of head and chunks."""
    image, end = linked.image, linked.image.layout.num_context
    return [(image.key(i)[:, :, :end], image.value(i)[:, :, :end]) for i in range(image.stack.geometry.layers)]


def starts_of(linked: Linked) -> list[int]:
    return [start for start, _ in linked.image.layout.chunks]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_are_relocated_and_repaired_as_a_link_does(architecture: str, store: Store) -> None:
    one, chunks = subject(architecture), make_chunks(LENGTHS)
    linked = run(one, store, make_policy("naive", {}), chunks)
    cache, tokens = assembled(one.reference, linked), linked.image.layout.tokens[: linked.image.layout.num_context]
    assert apart(cache, kv_of(linked)) <= 1e-5
    for policy in ("legolink-4", "full"):
        repaired = pictool.repair(cache, tokens.tolist(), policy, one.reference, starts_of(linked))
        wanted = run(one, store, pictool.make_policy(policy), chunks)
        assert apart(repaired, kv_of(wanted)) <= 1e-4
        assert apart(cache, kv_of(linked)) <= 1e-5  # it is not written to
    scattered = torch.arange(len(tokens)) % 3 == 1
    repaired = pictool.repair(cache, torch.tensor(tokens)[None], scattered, one.reference)
    dense = reference.link(one.reference, [part for _, part in parts_of(linked)], scattered)
    assert apart(repaired, dense.kv) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "llama-yarn", "gemma3", "glm4", "gpt_oss", "deepseek_v2"])
def test_half_precision_has_the_noise_of_its_dtype(architecture: str, dtype: torch.dtype, store: Store) -> None:
    """Layer 0 to some last bits; all layers to what half precision costs transformers itself, of the same chunks."""
    module = tiny.random_module(tiny.CONFIGS[architecture]()).to(dtype)
    one = Subject(pictool.wrap_model(module, tiny.tokenizer(), architecture), reference.eager(module))
    linked = run(one, store, make_policy("legolink", {"k": 4}), make_chunks(LENGTHS))
    cache, tokens = assembled(one.pristine, linked), linked.image.layout.tokens[: linked.image.layout.num_context]
    in_place = joined([filled(one.pristine, part, start) for start, part in parts_of(linked)])
    mine, theirs = cache.layers[0].keys.float(), in_place.layers[0].keys.float()
    assert (mine - theirs).norm() <= torch.finfo(dtype).eps * theirs.norm()
    repaired = pictool.repair(cache, tokens.tolist(), "legolink-4", one.pristine, starts_of(linked))
    in_float32 = copy.deepcopy(one.pristine).float()
    exact = pictool.repair(assembled(in_float32, linked), tokens.tolist(), "legolink-4", in_float32, starts_of(linked))
    of_exact = [(layer.keys, layer.values) for layer in exact.layers]
    noise = apart(one_cache(kv_of(linked)), of_exact)
    assert apart(repaired, of_exact) <= 2 * noise


def one_cache(kv: Sequence[tuple[Tensor, Tensor]]) -> Any:
    cache = DynamicCache()
    for index, pair in enumerate(kv):
        cache.update(*pair, index)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama3", "llama-linear"])
def test_to_the_same_positions_is_the_identity_and_back_again_nearly(architecture: str, dtype: torch.dtype) -> None:
    module, tokens = changeable(architecture).to(dtype), list(range(3, 43))
    cache = filled(module, tokens)
    same = pictool.relocate(cache, range(40), range(40), module)
    for mine, theirs in zip(same.layers, cache.layers, strict=True):
        for ours, given in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert ours.equal(given) and ours.data_ptr() != given.data_ptr() and not ours.is_inference()
    moved = pictool.relocate(cache, torch.arange(40), range(7, 47), module)
    back = pictool.relocate(moved, range(7, 47), torch.arange(40), module)
    scale = max(float(layer.keys.abs().max()) for layer in cache.layers)
    assert apart(back, [(layer.keys, layer.values) for layer in cache.layers]) <= 2 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("architecture", ["gemma3", "gpt_oss", "mistral-window"])
def test_a_layer_with_a_window_holds_the_last_tokens_and_goes_on(architecture: str) -> None:
    """A cache that is made with a config drops the others: it is relocated, but its rows cannot be computed."""
    module, tokens = subject(architecture).reference, list(range(3, 43))
    cache = filled(module, tokens, cache=DynamicCache(config=module.config))
    assert min(layer.keys.shape[2] for layer in cache.layers) < 40
    moved = pictool.relocate(cache, range(40), range(8, 48), module)
    assert moved.get_seq_length() == 40
    assert apart(moved, reference.isolated(module, tokens, 8)) <= 1e-5
    alone, whole = [*range(25), *range(15)], filled(module, tokens)  # two chunks, of which the second moves
    second = pictool.relocate(whole, alone, range(40), module)
    joint = pictool.relocate(cache, alone, range(40), module)
    assert apart(joint, [(layer.keys, layer.values) for layer in second.layers]) <= 1e-5
    filled(module, [50], 48, moved)
    assert moved.get_seq_length() == 41 and cache.get_seq_length() == 40
    with pytest.raises(InputError, match=r"^past_key_values: "):
        pictool.repair(cache, tokens, "full", module)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "glm4", "gpt_oss", "deepseek_v3"])
def test_a_repaired_cache_continues_as_after_a_prefill(architecture: str, store: Store) -> None:
    """By the model's own `generate`, which computes what comes after the cache; its attention function is its own."""
    one = subject(architecture)
    linked = run(one, store, make_policy("naive", {}), make_chunks(LENGTHS))
    module, ids = one.reference, torch.tensor(linked.image.layout.tokens.tolist())[None]
    tokens = ids[:, : linked.image.layout.num_context]
    repaired = pictool.repair(assembled(module, linked), tokens, "full", module)
    assert apart(repaired, [(layer.keys, layer.values) for layer in filled(module, tokens[0].tolist()).layers]) <= 1e-4
    wanted = module.generate(ids, max_new_tokens=NUM_NEW, do_sample=False)
    assert module.generate(ids, past_key_values=repaired, max_new_tokens=NUM_NEW, do_sample=False).equal(wanted)


def test_a_model_of_ours_and_one_of_transformers_give_the_same(store: Store) -> None:
    one = subject("llama")
    linked = run(one, store, make_policy("naive", {}), make_chunks(LENGTHS))
    tokens = linked.image.layout.tokens[: linked.image.layout.num_context].tolist()
    cache = assembled(one.reference, linked)
    ours = pictool.repair(cache, tokens, make_policy("legolink", {"k": 4}), one.model, starts_of(linked))
    theirs = pictool.repair(cache, tokens, "legolink-4", one.reference, starts_of(linked))
    assert apart(ours, [(layer.keys, layer.values) for layer in theirs.layers]) <= 1e-5
    unchanged = pictool.repair(cache, tokens, "naive", one.reference, starts_of(linked))
    assert apart(unchanged, [(layer.keys, layer.values) for layer in cache.layers]) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_is_afterwards_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.random_module(tiny.CONFIGS["in gemma3"]())
    module.set_attn_implementation({"": "sdpa", "text_config": "eager"})
    text, kinds = module.config.get_text_config(), [type(layer) for layer in module.modules()]
    cache = filled(module, range(3, 12))
    if fails:
        monkeypatch.setattr("pictool.runtime.memory.image.Image.project", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            pictool.repair(cache, range(3, 12), "full", module)
    else:
        pictool.repair(cache, range(3, 12), "full", module)
    assert (module.config._attn_implementation, text._attn_implementation) == ("sdpa", "eager")
    assert [type(layer) for layer in module.modules()] == kinds
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_several_sequences_are_relocated_together() -> None:
    module = subject("qwen2").reference
    caches = [filled(module, range(3, 9)), filled(module, range(30, 36))]
    both = DynamicCache()
    for index, (first, second) in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        both.update(torch.cat([first.keys, second.keys]), torch.cat([first.values, second.values]), index)
    moved = pictool.relocate(both, range(6), range(9, 15), module)
    alone = pictool.relocate(caches[1], range(6), range(9, 15), module)
    assert all(mine.keys[1:].equal(own.keys) for mine, own in zip(moved.layers, alone.layers, strict=True))
    with pytest.raises(InputError, match=r"^past_key_values: "):
        pictool.repair(both, range(3, 9), "full", module)


def test_a_quotient_undoes_the_scale_of_yarn_and_the_rounding_of_half_precision() -> None:
    for architecture in ("llama-yarn", "deepseek_v3-yarn", "deepseek_v2"):
        stack = pictool.wrap_model(changeable(architecture).bfloat16(), tiny.tokenizer()).stack
        first, second = (stack.rotary_tables(torch.arange(start, start + 90)) for start in (0, 30))
        x = torch.randn(1, 2, 90, stack.geometry.parts[1].width if stack.geometry.others else 8)
        moved = stack.rotate(stack.rotate(x, tables_in_float32(first), 0), tables_between(first, second), 0)
        torch.testing.assert_close(moved, stack.rotate(x, tables_in_float32(second), 0), atol=1e-5, rtol=0)


def tables_in_float32(tables: RotaryTables) -> RotaryTables:
    kinds = tables.of_kind.items()
    return RotaryTables(
        tables.positions,
        {kind: tuple(part if part.is_complex() else part.float() for part in table) for kind, table in kinds},
    )


@pytest.mark.parametrize("architecture", ["llama-dynamic", "phi3-long", "bamba", "qwen3_next", "lfm2"])
def test_models_whose_keys_positions_do_not_determine_are_refused(architecture: str) -> None:
    module, kind = subject(architecture).reference, tiny.CONFIGS[architecture]().model_type
    calls: list[Callable[[], Any]] = [
        lambda: pictool.relocate(DynamicCache(), [0], [1], module),
        lambda: pictool.repair(DynamicCache(), [0], "full", module),
        lambda: pictool.relocate(DynamicCache(), [0], [1], subject(architecture).model),
    ]
    for call in calls:
        with pytest.raises(ModelError) as error:
            call()
        assert kind in str(error.value) or type(module).__name__ in str(error.value) or architecture in str(error.value)
        assert "\n" not in str(error.value)


def static(module: Any) -> StaticCache:
    return filled(module, range(3, 9), cache=StaticCache(config=module.config, max_cache_len=20))


def other(architecture: str, **more: Any) -> Callable[[Any], Any]:
    """A cache that another model filled."""
    config = tiny.CONFIGS[architecture]()
    for name, value in more.items():
        setattr(config, name, value)
    return lambda _: filled(tiny.random_module(config), range(3, 9))


def in_bfloat16(module: Any) -> Any:
    return filled(copy.deepcopy(module).bfloat16(), range(3, 9))


CACHES: list[Callable[[Any], Any]] = [
    lambda _: None, lambda _: ((torch.zeros(1, 2, 6, 8),) * 2,) * 3, lambda _: DynamicCache(),
    lambda module: DynamicCache(config=module.config), static, in_bfloat16,
    other("llama", num_hidden_layers=2), other("llama", num_key_value_heads=4), other("llama", head_dim=16),
    other("deepseek_v3"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CACHES)))
def test_caches_of_another_kind_or_model_are_refused(number: int) -> None:
    module = subject("llama").reference
    cache = CACHES[number](module)
    calls: list[Callable[[], Any]] = [
        lambda: pictool.relocate(cache, range(6), range(1, 7), module),
        lambda: pictool.repair(cache, range(3, 9), "full", module),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"^past_key_values: ") as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("from_positions", range(5), range(6)),
        ("from_positions", [0.0] * 6, range(6)),
        ("from_positions", [True] * 6, range(6)),
        ("from_positions", range(-1, 5), range(6)),
        ("from_positions", range(507, 513), range(6)),
        ("to_positions", range(6), range(7)),
        ("to_positions", range(6), range(507, 513)),
        ("to_positions", range(6), range(-2, 4)),
        ("to_positions", range(6), [0, 1, 2, 2, 3, 4]),
        ("to_positions", range(6), [3, 4, 5, 0, 1, 2]),
    ],
)
def test_positions_that_cannot_be_are_refused(name: str, before: Any, after: Any) -> None:
    module = subject("llama").reference
    assert subject("llama").model.max_positions == 512
    with pytest.raises(InputError, match=f"^{name}: ") as error:
        pictool.relocate(filled(module, range(3, 9)), before, after, module)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tokens", "rows", "starts"),
    [
        ("tokens", range(3, 8), "full", ()),
        ("tokens", [3, 4, 5, 6, 7, tiny.VOCAB], "full", ()),
        ("rows", range(3, 9), [True] * 5, ()),
        ("rows", range(3, 9), [0, 1, 2, 3, 4, 5], ()),
        ("rows", range(3, 9), torch.ones(1, 6, dtype=torch.bool), ()),
        ("legolink", range(3, 9), "legolink-4", ()),
        ("starts", range(3, 9), "legolink-4", [2, 2]),
        ("starts", range(3, 9), "legolink-4", [2, 6]),
        ("cacheblend", range(3, 9), "cacheblend-15", [2]),
        ("prophet", range(3, 9), "prophet", [2]),
        ("auto", range(3, 9), "auto", [2]),
        ("prefix", range(3, 9), "prefix", [2]),
        ("algorithm", range(3, 9), "none", [2]),
    ],
)
def test_rows_that_cannot_be_are_refused(name: str, tokens: Any, rows: Any, starts: Any) -> None:
    module = subject("llama").reference
    with pytest.raises(InputError, match=f"^{name}") as error:
        pictool.repair(filled(module, range(3, 9)), tokens, rows, module, starts)
    assert "\n" not in str(error.value)


def test_a_model_in_training_and_one_with_a_hook_are_refused() -> None:
    module = changeable("llama")
    cache = filled(module, range(3, 9))
    with pytest.raises(ModelError, match=r"eval\(\)"):
        pictool.repair(cache, range(3, 9), "full", module.train())
    module.eval().model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="hook"):
        pictool.repair(cache, range(3, 9), "full", module)


def test_the_guide_s_example_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    guide = (ROOT / "docs" / "guides" / "your-own-cache.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.startswith(" Temmere")

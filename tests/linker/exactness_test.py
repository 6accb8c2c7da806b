"""The exactness rules of docs/design.md §2, on every supported architecture × policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from alone import compile
from flips import difference_but_at_ties
from subjects import (
    FAMILIES,
    HEAD,
    LENGTH_DEPENDENT,
    LENGTHS,
    PLACED,
    SCALED,
    STATES,
    TAIL,
    Subject,
    default_policy,
    each_kind,
    families,
    is_linkable,
    linkable,
    make_chunks,
    max_difference,
    parts_of,
    run,
    subject,
)

from pictool.core import PromptText
from pictool.errors import ForeignObjectError, ObjectError
from pictool.linker.policies import make_policy, policies
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.runtime.decode import generate
from pictool.runtime.memory import image as image_module
from pictool.runtime.model import wrap_model
from pictool.store.store import Store

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("legolink", {"k": 4}), ("naive", {}), ("legolink", {"k": 1}), ("legolink", {"k": 16}),
]  # fmt: skip
EVERYTHING: list[tuple[str, dict[str, Any]]] = [
    ("full", {}), ("legolink", {"k": 1000}), ("cacheblend", {"ratio": 1}), ("speccache", {"ratio": 1}),
    ("prophet", {"ratio": 1}), ("prefix", {}),
]  # fmt: skip

# The first layer of most hybrids has no keys; for its states see hybrids_test.py.
WITH_KEYS = [name for name in FAMILIES if name not in tiny.HYBRIDS or name == "falcon_h1"]


def selections(architectures: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every policy on three architectures; on the others all rows, rows after dummy tokens, and rows by layer."""
    for name in architectures:
        some = ("full", "legolink") if name in tiny.HYBRIDS else ("full", "legolink", "cacheblend")
        kinds = policies() if name in ("llama", "gemma3", "deepseek_v3") else some
        yield from linkable([name], kinds)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that tests share, so that each architecture's chunks are compiled once: no link writes to an object."""
    return Store(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_rule_1_the_prompt_is_the_concatenation(architecture: str, compiled: Store) -> None:
    one, chunks = subject(architecture), make_chunks(LENGTHS)
    linked = run(one, compiled, make_policy("naive", {}), chunks)
    encode = one.model.encode
    wanted = [*encode(PromptText(HEAD)), *(token for chunk in chunks for token in chunk.tokens), *encode(TAIL)]
    assert linked.image.layout.tokens.tolist() == wanted
    assert wanted[0] == one.model.bos_id


@pytest.mark.parametrize("architecture", FAMILIES)
def test_rule_2_full_is_the_model_itself(architecture: str, compiled: Store) -> None:
    one = subject(architecture)
    linked = run(one, compiled, make_policy("full", {}), make_chunks(LENGTHS))
    ids = torch.tensor(linked.image.layout.tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = one.reference(ids).logits[0, -1]
    assert float((linked.image.logits - logits).abs().max()) <= 1e-4
    wanted = one.reference.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert list(generate(one.model, linked.image, 12).tokens) == wanted.tolist()


@pytest.mark.parametrize(("architecture", "policy"), [*selections([*each_kind(), *STATES])])
def test_rows_that_are_computed_a_few_at_a_time_are_as_at_once(
    architecture: str, policy: str, compiled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, chunks = subject(architecture), make_chunks(LENGTHS)
    at_once = run(one, compiled, default_policy(policy), chunks).image
    monkeypatch.setattr(image_module, "_AT_ONCE", 5)
    apart = run(one, compiled, default_policy(policy), chunks).image
    torch.testing.assert_close(apart.logits, at_once.logits, atol=1e-4, rtol=0)
    for layer in range(one.model.geometry.layers):
        torch.testing.assert_close(apart.key(layer), at_once.key(layer), atol=1e-4, rtol=0)
        torch.testing.assert_close(apart.value(layer), at_once.value(layer), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("architecture", "policy"), [*selections(WITH_KEYS)])
def test_rule_3_layer_0_is_exact(architecture: str, policy: str, compiled: Store) -> None:
    one, chunks = subject(architecture), make_chunks(LENGTHS)
    exact = run(one, compiled, make_policy("full", {}), chunks).image
    image = run(one, compiled, default_policy(policy), chunks).image
    assert float((image.key(0) - exact.key(0)).abs().max()) <= 1e-5
    assert float((image.value(0) - exact.value(0)).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("architecture", "policy", "fields"),
    [(name, policy, fields) for name in FAMILIES for policy, fields in EVERYTHING if is_linkable(name, policy)],
)
def test_rule_4_recomputing_everything_is_full(
    architecture: str, policy: str, fields: dict[str, Any], compiled: Store
) -> None:
    one = subject(architecture)
    apart, _ = difference_but_at_ties(
        one, lambda: run(one, compiled, make_policy(policy, fields), make_chunks(LENGTHS))
    )
    assert apart <= 1e-4


@pytest.mark.parametrize(("architecture", "policy"), [*selections(FAMILIES)])
def test_rule_4_one_head_and_no_chunk_is_full(architecture: str, policy: str, compiled: Store) -> None:
    one = subject(architecture)
    head = "<s>It holds a festival in the spring; nobody knows."
    apart, _ = difference_but_at_ties(one, lambda: run(one, compiled, default_policy(policy), [], head=head))
    assert apart <= 1e-4


@pytest.mark.parametrize(
    ("architecture", "head", "policy", "fields"),
    [
        (name, head, policy, fields)
        for name in families(*LENGTH_DEPENDENT, *PLACED, *tiny.HYBRIDS)
        for head in ("", HEAD)
        for policy, fields in POLICIES[: len(POLICIES) if name in each_kind() else 2]
        # The reference has no position for dummy tokens before the prompt.
        if head or name not in SCALED or "s" not in fields
    ],
)
def test_rule_5_a_link_equals_the_dense_reference(
    architecture: str, head: str, policy: str, fields: dict[str, Any], compiled: Store
) -> None:
    one, chunks = subject(architecture), make_chunks(LENGTHS)
    linked = run(one, compiled, make_policy(policy, fields), chunks, head=head)
    rows = torch.zeros(linked.image.layout.num_tokens, dtype=torch.bool)
    k = fields.get("k", 0)
    for index, (start, end) in enumerate(linked.image.layout.chunks):
        if head or index:
            rows[start : min(start + k, end)] = True
    rows[linked.image.layout.tail[0] :] = True
    assert np.array_equal(linked.rows, np.tile(rows.numpy(), (3, 1)))
    assert max_difference(linked, reference.link(one.reference, parts_of(linked), rows)) <= 1e-4


@pytest.mark.parametrize("architecture", FAMILIES)
def test_policies_matter_on_these_models(architecture: str, compiled: Store) -> None:
    """The tables above would pass on a model for which linking changes nothing; these models are not such."""
    one = subject(architecture)
    linked = run(one, compiled, make_policy("naive", {}), make_chunks(LENGTHS))
    assert max_difference(linked, reference.full(one.reference, sum(parts_of(linked), []))) > 0.01


class Scattered(Policy):
    """Any set of rows: every third, of every chunk, head included."""

    name = "scattered-test"  # type: ignore[misc]

    def select(self, prompt: Prompt) -> Selection:
        return Selection(np.arange(prompt.layout.num_context) % 3 == 1)


@pytest.mark.parametrize("architecture", families(*LENGTH_DEPENDENT, *PLACED, *tiny.HYBRIDS))
def test_rule_5_scattered_rows_attend_causally(architecture: str, compiled: Store) -> None:
    one = subject(architecture)
    linked = run(one, compiled, Scattered(), make_chunks(LENGTHS))
    rows = torch.from_numpy(linked.rows[0])
    assert rows.sum() > 20
    assert max_difference(linked, reference.link(one.reference, parts_of(linked), rows)) <= 1e-4


@pytest.mark.parametrize("architecture", [*each_kind(), *STATES])
def test_rule_6_linking_writes_to_no_object(architecture: str, store: Store) -> None:
    one, chunks, policy = subject(architecture), make_chunks(LENGTHS), make_policy("legolink", {"k": 4})
    first = run(one, store, policy, chunks)
    before = {key: store.path(key).read_bytes() for key in store.keys()}
    logits, keys = first.image.logits, [first.image.key(i).clone() for i in range(one.model.geometry.layers)]
    run(one, store, policy, chunks[::-1])
    again = run(one, store, policy, chunks)
    assert torch.equal(again.image.logits, logits)  # type: ignore[arg-type]
    assert all(torch.equal(again.image.key(layer), key) for layer, key in enumerate(keys))
    assert before == {key: store.path(key).read_bytes() for key in before}


@pytest.mark.parametrize("architecture", LENGTH_DEPENDENT)
def test_a_head_is_computed_where_rope_depends_on_the_length(architecture: str, store: Store) -> None:
    """Beyond the switch of long RoPE (and with dynamic scaling) the head's own KV is another one: naive computes it."""
    one, policy = subject(architecture), make_policy("naive", {})
    short = run(one, store, policy, make_chunks((3,)))
    assert not short.rows[:, 0].any()
    long = run(one, store, policy, make_chunks((120, 29)))
    assert long.rows[:, : long.image.layout.head[1]].all()
    exact = run(one, store, make_policy("legolink", {"k": 1000}), make_chunks((120, 29)))
    assert max_difference(exact, reference.full(one.reference, sum(parts_of(exact), []))) <= 1e-4


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((name, "bfloat16") for name in FAMILIES), *((name, "float16") for name in (*each_kind(), *STATES))],
)
def test_half_precision_full_and_all_rows_agree_within_its_noise(architecture: str, dtype: str, store: Store) -> None:
    """The noise is stated: what the dtype itself costs, transformers' half against its float32 on the same prompt."""
    module = tiny.random_module(tiny.CONFIGS[architecture]()).to(getattr(torch, dtype))
    one = Subject(wrap_model(module, tiny.tokenizer(), architecture), reference.eager(module))
    chunks = make_chunks(LENGTHS)
    exact = run(one, store, make_policy("full", {}), chunks).image.logits
    linked = run(one, store, make_policy("legolink", {"k": 1000}), chunks)
    in_float32 = reference.full(reference.eager(module.float()), sum(parts_of(linked), [])).logits
    assert exact is not None and linked.image.logits is not None
    noise = float((exact - in_float32).abs().max())
    assert float((linked.image.logits - exact).abs().max()) <= 2 * noise
    assert noise < 0.3 if dtype == "bfloat16" else noise < 0.05


@pytest.mark.parametrize("architecture", [*each_kind(), *STATES])
def test_rule_7_foreign_and_damaged_objects_are_refused(architecture: str, store: Store, tmp_path: Path) -> None:
    """Another model's object is refused by name, and one flipped bit in any layer before the link gives an answer."""
    one, (chunk,) = subject(architecture), make_chunks((29,))
    (mine,) = compile(one.model, store, [chunk])
    run(one, store, make_policy("legolink", {"k": 16}), [mine.path])
    other = wrap_model(tiny.random_module(tiny.CONFIGS[architecture](), seed=1), tiny.tokenizer(), "other")
    (foreign,) = compile(other, store, [chunk])
    with pytest.raises(ForeignObjectError, match=f"{other.fingerprint[:12]}.*{one.model.fingerprint[:12]}"):
        run(one, store, make_policy("legolink", {"k": 16}), [foreign.path])
    whole = mine.path.read_bytes()
    for at in range(len(whole) // 3, len(whole), len(whole) // 9):
        damaged = tmp_path / "damaged.kvo"
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(ObjectError, match=r"damaged\.kvo: "):
            run(one, store, make_policy("legolink", {"k": 16}), [damaged])

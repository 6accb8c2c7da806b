"""Rows of one process: every number against links made by hand, scipy, and transformers' own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from eval.shared import CASES, SPECS, A, B, C, case, model
from scipy.stats import entropy
from transformers import LlamaConfig

from pictool.api import compile, link
from pictool.core import Chunk, PromptText, Sampling
from pictool.errors import ModelError, PicError
from pictool.eval.cases import CaseGroup, PreparedCase, SpecOptions, group_cases
from pictool.eval.metrics import METRICS
from pictool.eval.policies import parse_policies
from pictool.eval.results import CaseResult
from pictool.eval.runner import Runner, object_store
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.linker.resolve import Part, separated
from pictool.runtime.decode import generate
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store

ALGORITHMS = parse_policies(SPECS)
LABELS = tuple(algorithm.label for algorithm in ALGORITHMS)
POLICIES = {
    "full": make_policy("full", {}), "naive": make_policy("naive", {}), "legolink-2": make_policy("legolink", {"k": 2}),
    "cacheblend-30": make_policy("cacheblend", {"ratio": 0.3}), "legolink-1": make_policy("legolink", {"k": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def opened() -> Model:
    return model()


def groups_of(opened: Model, *cases: Any) -> tuple[CaseGroup, ...]:
    return group_cases(opened, cases, SpecOptions()).groups


def rows_of(opened: Model, store: Store, *cases: Any) -> dict[tuple[str, str], CaseResult]:
    runner = Runner(opened, store, ALGORITHMS)
    tasks = [(group, {prepared.id: LABELS for prepared in group.cases}) for group in groups_of(opened, *cases)]
    return {row.key: row for task in tasks for row in runner.run(*task)}


@pytest.fixture(scope="module")
def rows(opened: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], CaseResult]:
    return rows_of(opened, Store(tmp_path_factory.mktemp("store")), *CASES)


def documents_and_tail(opened: Model, group: CaseGroup, prepared: PreparedCase) -> tuple[list[Chunk], PromptText]:
    """What comes after the head of a prompt, with its separators."""
    parts = separated(opened, [Part(chunk) for chunk in group.chunks], "\n\n")
    return [part.chunk for part in parts], prepared.frame.tail_after(parts[-1].chunk.text, "\n\n")


def links(opened: Model, store: Store, name: str) -> dict[str, Linked]:
    """A case's prompt under every policy, in a store of its own where each chunk is compiled alone."""
    group, prepared = next(
        (group, prepared) for group in groups_of(opened, *CASES) for prepared in group.cases if prepared.id == name
    )
    head = Chunk(prepared.frame.head.text, opened.encode(prepared.frame.head), "head")
    for chunk in (head, *group.chunks):
        compile(opened, store, [chunk])
    documents, tail = documents_and_tail(opened, group, prepared)
    return {
        label: link(opened, store, documents, tail, policy, head=prepared.frame.head)
        for label, policy in POLICIES.items()
    }


def test_a_row_for_every_case_and_label_in_order(rows: dict[tuple[str, str], CaseResult]) -> None:
    assert list(rows) == [(case.id, label) for case in CASES for label in LABELS]
    first = rows["one", "cacheblend-30"]
    assert (first.kind, first.algo, first.params["ratio"], first.metric) == ("x", "cacheblend", 0.3, "f1")


@pytest.mark.parametrize("name", [case.id for case in CASES])
def test_answers_rows_and_fidelity_are_those_of_links(
    rows: dict[tuple[str, str], CaseResult], opened: Model, store: Store, name: str
) -> None:
    by_hand = links(opened, store, name)
    case = next(case for case in CASES if case.id == name)
    full = by_hand["full"].image.logits
    assert full is not None
    for label, linked in by_hand.items():
        row, logits = rows[name, label], linked.image.logits
        assert logits is not None
        p, q = full.double().softmax(-1).numpy(), logits.double().softmax(-1).numpy()
        assert row.kl == pytest.approx(entropy(p, q), abs=1e-9)
        assert row.kl is not None and row.answer_kl is not None and row.answer_kl >= row.kl
        assert label != "full" or row.answer_kl == pytest.approx(0, abs=1e-9)
        layout = linked.image.layout
        assert (row.rows, row.tokens, row.context) == (linked.recomputed, layout.num_tokens, layout.num_context)
        assert row.row_share == pytest.approx(linked.rows[:, : layout.num_context].mean())
        answer = generate(opened, linked.image, case.max_new_tokens, Sampling(stop=case.stop))
        assert (row.answer, row.generated) == (answer.text.strip(), len(answer.tokens))
        assert row.scores == {name: metric(row.answer, case.answers) for name, metric in METRICS.items()}


def test_full_answers_as_transformers_does(rows: dict[tuple[str, str], CaseResult], opened: Model) -> None:
    module = type(opened.module)(opened.config).eval()
    module.load_state_dict(opened.module.state_dict())
    group = groups_of(opened, CASES[3])[0]
    documents, tail = documents_and_tail(opened, group, group.cases[0])
    tokens = [*opened.encode(group.cases[0].frame.head), *documents[0].tokens, *opened.encode(tail)]
    assert len(documents) == 1 and tail.text.startswith("\n")
    ids = torch.tensor([tokens])
    done = reference.eager(module).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    text = opened.tokenizer.decode(done[0, len(tokens) :], skip_special_tokens=True)
    assert rows["four", "full"].answer == text.strip()


def test_agreement_is_by_position_over_the_longer_answer(opened: Model, store: Store) -> None:
    rows = rows_of(opened, store, case("x", [A, B, C], max_new_tokens=9))
    by_hand = {}
    for label, policy in POLICIES.items():
        group = groups_of(opened, case("x", [A, B, C], max_new_tokens=9))[0]
        documents, tail = documents_and_tail(opened, group, group.cases[0])
        linked = link(opened, store, documents, tail, policy, head=group.cases[0].frame.head)
        by_hand[label] = generate(opened, linked.image, 9).tokens
    full = by_hand["full"]
    for label, tokens in by_hand.items():
        same = np.array([a == b for a, b in zip(tokens, full, strict=False)])
        assert rows["x", label].agreement == pytest.approx(same.sum() / max(len(tokens), len(full)))
        prefix = len(same) if same.all() else int(np.argmin(same))
        assert rows["x", label].common_prefix == prefix
    assert any(row.agreement != 1 for row in rows.values()), "no policy answers otherwise: this test sees nothing"


def test_what_is_reused_is_read_and_full_reads_nothing(rows: dict[tuple[str, str], CaseResult], opened: Model) -> None:
    """A token's KV is 2 × 3 layers × 2 heads × 8 dims × 4 bytes."""
    for name in ("one", "two", "three", "four"):
        assert rows[name, "full"].bytes_read == 0
        assert rows[name, "naive"].bytes_read == 384 * (rows[name, "naive"].context - rows[name, "naive"].rows)
        assert rows[name, "full"].rows == rows[name, "full"].context


def test_times_are_there_and_their_parts_are_within_the_whole(rows: dict[tuple[str, str], CaseResult]) -> None:
    for row in rows.values():
        parts = row.timing.load_s + row.timing.select_s + row.timing.recompute_s
        assert 0 < row.timing.recompute_s <= row.timing.ttft_s and parts <= row.timing.ttft_s * (1 + 1e-9)


def test_only_what_is_wanted_is_run(opened: Model, store: Store) -> None:
    first = groups_of(opened, *CASES)[0]
    runner = Runner(opened, store, ALGORITHMS)
    found = runner.run(first, {"two": ("naive",)})
    assert [row.key for row in found] == [("two", "naive")]
    assert found[0].numbers == rows_of(opened, store, *CASES)["two", "naive"].numbers


def test_objects_are_those_that_policies_want_each_compiled_alone(opened: Model, store: Store) -> None:
    group = groups_of(opened, case("x", [A, B, A]))[0]
    Runner(opened, store, parse_policies([])).run(group, {"x": ("full",)})
    assert store.keys() == []
    Runner(opened, store, ALGORITHMS).run(group, {"x": ("legolink-1",)})
    after = [bool(found.meta.after) for found in store.objects() if found.meta and found.text in (A, B)]
    assert after == [True, True]
    Runner(opened, store, ALGORITHMS).run(group, {"x": LABELS})
    alone = Store(store.root / "alone")
    for found in store.objects():
        assert found.meta is not None
        chunk = Chunk(found.text, opened.encode(PromptText(found.text)), "x")
        assert compile(opened, alone, [chunk], after=found.meta.after)[0].key == found.key
        assert alone.path(found.key).read_bytes() == found.path.read_bytes()


def test_objects_of_other_threads_are_kept_apart(opened: Model, store: Store) -> None:
    one, same, four = (object_store(store, opened, threads).root for threads in (1, 1, 4))
    assert one == same != four and one.parent == store.root / "eval"


def test_errors_name_the_case_and_the_policy(opened: Model, store: Store, tmp_path: Path) -> None:
    small = tiny.save_model(tmp_path, LlamaConfig(**{**tiny.SIZE, "max_position_embeddings": 60}))
    algorithms = parse_policies([f"speccache:spec_model={small}"])
    task = (groups_of(opened, CASES[0])[0], {"one": ("full", algorithms[1].label)})
    with pytest.raises(PicError, match=rf"^case one, speccache-15:\S+: .* \d+ .*{small}"):
        Runner(opened, store, algorithms).run(*task)


def test_a_policy_that_does_not_suit_the_model_is_refused_before_any_case(opened: Model, store: Store) -> None:
    algorithms = parse_policies(["cacheblend:layers=9"])
    task = (groups_of(opened, CASES[0])[0], {"one": (algorithms[1].label,)})
    with pytest.raises(PicError, match=r"^cacheblend: layers=9,"):
        Runner(opened, store, algorithms).run(*task)


def test_numbers_that_are_none_are_refused(store: Store, tmp_path: Path) -> None:
    module = tiny.random_module(LlamaConfig(**tiny.SIZE))
    module.lm_head.weight.data[7] = 3e38  # its logit overflows
    module.save_pretrained(tmp_path / "broken")
    tiny.tokenizer().save_pretrained(tmp_path / "broken")
    broken = load_model(str(tmp_path / "broken"), "cpu", "float32")
    task = (groups_of(broken, CASES[0])[0], {"one": ("full",)})
    with pytest.raises(ModelError, match=f"^{tmp_path / 'broken'}: .* float32"):
        Runner(broken, store, ALGORITHMS).run(*task)

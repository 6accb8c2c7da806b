"""Users: their documents and questions, the bytes of their objects, and how many fill a share of memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import subjects
from bench.workloads import USERS, write_dataset
from safetensors import safe_open

from pictool.bench import users
from pictool.bench.users import (
    Question,
    RandomUsers,
    User,
    UserCounts,
    compile_users,
    count_of_users,
    dataset_user_sets,
    dataset_users,
    execute,
    kv_bytes,
    make_user_sets,
    random_user_sets,
)
from pictool.core import CompileOptions
from pictool.errors import InputError
from pictool.eval.cases import SpecOptions
from pictool.eval.datasets import open_dataset
from pictool.linker.grid import parse_grid
from pictool.runtime.model import Model
from pictool.store.store import Store


@pytest.fixture(scope="module")
def model() -> Model:
    return subjects.subject("llama").model


@pytest.fixture(scope="module")
def four(model: Model) -> list[User]:
    return USERS.make(model, 4, seed=0)


def with_head(question: Question, head: str) -> Question:
    return replace(question, spec=replace(question.spec, head=head))


def test_random_users_have_different_documents_of_the_length_asked_for(model: Model, four: list[User]) -> None:
    assert [[len(chunk) for chunk in user.documents] for user in four] == [[9, 9]] * 4
    assert len({chunk.tokens for user in four for chunk in user.documents}) == 8
    assert [len(model.encode(user.questions[0].spec.query)) for user in four] == [4] * 4
    assert four[:2] == USERS.make(model, 2, seed=0) != USERS.make(model, 2, seed=1)


def test_bytes_of_users_are_those_of_the_layers_of_their_objects(model: Model, four: list[User], store: Store) -> None:
    shared = replace(four[1], documents=(*four[1].documents, four[0].documents[0]))
    headed = replace(four[2], questions=(with_head(four[2].questions[0], "<s>You are."),))
    some = [four[0], shared, headed]
    compile_users(model, store, some, [CompileOptions()], alone=False)
    held = 0
    for key in store.keys():
        with safe_open(store.path(key), "numpy") as file:
            held += sum(file.get_tensor(name).nbytes for name in file.keys() if name.startswith("layers."))
    assert kv_bytes(model, some) == held
    (one,) = make_user_sets(model, some, [3], memory=2 * held)
    assert one.ccr == 0.5 and make_user_sets(model, some, [3], memory=None)[0].ccr is None


@pytest.mark.parametrize(
    ("target", "sizes", "want"),
    [(100, [30] * 9, 3), (106, [30] * 9, 4), (1, [30] * 9, 1), (100, [30, 80, 30], 2), (85, [30, 30], None),
     (70, [30, 30], 2), (10, [], None)],
)  # fmt: skip
def test_so_many_users_as_come_nearest_to_a_share_of_memory(target: float, sizes: list[int], want: int | None) -> None:
    assert count_of_users(target, sizes) == want


def test_objects_for_every_policy_are_there_before_requests_run(
    model: Model, four: list[User], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    headed = replace(four[0], questions=(with_head(four[0].questions[0], "<s>You are."),))
    compile_users(model, store, [headed], [CompileOptions(4), CompileOptions()], alone=True)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled within a request")

    monkeypatch.setattr("pictool.linker.resolve.compile_chunks", refuse)
    for labelled in parse_grid(["legolink-2", "legolink-0", "cacheblend-15"]):
        done = execute(model, store, labelled.policy, headed.questions[0])
        assert 0 < done.ttft_s < done.service_s and done.tokens == 3 and done.score is None


def test_prompts_that_the_model_cannot_take_are_refused(model: Model) -> None:
    with pytest.raises(InputError, match="512 positions"):
        RandomUsers(chunks=50, chunk_tokens=10).make(model, 1, seed=0)
    with pytest.raises(InputError, match="--new-tokens 0"):
        RandomUsers(new_tokens=0)


def test_users_of_a_dataset_are_its_document_sets(model: Model, tmp_path: Path) -> None:
    found, _ = dataset_users(model, open_dataset(str(write_dataset(tmp_path / "d.jsonl", "abc")), {}), SpecOptions())
    assert [[question.id for question in user.questions] for user in found] == [["q0", "q2"], ["q1"]]
    assert [[chunk.text for chunk in user.documents] for user in found] == [
        ["The harbour was quiet.", "It holds a festival."], ["Numbers stand here too."],
    ]  # fmt: skip
    assert found[0].questions[1].answers == ("c",) and "What is 2?" in found[0].questions[1].spec.query


def test_cases_too_long_for_the_model_are_refused_or_left_out(model: Model, tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "d.jsonl", "abc")
    long = {"documents": [{"text": "The harbour was quiet. " * 200}], "query": "Why?", "answers": ["a"], "id": "long"}
    path.write_text(path.read_text() + json.dumps(long) + "\n")
    dataset = open_dataset(str(path), {})
    with pytest.raises(InputError, match=r"long.*--skip-long"):
        dataset_users(model, dataset, SpecOptions())
    found, left_out = dataset_users(model, dataset, SpecOptions(), skip_long=True)
    assert len(found) == 2 and left_out == 1


# Context cache ratio


def test_random_users_fill_a_share_of_memory(model: Model) -> None:
    each = 2 * 9 * 2 * 3 * 2 * 8 * 4  # tokens · (K, V) · layers · heads · dims · float32
    counts = UserCounts(ratios=(0.3, 0.1, 0.11), memory=10 * each)
    sets = random_user_sets(model, USERS, counts, seed=0, directory=Path())
    assert [len(user_set.users) for user_set in sets] == [1, 3]
    assert [(user_set.num_bytes, user_set.ccr) for user_set in sets] == [(each, 0.1), (3 * each, 0.3)]
    assert sets[0].users == sets[1].users[:1]


def test_memory_is_that_of_the_device_if_nothing_is_said(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "memory_bytes", lambda: 10**9)
    (one,) = random_user_sets(model, USERS, UserCounts(counts=(2,)), 0, Path())
    assert one.ccr == pytest.approx(one.num_bytes / 1e9)
    monkeypatch.setattr(users, "memory_bytes", lambda: None)
    assert random_user_sets(model, USERS, UserCounts(counts=(2,)), 0, Path())[0].ccr is None
    with pytest.raises(InputError, match="say it with --memory"):
        random_user_sets(model, USERS, UserCounts(ratios=(0.1,)), 0, Path())


@pytest.mark.parametrize("counts", [UserCounts(counts=(10**15,)), UserCounts(ratios=(1.0,), memory=10**18)])
def test_more_users_than_the_disk_has_room_for_are_refused_at_once(model: Model, counts: UserCounts) -> None:
    with pytest.raises(InputError, match="GB are free"):
        random_user_sets(model, USERS, counts, 0, Path())


def test_a_dataset_has_so_many_users_and_no_more(model: Model, tmp_path: Path) -> None:
    found, _ = dataset_users(model, open_dataset(str(write_dataset(tmp_path / "d.jsonl", "abc")), {}), SpecOptions())
    held = kv_bytes(model, found)
    assert [len(user_set.users) for user_set in dataset_user_sets(model, found, UserCounts((2, 1, 2)), "d")] == [1, 2]
    all_of_them = UserCounts(ratios=(1.0,), memory=held)
    assert [len(user_set.users) for user_set in dataset_user_sets(model, found, all_of_them, "d")] == [2]
    with pytest.raises(InputError, match="--users 3: d has 2 document sets"):
        dataset_user_sets(model, found, UserCounts((3,)), "d")
    with pytest.raises(InputError, match=r"--ccr 1: the 2 document sets of d fill less"):
        dataset_user_sets(model, found, UserCounts(ratios=(1.0,), memory=3 * held), "d")


@pytest.mark.parametrize("wrong", [{"counts": (0,)}, {"ratios": (-0.1,)}, {"memory": 0}])
def test_numbers_of_users_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be above 0"):
        UserCounts(**wrong)

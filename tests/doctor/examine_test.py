"""The whole examination: what it says of a machine, of answers, of an engine; the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands.run import pic
from subjects import make_chunks, run, subject
from tape import graphed

import pictool
from pictool.doctor.answers import examine_answers
from pictool.doctor.steps import examine_steps
from pictool.doctor.surroundings import examine_surroundings
from pictool.doctor.verdict import DoctorReport, Verdict, VerdictStatus
from pictool.engines.torch import TorchEngine
from pictool.linker.grid import parse_grid
from pictool.linker.policies import make_policy
from pictool.runtime.architectures import REFUSED
from pictool.store.store import Store


def look(store: Store, device: str = "cpu") -> DoctorReport:
    return DoctorReport(tuple(examine_surroundings(store, device)))


def test_what_is_found(store: Store) -> None:
    report = look(store)
    assert report.is_good
    assert report.of("versions").values["torch"] == torch.__version__
    assert report.of("disk").values["free_bytes"] > 0
    assert report.of("store").status is VerdictStatus.NOTE and "does not exist yet" in report.of("store").text
    store.root.mkdir(parents=True)
    assert report != look(store) and look(store).of("store").values == {"objects": 0, "bytes": 0}


def test_what_is_asked_for_and_not_there_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.runtime.device.accelerator", lambda: None)
    report = look(store, "cuda")
    assert report.of("accelerator").status is VerdictStatus.FAILED
    monkeypatch.setattr("os.access", lambda *_: False)
    assert look(store).of("disk").status is VerdictStatus.FAILED


def test_a_package_that_lacks_what_is_called_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(store).of("transformers").status is VerdictStatus.OK
    monkeypatch.setattr("pictool.doctor.surroundings.NEEDS", {"transformers:AutoLink": ()})
    verdict = look(store).of("transformers")
    assert verdict.status is VerdictStatus.FAILED and verdict.values["lacks"] == ["transformers.AutoLink"]


def test_vllm_is_asked_in_a_process_of_its_own(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(pictool.__file__).parents[1]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for source, said in (("__version__ = '0.99'", "0.99 lacks vllm."), ("raise ImportError('no CUDA')", "no CUDA")):
        (package / "__init__.py").write_text(source)
        verdict = look(store).of("vLLM")
        assert verdict.status is VerdictStatus.FAILED and said in verdict.text


def test_an_accelerator_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("accelerator", lambda: "cuda"), ("device_count", lambda: 2), ("device_name", lambda _: "NVIDIA H200"),
        ("device_memory", lambda _: (100 * 10**9, 150 * 10**9)),
    ):  # fmt: skip
        monkeypatch.setattr(f"pictool.runtime.device.{name}", value)
    assert look(store).of("accelerator").values["devices"] == [
        f"cuda:{index} NVIDIA H200, 100 GB of 150 GB free" for index in range(2)
    ]


# Launches


def test_it_says_what_was_recorded_and_what_is_not(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject("llama").model
    assert [verdict.status for verdict in examine_steps(model)] == [VerdictStatus.NOTE]  # on a CPU
    with graphed(model) as (graphs, _):
        for _ in range(2):
            run(subject("llama"), store, make_policy("naive"), make_chunks((29, 17)))
        first, second = examine_steps(model)
        assert first.status is VerdictStatus.OK and first.values["recorded"] == graphs.num_recorded > 0
        assert second.check == "launched anew"
        graphs.refuse(RuntimeError("no such stream"))
        assert "no such stream" in next(examine_steps(model)).text
    with graphed(model, records=False):
        assert next(examine_steps(model)).status is VerdictStatus.OK


# Answers


POLICIES = parse_grid(["naive", "legolink:k=999"])


def answers(store: Store) -> list[Verdict]:
    return list(examine_answers(TorchEngine(subject("llama").model, store), POLICIES))


def test_the_default_policy_is_judged_by_whole_answers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.fidelity.divergence.FEW_NATS", 0.0)
    monkeypatch.setattr("pictool.doctor.answers.DEFAULT", "legolink-999")
    naive, everything = answers(store)
    assert (naive.status, everything.status) == (VerdictStatus.NOTE, VerdictStatus.OK)
    assert everything.values["answer_kl"] < 1e-6 < naive.values["kl"] < naive.values["answer_kl"]
    assert everything.values["share"] < 1e-3 < naive.values["share"] < 1, "less than without contexts"
    monkeypatch.setattr("pictool.doctor.answers.MAX_SHARE", naive.values["share"] / 2)
    monkeypatch.setattr("pictool.doctor.answers.DEFAULT", "naive")
    assert [verdict.status for verdict in answers(store)] == [VerdictStatus.FAILED, VerdictStatus.NOTE]


def test_answers_that_are_not_finite_fail(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.engines.base.first_token_kl", lambda *_: float("nan"))
    assert {verdict.status for verdict in answers(store)} == {VerdictStatus.FAILED}


# The command


def test_the_command_reports_and_its_exit_code_judges(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = pic("doctor", "-m", model_dir, "--algo", "naive", "--store", "st")
    assert done.code == 0, done.out
    assert "  ok       layer 0 is exact: " in done.out and "  note     naive: " in done.out
    assert done.code == 0 and "  failed " not in done.out and not Path("st").exists()
    monkeypatch.setattr("pictool.runtime.memory.image.Image.append", lambda *_: torch.zeros(320))
    broken = pic("doctor", "-m", model_dir, "--algo", "naive", "--json", "--store", "st")
    assert broken.code == 1 and not json.loads(broken.out)["is_good"]


@pytest.mark.parametrize("kind", [None, "gemma3n", "gemma4"])
def test_of_a_model_that_cannot_be_opened_the_machine_and_the_reason_are_reported(
    kind: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    done = pic("doctor", "-m", tmp_path)
    assert done.code == 1
    assert "versions: pictool" in done.out and f"failed   model: {tmp_path}" in done.out
    assert REFUSED.get(kind or "", "has no model_type") in done.out


@pytest.mark.parametrize("arguments", [("--algo", "nope"), ("--device", "tpu"), ("--dtype", "int3")])
def test_what_makes_no_sense_is_usage(arguments: tuple[Any, ...]) -> None:
    assert pic("doctor", *arguments).code == 2

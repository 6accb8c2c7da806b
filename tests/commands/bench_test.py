"""`pic bench`: what is printed; mistakes are told before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pictool.bench import sync
from pictool.commands.bench import DEFAULT_POLICIES, BenchOptions, open_subject, run_bench
from pictool.commands.console.errors import UsageError
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError

PROMPT = {"chunks": 2, "chunk_tokens": 20, "new_tokens": 2, "repeats": 1}


def tiny(**more: Any) -> BenchOptions:
    return BenchOptions(**{**PROMPT, "shape": "tiny", "algo": ["naive", "speccache-25"], **more})


def on_cpu(**more: str) -> Settings:
    return Settings().override(**{"device": "cpu", **more})


def test_json_says_what_was_run_on_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/pic", "bench", "a b"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    run_bench(tiny(as_json=True), on_cpu(store=str(tmp_path)))
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["bench"] == "sync" and len(found["model"].pop("fingerprint")) == 64
    assert found["model"] == {"name": "random tiny", "dtype": "float32", "device": "cpu"}
    assert found["options"] == vars(tiny().prompt) and found["machine"]["cpu"]
    assert found["command"] == "pic bench 'a b'"
    labels = [method["label"] for method in found["results"]["methods"]]
    assert labels == ["full", "naive", "speccache-25", "transformers"]
    assert "random tiny" in err
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "config"}  # objects are removed


def test_the_table_has_a_line_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    run_bench(tiny(), on_cpu())
    out = capsys.readouterr().out
    assert "random tiny (float32) on " in out and "…" not in out
    for label in ("naive", "speccache-25", "full", "transformers"):
        assert any(line.strip().startswith(f"{label} ") for line in out.splitlines())


def test_interrupted_it_removes_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def interrupted(model: object, policies: object, options: object, directory: Path, step: object) -> None:
        seen.append(directory)
        assert directory.is_dir() and (directory / "speculative" / "config.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(sync, "bench_sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(tiny(), on_cpu(store=str(tmp_path / "not" / "yet")))
    assert seen[0].parent == tmp_path and not seen[0].exists()


def test_defaults_measure_the_usual_policies() -> None:
    with open_subject(BenchOptions(shape="tiny"), Settings()) as subject:
        assert [policy.label for policy in subject.policies] == list(DEFAULT_POLICIES)
        assert subject.model.name == "random tiny"


def test_a_model_directory_is_measured_as_it_is(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_bench(BenchOptions(**PROMPT, model=str(model), algo=["naive"], as_json=True), on_cpu())  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["name"] == str(model)
    with pytest.raises(InputError, match="spec_model="):
        run_bench(BenchOptions(**PROMPT, model=str(model), algo=["speccache-15"]), on_cpu())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model": "embedded"}, UsageError, "--shape"),
        ({"shape": "large"}, UsageError, "--shape large"),
        ({"algo": ["lego"]}, UsageError, "algorithm 'lego'"),
        ({"store": "file"}, InputError, "file: "),
        ({"device": "tpu"}, UsageError, "--device tpu"),
        ({"dtype": "int8"}, UsageError, "--dtype int8"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    wrong: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setattr(sync, "bench_sync", lambda *_: pytest.fail("was run"))
    with pytest.raises(error) as caught:
        settings = {name: wrong.pop(name) for name in ("store", "device", "dtype") if name in wrong}
        run_bench(tiny(**wrong), on_cpu(**settings))
    assert message in str(caught.value)

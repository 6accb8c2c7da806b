"""`pic bench sync`, `context`: what is printed and written; mistakes are told before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pictool.bench import context, sync
from pictool.bench.options import ContextOptions, PromptOptions
from pictool.bench.roofline import Rates
from pictool.commands import bench
from pictool.commands.bench import BenchOptions, open_subject, run_context, run_sync
from pictool.commands.console.errors import UsageError
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError

PROMPT = PromptOptions(chunks=2, chunk_tokens=20, tail_tokens=6, new_tokens=2, repeats=1)
LENGTHS = ContextOptions(start=32, stop=64, chunk_tokens=16, tail_tokens=6, repeats=1)
RUNS: list[Any] = [(run_sync, PROMPT), (run_context, LENGTHS)]
NAMES = ["sync", "context"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sync, context):
        monkeypatch.setattr(module, "measure_rates", lambda *_: Rates(1e9, 1e12))


def tiny(**more: Any) -> BenchOptions:
    return BenchOptions(**{"shape": "tiny", "algo": ["naive", "speccache-25"], **more})


def on_cpu(**more: str) -> Settings:
    return Settings().override(**{"device": "cpu", **more})


@pytest.mark.parametrize(("run", "options"), RUNS, ids=NAMES)
def test_json_says_what_was_run_on_what(
    run: Any, options: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/pic", "bench", "a b"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    run(tiny(as_json=True), options, on_cpu())
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["bench"] == NAMES[[one for one, _ in RUNS].index(run)]
    assert len(found["model"].pop("fingerprint")) == 64
    assert found["model"] == {"name": "random tiny", "dtype": "float32", "device": "cpu"}
    assert found["options"] == vars(options) and found["machine"]["cpu"] and found["command"] == "pic bench 'a b'"
    labels = [one["label"] for one in found["results"]["curves" if run is run_context else "methods"]]
    assert [one for one in labels if one not in ("full", "transformers")] == ["naive", "speccache-25"]
    assert "making a random tiny" in err


@pytest.mark.parametrize(("run", "options"), RUNS, ids=NAMES)
def test_the_table_has_a_line_for_each_policy(run: Any, options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny(), options, on_cpu())
    out = capsys.readouterr().out
    assert "random tiny (float32) on " in out and "…" not in out
    for label in ("naive", "speccache-25", "full", "transformers"):
        assert any(line.strip().startswith(f"{label} ") for line in out.splitlines())


@pytest.mark.parametrize(("run", "options"), RUNS, ids=NAMES)
def test_a_file_and_pictures_are_written_and_objects_removed(run: Any, options: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = "picture.svg" if run is not run_sync else None
    run(tiny(output="out.json", plot=picture), options, on_cpu(store=str(tmp_path)))
    assert json.loads(Path("out.json").read_text())["results"]
    pictures = [] if run is run_sync else ["picture.png", "picture.svg"]
    assert sorted(one.name for one in tmp_path.iterdir() if one.name not in ("cache", "config")) == [
        "out.json",
        *pictures,
    ]


def test_interrupted_it_removes_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def interrupted(model: object, policies: object, options: object, directory: Path, step: object) -> None:
        seen.append(directory)
        assert directory.is_dir() and (directory / "speculative" / "config.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(sync, "bench_sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sync(tiny(), PROMPT, on_cpu(store=str(tmp_path / "not" / "yet")))
    assert seen[0].parent == tmp_path and not seen[0].exists()


def test_defaults_measure_the_usual_policies() -> None:
    with open_subject(BenchOptions(), Settings(), "tiny", bench.SYNC_ALGOS, 0) as subject:
        assert [policy.label for policy in subject.policies] == list(bench.SYNC_ALGOS)
        assert subject.model.name == "random tiny"


def test_a_model_directory_is_measured_as_it_is(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_sync(BenchOptions(model=str(model), algo=["naive"], as_json=True), PROMPT, on_cpu())
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["name"] == str(model)
    with pytest.raises(InputError, match="spec_model="):
        run_sync(BenchOptions(model=str(model), algo=["speccache-15"]), PROMPT, on_cpu())


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model": "embedded"}, UsageError, "--shape: cannot be combined with -m; leave one of them out"),
        ({"shape": "large"}, UsageError, "--shape large: must be one of"),
        ({"algo": ["lego"]}, UsageError, "algorithm 'lego'"),
        ({"output": "."}, InputError, "-o .: is a directory"),
        ({"plot": "x.pdf"}, InputError, "--plot x.pdf: must end in"),
        ({"plot": "file/x.svg"}, InputError, "file is not a directory"),
        ({"store": "file"}, InputError, "file: is not a directory"),
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
        run_sync(tiny(**wrong), PROMPT, on_cpu(**settings))
    assert message in str(caught.value)


def test_without_matplotlib_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="needs matplotlib"):
        run_context(tiny(plot="x.svg"), LENGTHS, on_cpu())


def test_threads_are_set(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        run_sync(tiny(algo=["naive"], threads=before + 1, as_json=True), PROMPT, on_cpu())
    finally:
        torch.set_num_threads(before)
    assert json.loads(capsys.readouterr().out)["machine"]["threads"] == before + 1

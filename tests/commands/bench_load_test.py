"""`pic bench async` and `pic bench storage`: options in, tables, JSON and pictures out, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands.run import pic, write
from pictool.bench import asynchronous, storage
from pictool.commands.bench_common import BenchOptions
from pictool.commands.bench_load import (
    AsyncOptions,
    StorageOptions,
    geometry_of,
    numbers,
    run_async,
    run_storage,
    storage_geometry,
    storage_sizes,
)
from pictool.commands.errors import UsageError
from pictool.commands.settings import Settings
from pictool.core import Geometry
from pictool.errors import InputError, PicError

TINY: dict[str, Any] = {"shape": "tiny", "threads": 1}
ON_CPU = Settings().override(device="cpu", dtype="float32")
SMALL: dict[str, Any] = {"chunks": 2, "chunk_tokens": 8, "tail_tokens": 4, "new_tokens": 2, "repeats": 2, "measured": 3}


def run(options: dict[str, Any], common: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON that `pic bench async` prints."""
    run_async(AsyncOptions(**options), BenchOptions(**common, as_json=True), ON_CPU)
    return json.loads(capsys.readouterr().out)


def left_in(path: Path) -> list[str]:
    """What a run left there, beside the cache of fingerprints and the settings of libraries that every command has."""
    return sorted(one.name for one in path.iterdir() if one.name not in ("cache", "config"))


def dataset(path: Path) -> Path:
    lines = [
        {"documents": [{"text": text}], "query": "Which festival?", "answers": ["spring"], "id": text[:4]}
        for text in ("It holds a festival in the spring.", "The harbour was quiet.", "Nobody knows why.")
    ]
    return write(path, "".join(json.dumps(line) + "\n" for line in lines))


# async


def test_points_are_those_of_policies_rates_and_user_sets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    algos = ["legolink-4", "speccache-15"]
    options = SMALL | {"rate": "2,8", "users": "1,3", "duration": 5.0, "memory": 10**6}
    found = run(options, TINY | {"algo": algos, "output": "out.json"}, capsys)
    points = found["results"]["points"]
    wanted = [(users, rate, label) for users in (1, 3) for rate in (2, 8) for label in algos]
    assert [(one["users"], one["rate"], one["label"]) for one in points] == wanted
    for one in points:
        assert len(one["runs"]) == 2 and one["deviation"]["ttft_mean_s"] is not None
        assert 0 < one["mean"]["ttft_p50_s"] <= one["mean"]["ttft_p99_s"] and one["mean"]["goodput"] is None
        assert 0 < one["mean"]["utilisation"] <= 1
    sets = found["results"]["user_sets"]
    assert [one["ccr"] for one in sets] == [one["bytes"] / 1e6 for one in sets]
    assert all(one["no_goodput"] and len(one["executed"]) == 3 * len(algos) for one in sets)
    assert "one request at a time" in found["results"]["serving"]
    assert found["options"]["users"] == "1,3" and found["options"]["measured"] == 3 and found["machine"]["cores"]
    assert json.loads(Path("out.json").read_text()) == found
    assert left_in(tmp_path) == ["out.json"]


def test_users_may_be_chosen_by_their_share_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = run(SMALL | {"rate": "5", "requests": 3, "users": "1"}, TINY, capsys)["results"]["user_sets"]
    options = SMALL | {"rate": "5", "requests": 3, "ccr": "0.1,0.5", "memory": 10 * one["bytes"]}
    found = run(options, TINY, capsys)
    assert [(each["users"], each["ccr"]) for each in found["results"]["user_sets"]] == [(1, 0.1), (5, 0.5)]
    assert {point["label"] for point in found["results"]["points"]} == {"full", "naive", "legolink-16", "cacheblend-15"}


def test_a_dataset_has_goodput_of_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    path = dataset(Path("d.jsonl"))
    options = {"dataset": str(path), "users": "3", "rate": "5", "requests": 4, "repeats": 1, "new_tokens": 4}
    found = run(options, {"algo": ["naive"], "threads": 1}, capsys)
    assert found["model"]["name"] == "embedded"
    (users,) = found["results"]["user_sets"]
    assert {(one["label"], one["question"]) for one in users["executed"]} == {
        (label, name) for label in ("full", "naive") for name in ("It h", "The ", "Nobo")
    }
    scores = [one["score"] for one in users["executed"] if one["label"] == "full"]
    assert users["gamma"] == (pytest.approx(0.8 * sum(scores) / 3) if sum(scores) else None)
    assert [point["label"] for point in found["results"]["points"]] == ["naive"]


def test_the_tables_say_what_the_queue_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "200")
    common = BenchOptions(**TINY, algo=["naive"], plot="load.png")
    run_async(AsyncOptions(**SMALL | {"rate": "1,50", "users": "1,2"}), common, ON_CPU.override(store="store"))
    out = capsys.readouterr().out
    assert "1 user: objects of" in out and "2 users: objects of" in out
    assert "no continuous batching" in out and "3 requests are executed per policy and user set" in out
    assert "random prompts have no right answers; name a --dataset" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] == ["naive"]]
    assert len(rows) == 2 * (1 + 2)  # alone, and per rate
    assert left_in(tmp_path) == ["load.png", "load.svg"]


def test_interrupted_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        assert any(tmp_path.rglob("*.kvo"))
        raise KeyboardInterrupt

    monkeypatch.setattr(asynchronous, "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_async(AsyncOptions(**SMALL), BenchOptions(**TINY, output="out.json"), ON_CPU)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"users": "1", "ccr": "0.1"}, UsageError, "--ccr: chooses the number of users"),
        ({"params": ["seed=1"]}, UsageError, "-p: is for a --dataset"),
        ({"gamma_share": 0.5}, UsageError, "--gamma-share: is for a --dataset"),
        ({"dataset": "world", "measured": 0}, UsageError, "--measured: is for random prompts"),
        ({"dataset": "world", "chunks": 4}, UsageError, "--chunks: is for random prompts"),
        ({"dataset": "nowhere.jsonl"}, InputError, "nowhere.jsonl"),
        ({"dataset": "world", "params": ["seed"]}, UsageError, "-p seed"),
        ({"rate": "fast"}, UsageError, "--rate 'fast': must be numbers"),
        ({"rate": "0"}, InputError, "--rate 0"),
        ({"users": "1.5"}, UsageError, "--users '1.5': must be whole numbers"),
        ({"dataset": "world", "gamma_share": 0.0}, InputError, "--gamma-share 0"),
        ({"users": "0"}, InputError, "--users 0"),
        ({"repeats": 0}, InputError, "--repeats 0"),
        ({"chunk_tokens": 10**9}, InputError, "positions"),
        ({"rate": "0.0001", "duration": 1.0}, InputError, "--rate 0.0001: nothing arrives"),
        ({"ccr": "1", "memory": 10**18}, InputError, "GB are free"),
    ],
)
def test_async_refuses_in_one_line(options: dict[str, Any], kind: type[PicError], message: str) -> None:
    with pytest.raises(kind) as found:
        run_async(AsyncOptions(**options), BenchOptions(**TINY), ON_CPU)
    assert message in str(found.value) and "\n" not in str(found.value)


def test_the_program_takes_every_option_of_async() -> None:
    done = pic(
        "bench", "async", "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--threads", 1, "--algo", "naive",
        "--rate", "3", "--ccr", "0.5", "--memory", 10**6, "--requests", 4, "--duration", 9, "--repeats", 1,
        "--measured", 0, "--seed", 5, "--chunks", 1, "--chunk-tokens", 8, "--tail-tokens", 4, "--new-tokens", 1,
        "--json",
    )  # fmt: skip
    (point,) = done.json["results"]["points"]
    assert point["rate"] == 3 and point["runs"][0]["requests"] == 4
    assert done.json["options"]["requests"] == 4 and done.json["options"]["seed"] == 5
    assert len(done.json["results"]["user_sets"][0]["executed"]) == 4
    assert "pic: 4 requests are executed" in done.err
    assert pic("bench", "async", "--users", "1", "--ccr", "1").code == 2
    assert pic("bench", "async", "--rate", "0").code == 1


# storage


def test_storage_prints_rates_by_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_storage(StorageOptions(mb="0.02,0.04", objects=2, geometry="2,1,32", repeats=1), BenchOptions(), Settings())
    out = capsys.readouterr().out
    assert "2 layers, 1 KV heads of 32, bfloat16" in out
    assert all(text in out for text in ("2 × 0.0 MB", "read, cold", "memory's copy", "BLAKE3", "disk's write"))
    assert left_in(tmp_path) == []


def test_storage_gives_all_that_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    common = BenchOptions(output="out.json", as_json=True, shape="tiny")
    run_storage(StorageOptions(tokens="3,5", objects=1, repeats=2), common, Settings().override(dtype="float32"))
    found = json.loads(capsys.readouterr().out)
    assert json.loads(Path("out.json").read_text()) == found
    assert [one["tokens"] for one in found["results"]] == [3, 5] and found["machine"]["torch"]
    for one in found["results"]:
        assert one["geometry"] == {"layers": 2, "kv_heads": one["geometry"]["kv_heads"], "head_dim": 32}
        assert all(len(rounds) == 2 for rounds in one["raw_s"].values())
        assert set(one["operations"]) == {"write", "read_cold", "read_warm", "verify"}


@pytest.mark.parametrize(("held", "words"), [(True, "were not cold"), (None, "is unknown"), (False, None)])
def test_storage_says_if_cold_was_not(
    held: bool | None, words: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "is_cached", lambda _: held)
    run_storage(StorageOptions(tokens="1", objects=1, geometry="1,1,8", repeats=1), BenchOptions(), Settings())
    out = capsys.readouterr().out
    assert words in out if words else "cold reads" not in out.lower()


def test_storage_takes_the_geometry_of_a_shape_or_model(model: Path) -> None:
    def geometry(dtype: str | None = None, given: str | None = None, **common: Any) -> tuple[Geometry, str]:
        settings = Settings().override(dtype=dtype)
        return storage_geometry(StorageOptions(geometry=given), BenchOptions(**common), settings)

    assert geometry(shape="llama-3.1-8b") == (Geometry(32, 8, 128), "bfloat16")
    assert geometry("float32", shape="qwen2.5-0.5b") == (Geometry(24, 2, 64), "float32")
    assert geometry(model=str(model))[0] == Geometry(3, 2, 8)
    assert geometry(given="3,2,1")[0] == Geometry(3, 2, 1)
    assert geometry_of({"num_hidden_layers": 1, "num_key_value_heads": 2, "hidden_size": 12, "num_attention_heads": 4,
                        "head_dim": None}) == Geometry(1, 2, 3)  # fmt: skip


def test_the_program_takes_every_option_of_storage() -> None:
    done = pic(
        "bench", "storage", "--tokens", "2", "--geometry", "1,2,8", "--objects", 1, "--repeats", 1, "--seed", 3,
        "--dtype", "float16", "--json",
    )  # fmt: skip
    assert [one["kv_bytes"] for one in done.json["results"]] == [2 * 2 * 2 * 8 * 2]
    assert pic("bench", "storage", "--mb", "1", "--tokens", "1").code == 2
    assert pic("bench", "storage", "--mb", "0").code == 1


def test_equal_sizes_are_measured_once() -> None:
    assert len(storage_sizes(StorageOptions(mb="1,1.0,1.000001"), BenchOptions(), Settings())) == 1
    sizes = storage_sizes(StorageOptions(tokens="512", objects=64), BenchOptions(), Settings())
    assert [size.count for size in sizes] == [64]


@pytest.mark.parametrize(
    ("common", "options", "message"),
    [
        ({}, {"mb": "1", "tokens": "1"}, "--mb: chooses the number of tokens"),
        ({"shape": "tiny"}, {"geometry": "1,1,1"}, "--geometry: is that of --shape or -m"),
        ({"shape": "tiny", "model": "embedded"}, {}, "--shape"),
        ({"shape": "gpt-5"}, {}, "--shape gpt-5"),
        ({}, {"geometry": "32,8"}, "LAYERS,KV_HEADS,HEAD_DIM"),
        ({}, {"geometry": "a,b,c"}, "--geometry"),
        ({}, {"mb": "big"}, "--mb 'big': must be numbers"),
        ({}, {"mb": "0"}, "--mb 0"),
        ({}, {"tokens": "0"}, "tokens 0"),
        ({}, {"objects": 0}, "objects 0"),
        ({}, {"repeats": 0}, "--repeats 0"),
        ({"dtype": "int8"}, {}, "dtype int8"),
        ({}, {"objects": 10**12}, "GB are free"),
    ],
)
def test_storage_refuses_in_one_line(common: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PicError) as found:
        settings = Settings().override(dtype=common.pop("dtype", None))
        run_storage(StorageOptions(**options), BenchOptions(**common), settings)
    assert message in str(found.value) and "\n" not in str(found.value)


def test_numbers_of_a_list() -> None:
    assert numbers("--rate", "0.5,1, 2") == (0.5, 1.0, 2.0) and numbers("--users", "4", int) == (4,)
    for text in ("", "1,", "nan", "inf", "1;2"):
        with pytest.raises(UsageError):
            numbers("--rate", text)

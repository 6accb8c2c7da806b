"""`pic bench storage`: options in, tables and JSON out, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from commands.run import pic
from pictool.bench import storage
from pictool.commands.benches.common import BenchOptions, numbers
from pictool.commands.benches.storage import (
    StorageOptions,
    run_storage,
    storage_geometry,
    storage_sizes,
)
from pictool.commands.console.errors import UsageError
from pictool.commands.settings.settings import Settings
from pictool.core import Geometry
from pictool.errors import PicError
from pictool.runtime.architectures import geometry_of


def left_in(path: Path) -> list[str]:
    """What a run left there, beside the cache of fingerprints and the settings of libraries that every command has."""
    return sorted(one.name for one in path.iterdir() if one.name not in ("cache", "config"))


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
    config = Qwen2Config(num_hidden_layers=1, num_key_value_heads=2, hidden_size=12, num_attention_heads=4)
    assert geometry_of(config) == Geometry(1, 2, 3)


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
        ({}, {"mb": "1", "tokens": "1"}, "--mb: cannot be combined with --tokens"),
        ({"shape": "tiny"}, {"geometry": "1,1,1"}, "--geometry: cannot be combined with --shape or -m"),
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

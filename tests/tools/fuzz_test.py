"""A sample of what `make fuzz` runs at full size, in a process of its own, which the judge limits and patches."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from chunks import make_chunk
from hostile.surfaces.objects import FORGERIES, Anatomy, zstd_bomb
from subjects import make_chunks, subject

from pictool.api import compile
from pictool.errors import ObjectError
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

ROOT = Path(__file__).parents[2]


def test_a_sample_of_hostile_input_is_refused_or_answered_right(tmp_path: Path) -> None:
    command = ("-m", "hostile.fuzz", "--cases", "140", "--seed", "0", "--jobs", "0", "--keep", str(tmp_path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tools")))}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["failed"] == 0 and report["cases"] >= 140
    for name, row in report["surfaces"].items():
        assert row["answered"] + row["refused"] == row["cases"] > 0, name
        assert row["refused"] or name in ("databases", "files", "conversations", "markers"), (
            name
        )  # made again; left out


@pytest.mark.parametrize("forgery", dict.fromkeys(FORGERIES), ids=lambda forgery: forgery.__name__)
def test_a_forgery_is_refused_or_has_checksums_that_hold(forgery: object, tmp_path: Path, store: Store) -> None:
    """What opens can be read to its end: no forgery is a mere damage that a checksum finds."""
    data = store.put(make_chunk(3)).read_bytes()
    path = tmp_path / "x.kvo"
    for seed in range(20):
        anatomy = Anatomy.of(data)
        forgery(anatomy, random.Random(seed))  # type: ignore[operator]
        path.write_bytes(anatomy.build())
        try:
            with ObjectFile(path) as file:
                file.tokens()
        except (ObjectError, UnicodeError) as error:
            assert "header does not match" not in str(error)


def test_an_honest_object_is_put_together_as_it_was(store: Store) -> None:
    data = store.put(make_chunk(3)).read_bytes()
    assert Anatomy.of(data).build() == data


def test_an_honest_object_of_a_hybrid_is_put_together_as_it_was(store: Store) -> None:
    (done,) = compile(subject("qwen3_5").model, store, make_chunks((29,)))
    data = done.path.read_bytes()
    anatomy = Anatomy.of(data)
    assert any(name.startswith("states.") for name in anatomy.parts) and anatomy.build() == data


@pytest.mark.parametrize("size", [1, 131072, 131073, 5 << 20])
def test_a_bomb_is_a_frame_of_zeros(size: int) -> None:
    frame = zstd_bomb(size)
    assert zstandard.ZstdDecompressor().decompress(frame) == bytes(size)
    assert len(frame) < 20 + size // 10_000

"""`pic inspect`: what an object says of itself, with no model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from commands.conftest import TEXT
from commands.run import Objects, flip, pic, write
from pictool.core import Geometry, Target
from pictool.store.format import ObjectFile, ObjectMeta, canonical, metadata_of, seal, tensor_entries

FIELDS = [
    "path", "key", "architecture", "model", "tokenizer", "tokens", "layers", "kv_heads", "head_dim", "dtype", "sinks",
    "codec", "bytes", "layer_bytes", "fixups",
]  # fmt: skip


def test_a_file_field_by_field(objects: Objects) -> None:
    shown = dict(line.split(maxsplit=1) for line in pic("inspect", objects.mine).out.splitlines())
    assert list(shown) == FIELDS
    assert (shown["architecture"], shown["layers"], shown["kv_heads"], shown["dtype"]) == ("llama", "3", "2", "float32")
    assert int(shown["bytes"]) == objects.mine.stat().st_size


def test_as_json(objects: Objects) -> None:
    shown = pic("inspect", objects.mine, "--json").json
    assert list(shown) == [*FIELDS, "checksums"]
    assert (shown["head_dim"], shown["sinks"], shown["path"]) == (8, 0, str(objects.mine))


def test_the_checksums_are_those_of_the_parts(objects: Objects) -> None:
    found = pic("inspect", objects.mine, "--json").json["checksums"]
    with ObjectFile(objects.mine) as file:
        layers = [blake3(bytes(key) + bytes(value)).hexdigest() for key, value in map(file.layer, range(3))]
        text, tokens = (blake3(part).hexdigest() for part in (file.text().encode(), file.tokens().tobytes()))
    assert found == {"layers": layers, "text": text, "tokens": tokens}


def test_a_large_object_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is all that is read of 10 GB (a file with holes)."""
    target = Target("llama", "a" * 64, "b" * 64, "float32", Geometry(32, 8, 128))
    count = (10 << 30) // (32 * 8 * 128 * 2 * 4)
    meta = ObjectMeta(target.key([1] * count, 0, "none"), target, count, 0, "none")
    header: dict[str, Any] = {
        "__metadata__": metadata_of(meta, {"layers": ["0" * 64] * 32, "text": "0" * 64, "tokens": "0" * 64}),
        **tensor_entries(meta, 4, []),
    }
    header["__metadata__"]["header"] = seal(header)
    raw = canonical(header)
    path = write("large.kvo", len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + header["text"]["data_offsets"][1])
    read = 0
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        nonlocal read
        got = preadv(fd, buffers, offset)
        read += got
        return got

    monkeypatch.setattr(os, "preadv", counted)
    shown = pic("inspect", path, "--json").json
    assert shown["tokens"] == count and shown["bytes"] > 10_000_000_000 and read == 8 + len(raw)


def test_a_table_of_fixups_as_a_bar_per_token(model: Path, texts: tuple[Path, Path]) -> None:
    assert pic("compile", "a.txt", "-m", model, "--probes", 4, "-o", "a.kvo").code == 0
    shown = pic("inspect", "a.kvo", "--json").json
    assert shown["fixups"] == "self-4x60" and float(shown["highest"]) > 0
    assert len(shown["heat"]) == shown["tokens"] and set(shown["heat"]) <= set("▁▂▃▄▅▆▇█") and "█" in shown["heat"]


def test_the_text_if_asked(objects: Objects) -> None:
    assert pic("inspect", objects.mine, "--text", "--json").json["text"] == TEXT
    assert TEXT in pic("inspect", objects.mine, "--text").out


def test_a_key_and_its_beginning(objects: Objects) -> None:
    key = pic("inspect", objects.mine, "--json").json["key"]
    for name in (key, key[:6]):
        shown = pic("inspect", name, "--store", objects.store, "--json").json
        assert shown["key"] == key and Path(shown["path"]).is_relative_to(objects.store)


def test_a_list_names_its_members(model: Path, texts: tuple[Path, Path]) -> None:
    assert pic("compile", "a.txt", "--chunk-tokens", 16, "-o", "d/a.kvo", "-m", model).code == 0
    members = pic("inspect", "d/a.kvo", "--json").json["objects"]
    assert members[:2] == ["d/a.0000.kvo", "d/a.0001.kvo"] and all(Path(one).exists() for one in members)


def test_what_is_no_object_is_refused(texts: tuple[Path, Path], objects: Objects) -> None:
    damaged = Path("damaged.kvo")
    damaged.write_bytes(objects.mine.read_bytes())
    flip(damaged, 300)
    Path("directory").mkdir()
    for name in ("a.txt", "damaged.kvo", "missing.kvo", "directory", "abcd1234", "no-key"):
        outcome = pic("inspect", name)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
        assert outcome.err.startswith("pic: error: ") and name in outcome.err

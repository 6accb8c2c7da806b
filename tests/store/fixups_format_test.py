"""The table in an object file: golden bytes, what it says, and that no damage of it gets through."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from store.format_test import GOLDEN_SHA256, TOKENS, make_chunk, sealed, split, write

from pictool.errors import ObjectError
from pictool.store.format import CompiledChunk, ObjectFile

TABLE = np.asarray([0.5, 0.0, 2.25], dtype="<f2")
# An object with a table. If this changes, objects that users have are no longer read: bump VERSION.
GOLDEN_WITH_TABLE = "40716c784df884787808efd09f123e97df3d287dc8d11d77f2204798577cf8aa"


def with_table(recipe: str = "self-8x60") -> CompiledChunk:
    chunk = make_chunk()
    return replace(chunk, meta=replace(chunk.meta, fixups=recipe), fixups=TABLE.tobytes())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "table.kvo", with_table())


def test_golden_bytes_with_and_without_a_table(tmp_path: Path, path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN_WITH_TABLE
    plain = write(tmp_path / "plain.kvo", make_chunk())
    assert hashlib.sha256(plain.read_bytes()).hexdigest() == GOLDEN_SHA256


def test_a_table_comes_back(tmp_path: Path, path: Path) -> None:
    with ObjectFile(path) as file:
        file.verify()
        table = file.fixups()
        assert table is not None and table.dtype == np.float16 and table.tolist() == TABLE.tolist()
        assert file.meta.fixups == "self-8x60"
        assert (file.text(), len(file.tokens())) == (make_chunk().text, len(TOKENS))
    with ObjectFile(write(tmp_path / "plain.kvo", make_chunk())) as file:
        assert file.fixups() is None and file.meta.fixups is None


def test_any_safetensors_reader_sees_or_skips_it(path: Path) -> None:
    tensors = safetensors.numpy.load(path.read_bytes())
    assert tensors["fixups"].tolist() == TABLE.tolist()
    assert np.array_equal(tensors["layers.000.key"], np.arange(12, dtype=np.float32).reshape(2, 3, 2))


def test_every_flipped_byte_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as out:
        for offset, byte in enumerate(whole):
            os.pwrite(out.fileno(), bytes([byte ^ 1]), offset)
            with pytest.raises(ObjectError), ObjectFile(path) as file:
                file.verify()
            os.pwrite(out.fileno(), bytes([byte]), offset)


@pytest.mark.parametrize("recipe", [None, "self-8x60"])
def test_a_table_that_the_header_does_not_tell_of_is_a_bug(tmp_path: Path, recipe: str | None) -> None:
    chunk = with_table()
    wrong = replace(chunk, meta=replace(chunk.meta, fixups=recipe), fixups=None if recipe else TABLE.tobytes())
    with pytest.raises(AssertionError):
        write(tmp_path / "wrong.kvo", wrong)


def test_a_forged_header_without_its_table_is_refused(path: Path) -> None:
    header, body = split(path.read_bytes())
    del header["fixups"]
    path.write_bytes(sealed(header, body))
    with pytest.raises(ObjectError, match="not that of an object"):
        ObjectFile(path)

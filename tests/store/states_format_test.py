"""States of hybrids in the object file: golden bytes, and that nothing damaged, forged or foreign gets through."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pictool.core import Geometry, StateShape, Target
from pictool.errors import ForeignObjectError, ObjectError
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta, canonical, seal, write_object

SHAPE = StateShape(layers=2, channels=3, columns=2, heads=2, rows=2, width=3, operator=2)
TARGET = Target("qwen3_next", "a" * 64, "b" * 64, "float16", Geometry(1, 1, 2, states=SHAPE))
TOKENS, CUT = (5, 3, 260, 7), 3
GOLDEN_BLOCK = "935b8579414db310a2f7761840374c9997cd486a08ec6abb213c21249efd9962"
GOLDEN = "3d310a2e371b0de3e0ef4d0d91011b0ea87c6431f06cd4b10d07918e00d6b3b9"


def make_chunk(cut: int = CUT, target: Target = TARGET) -> CompiledChunk:
    """Numbers are 0, 1, 2, …, of KV and of each linear layer."""
    ids, shape = np.asarray(TOKENS, dtype=np.int32), target.geometry.states
    assert shape is not None
    meta = ObjectMeta(target.key(ids, "none", cut=cut), target, len(ids), "none", cut=cut)
    part = np.arange(len(ids) * 2).astype(np.float16).tobytes()
    states = [
        tuple(
            np.arange(np.prod(dims)).astype(np.float16 if name == "tail" else np.float32).tobytes()
            for name, dims in shape.dims.items()
        )
        for _ in range(shape.layers if meta.has_states else 0)
    ]
    return CompiledChunk(meta, "text", ids, [(part, part)], states=states)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "hybrid.kvo", make_chunk())


def write(path: Path, chunk: CompiledChunk) -> Path:
    with path.open("wb") as file:
        write_object(file, chunk)
    return path


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The file with another header, sealed again."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    header["__metadata__"]["header"] = seal(header)
    raw = canonical(header)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])
    return path


def test_golden_bytes(path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN


def test_the_states_come_back_and_any_safetensors_reader_sees_them(path: Path) -> None:
    with ObjectFile(path) as file:
        file.verify()
        assert file.meta.cut == CUT and file.meta.target == TARGET
        assert file.state_bytes == SHAPE.num_bytes(2) == 2 * (3 * 2 * 2 + 4 * (2 * 2 * 2 + 2 * 2 * 3))
        state = np.frombuffer(file.states(1)["state"], dtype=np.float32)
    assert state.tolist() == list(range(12))
    tensors = load_file(path)
    assert tensors["states.001.operator"].shape == (2, 2, 2) and tensors["states.000.tail"].dtype == np.float16
    assert np.array_equal(tensors["states.001.state"].ravel(), state)


def test_a_chunk_that_ends_before_its_cut_holds_none(tmp_path: Path) -> None:
    with ObjectFile(write(tmp_path / "short.kvo", make_chunk(cut=4))) as file:
        file.verify()
        assert not file.state_bytes and "states" not in file.checksums


def test_a_convolution_alone_has_only_tails(tmp_path: Path) -> None:
    target = replace(TARGET, geometry=replace(TARGET.geometry, states=StateShape(3, 4, 2)))
    with ObjectFile(write(tmp_path / "tails.kvo", make_chunk(target=target))) as file:
        file.verify()
        assert list(file.states(2)) == ["tail"]


def make_block() -> CompiledChunk:
    """The same, as the first block of a chain: it has no cut and no operators."""
    chunk = make_chunk()
    key = TARGET.identify_block(chunk.tokens, "").key
    states = [(tail, state) for tail, _, state in chunk.states]
    return replace(chunk, meta=replace(chunk.meta, key=key, cut=None, parent=""), states=states)


def test_a_block_of_a_chain_has_the_state_at_its_end_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "block.kvo", make_block())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN_BLOCK
    with ObjectFile(path) as file:
        file.verify()
        assert list(file.states(1)) == ["tail", "state"] and file.meta.cut is None and file.meta.has_states
        assert file.state_bytes == 2 * (3 * 2 * 2 + 4 * 2 * 2 * 3)
    for change in (lambda fields: fields.update(cut="3"), lambda fields: fields.pop("parent")):
        forged(write(path, make_block()), lambda header, change=change: change(header["__metadata__"]))  # type: ignore[misc]
        with pytest.raises(ObjectError), ObjectFile(path) as file:
            file.verify()


def test_every_flipped_byte_is_refused(path: Path) -> None:
    """One bit of each, another one in the next."""
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(ObjectError), ObjectFile(path) as file:
            file.verify()


def test_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    chunk = make_chunk()
    wrong = np.full(12, np.inf, dtype=np.float32).tobytes()
    states = [(*chunk.states[0][:2], wrong), chunk.states[1]]
    with (
        ObjectFile(write(tmp_path / "inf.kvo", replace(chunk, states=states))) as file,
        pytest.raises(ObjectError, match=f"^{tmp_path / 'inf.kvo'}: "),
    ):
        file.verify()


def _with_states(**more: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        fields = dict(zip(StateShape.__annotations__, astuple(SHAPE), strict=True)) | more
        header["__metadata__"]["states"] = json.dumps(fields, sort_keys=True)

    return change


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "no cut": lambda header: header["__metadata__"].pop("cut"),
    "no states": lambda header: header["__metadata__"].pop("states"),
    "another cut": lambda header: header["__metadata__"].update(cut="2"),
    "a cut after the end": lambda header: header["__metadata__"].update(cut="4"),
    "a negative cut": lambda header: header["__metadata__"].update(cut="-1"),
    "more layers": _with_states(layers=3),
    "very many layers": _with_states(layers=1 << 15),
    "a bool": _with_states(heads=True),
    "a float": _with_states(rows=2.0),
    "huge": _with_states(heads=1 << 16, rows=1 << 16, operator=1 << 16),
    "an operator of another size": _with_states(operator=3),
    "no columns": _with_states(columns=0),
    "heads without rows": _with_states(rows=0),
    "another field": _with_states(more=1),
    "no JSON": lambda header: header["__metadata__"].update(states="{"),
    "a list": lambda header: header["__metadata__"].update(states="[1]"),
    "nested": lambda header: header["__metadata__"].update(states="[" * 10_000),
    "no such tensor": lambda header: header.pop("states.001.state"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_forged_headers_are_refused(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(ObjectError), ObjectFile(forged(path, change)) as file:
        file.verify()


def test_an_object_for_other_states_is_refused_naming_both(path: Path) -> None:
    other = replace(TARGET, geometry=replace(TARGET.geometry, states=replace(SHAPE, heads=4)))
    with ObjectFile(path) as file, pytest.raises(ForeignObjectError, match=r"heads=2.*heads=4"):
        file.meta.require(other, "an object")

"""The doctor finds nothing on any supported architecture, and finds each thing that a test breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from subjects import LENGTH_DEPENDENT, each_kind, subject
from torch import Tensor
from transformers import LlamaConfig

from pictool.doctor.exactness import CHECKS, examine_exactness
from pictool.doctor.verdict import Verdict, VerdictStatus
from pictool.errors import InputError
from pictool.runtime import attention
from pictool.runtime.memory.image import Image
from pictool.runtime.model import Model, load_model, wrap_model
from pictool.runtime.rope import Rope, RotaryTables
from pictool.runtime.stack import LayerStack
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

FULL, LAYER_0, EVERYTHING, SCATTERED, AGAIN, DAMAGE, DECODE = CHECKS


def examined(model: Model, store: Store) -> dict[str, Verdict]:
    return {verdict.check: verdict for verdict in examine_exactness(model, store)}


def failed(verdicts: dict[str, Verdict]) -> set[str]:
    return {check for check, verdict in verdicts.items() if verdict.status is VerdictStatus.FAILED}


@pytest.mark.parametrize("architecture", [*each_kind(), *LENGTH_DEPENDENT])
def test_all_is_well_on_every_architecture(architecture: str, store: Store) -> None:
    verdicts = examined(subject(architecture).model, store)
    assert failed(verdicts) == set() and list(verdicts) == list(CHECKS)
    is_skipped = verdicts[SCATTERED].status is VerdictStatus.SKIPPED
    assert is_skipped == (architecture in LENGTH_DEPENDENT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_the_models_own(dtype: str, store: Store) -> None:
    """RoPE's frequencies stay float32, as transformers has them: rounded, far positions are other positions."""
    model = load_model("embedded-small", "cpu", dtype)
    verdicts = examined(model, store)
    assert failed(verdicts) == set()
    assert verdicts[LAYER_0].values["difference"] < 1e-3
    assert model.module.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_model_without_room_is_refused(store: Store) -> None:
    module = tiny.random_module(LlamaConfig(**{**tiny.SIZE, "max_position_embeddings": 128}))
    with pytest.raises(InputError, match=r"^in-memory: .*\(128\)"):
        list(examine_exactness(wrap_model(module, tiny.tokenizer()), store))


Break = Callable[[pytest.MonkeyPatch], None]


def wrong_sign(patch: pytest.MonkeyPatch) -> None:
    rotate = Rope.rotate
    patch.setattr(Rope, "rotate", lambda self, x, table: rotate(self, x, (table[0], -table[1])))


def keys_one_position_on(patch: pytest.MonkeyPatch) -> None:
    """Relocated keys are rotated to the next position."""
    relocate = Image.relocate

    def shifted(self: Image, layer: int, start: int, end: int) -> None:
        tables = self._tables
        later = {kind: tuple(part.roll(-1, 1) for part in table) for kind, table in tables.of_kind.items()}
        self._tables = RotaryTables(tables.positions + 1, later)
        relocate(self, layer, start, end)
        self._tables = tables

    patch.setattr(Image, "relocate", shifted)


def rows_not_written(patch: pytest.MonkeyPatch) -> None:
    """Fresh K and V of a checked layer are lost."""
    patch.setattr(Image, "write", lambda self, layer, key, value, rows: None)


def mask_of_the_last_rows(patch: pytest.MonkeyPatch) -> None:
    """The known trap: a causal mask aligned to the last rows, whatever positions the rows have."""
    rectangle = attention._rectangle

    def aligned(query: Tensor, key: Tensor, value: Tensor, spans: Any, *more: Any) -> Tensor:
        rows, keys = query.shape[2], key.shape[2]
        return rectangle(query, key, value, np.array([(keys - rows, keys)]), *more)

    patch.setattr(attention, "_rectangle", aligned)


def objects_written_to(patch: pytest.MonkeyPatch) -> None:
    """Relocating rotates the object's own keys, in its file."""
    layer = ObjectFile.layer

    def writing(self: ObjectFile, index: int, into: memoryview | None = None) -> Any:
        if self.path.suffix == ".kvo" and self.meta.num_tokens == 17:
            with self.path.open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)
                file.seek(-1, 2)
                file.write(bytes([last[0] ^ 1]))
        return layer(self, index, into)

    patch.setattr(ObjectFile, "layer", writing)


def checksums_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ObjectFile, "_require_checksum", lambda *_: None)


def steps_at_the_last_position(patch: pytest.MonkeyPatch) -> None:
    tables = LayerStack.rotary_tables
    patch.setattr(LayerStack, "rotary_tables", lambda self, at: tables(self, at - 1 if len(at) == 1 else at))


def logits_not_finite(patch: pytest.MonkeyPatch) -> None:
    append = Image.append
    patch.setattr(Image, "append", lambda self, token: append(self, token) * float("nan"))


BROKEN: list[tuple[Break, set[str]]] = [
    (wrong_sign, {FULL, LAYER_0, EVERYTHING, SCATTERED, DECODE}),
    (keys_one_position_on, {LAYER_0, SCATTERED}),
    (rows_not_written, {EVERYTHING}),
    (mask_of_the_last_rows, {SCATTERED}),
    (objects_written_to, {AGAIN}),
    (checksums_not_compared, {DAMAGE}),
    (steps_at_the_last_position, {DECODE}),
    (logits_not_finite, {DECODE}),
]


@pytest.mark.parametrize(("break_it", "found"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_each_check_finds_what_is_broken(
    break_it: Break, found: set[str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert found <= failed(examined(subject("llama").model, store))


def test_every_check_can_fail() -> None:
    assert set().union(*(found for _, found in BROKEN)) == set(CHECKS)


def test_an_error_is_a_verdict_and_the_other_checks_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error:\nan illegal memory access")

    monkeypatch.setattr(Image, "append", fails)
    verdicts = examined(subject("llama").model, store)
    assert failed(verdicts) == {DECODE}
    assert verdicts[DECODE].text == "RuntimeError: CUDA error: an illegal memory access"

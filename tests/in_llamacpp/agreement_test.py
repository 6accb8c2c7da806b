"""Rule 10: the torch engine and this one agree on the same weights, in tokens, logits and answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pictool.engines.base import Engine
from pictool.engines.llamacpp.engine import LlamaCppEngine
from pictool.engines.llamacpp.model import GgufModel, open_gguf
from pictool.engines.torch import TorchEngine
from pictool.fidelity.divergence import check_prompts
from pictool.linker.grid import named_policy
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store

POLICIES = ("full", "naive", "legolink-4", "legolink-16", "legolink-1", "prefix")
TOLERANCE = 1e-3
NUM_TEXTS = 10_000
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz     ", "ABCxyz 0123456789.,;:!?'\"()[]{}<>/\\-_=+*&^%$#@~`|", "äöüßéèñçøåœ ÄÖÜ",
    "東京都漢字かなカナ한국어 ", "абвгдежзийклмн АБВ", "🙂🎉👩\u200d👧 🇩🇪✨", " \t\n\r\u00a0\u2003",
    "it's we'll I'm don't they've 12,345.67 ",
)  # fmt: skip


@pytest.fixture(scope="module")
def ours() -> Model:
    return load_model("embedded")


@pytest.fixture(scope="module")
def theirs(ours: Model, embedded_gguf: Path) -> GgufModel:
    return opened(ours, embedded_gguf, "float32")


def opened(ours: Model, path: Path, dtype: str) -> GgufModel:
    """The same model: no field of a GGUF file says what separates documents."""
    model = open_gguf(str(path), dtype=dtype)
    model.separator = ours.separator
    return model


def draw_text(draw: random.Random) -> str:
    """Runs of characters of several scripts, words and white space."""
    runs = range(draw.randint(1, 8))
    return "".join(
        "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 12)))
        for alphabet in (draw.choice(ALPHABETS) for _ in runs)
    )


def test_tokens_are_those_of_the_original_tokenizer(ours: Model, theirs: GgufModel) -> None:
    texts = [draw_text(random.Random(number)) for number in range(NUM_TEXTS)]
    other = [text for text in texts if ours.encode(text) != theirs.encode(text)]
    assert not other, f"{len(other)} of {NUM_TEXTS}, as {other[:3]!r}"
    for text in texts[:500]:
        ids = theirs.encode(text)
        assert theirs.tokenizer.decode(ids) == text == "".join(map(str, [theirs.tokenizer.decode(ids)]))
        theirs_at = theirs.encoder.encode_with_offsets(text)[1]
        assert [end for _, end in theirs_at][-1] == len(text)


@pytest.mark.parametrize("name", POLICIES)
def test_answers_agree(ours: Model, theirs: GgufModel, tmp_path: Path, name: str) -> None:
    specs = check_prompts(ours, named_policy(name), ours.max_positions)
    engines: list[Engine] = [
        TorchEngine(ours, Store(tmp_path / "torch")), LlamaCppEngine(theirs, Store(tmp_path / "gguf"))
    ]  # fmt: skip
    for spec in specs:
        torch_answer, answer = (engine.answer(spec) for engine in engines)
        apart = float((torch_answer.logits - answer.logits).abs().max())
        assert apart <= TOLERANCE
        assert answer.generated.tokens == torch_answer.generated.tokens
        assert answer.report()["engine"] == "llamacpp"
        assert answer.link.recomputed == pytest.approx(torch_answer.link.recomputed)


def test_kv_in_float16_is_near(ours: Model, embedded_gguf: Path, tmp_path: Path) -> None:
    half = LlamaCppEngine(opened(ours, embedded_gguf, "auto"), Store(tmp_path / "gguf"))
    assert half.model.dtype == "float16"
    for spec in check_prompts(ours, named_policy("legolink-16"), ours.max_positions):
        exact, linked = TorchEngine(ours, Store(tmp_path / "torch")).link(spec), half.link(spec)
        assert exact.logits is not None and linked.logits is not None
        assert float((exact.logits - linked.logits).abs().max()) < 0.1
        assert torch.equal(exact.logits.argmax(), linked.logits.argmax())

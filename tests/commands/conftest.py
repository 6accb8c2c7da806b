from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from transformers import LlamaConfig

from commands.run import Objects, pic, write

TEXT = "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n"
MORE = "Numbers such as 1,024 or 3.14 stand here too, and words.\n"


def save(directory: Path, seed: int = 0, positions: int = 512) -> Path:
    return tiny.save_model(directory, LlamaConfig(**{**tiny.SIZE, "max_position_embeddings": positions}), seed)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a model directory, shared: nothing writes to it."""
    return save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def objects(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Objects]:
    """Objects of this model, of another one and of another dtype, and a store; shared: nothing writes to them."""
    root = tmp_path_factory.mktemp("objects")
    other = save(root / "other", seed=1)
    text, store = write(root / "a.txt", TEXT), root / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for name, more in (("mine", ("-m", model)), ("foreign", ("-m", other)), ("half", ("-m", model))):
            dtype = "bfloat16" if name == "half" else "float32"
            done = pic("compile", text, *more, "--dtype", dtype, "-o", root / f"{name}.kvo", "--store", store)
            assert done.code == 0, done.err
    yield Objects(root / "mine.kvo", root / "foreign.kvo", root / "half.kvo", store)


@pytest.fixture
def texts() -> tuple[Path, Path]:
    """Two documents in the working directory."""
    return write("a.txt", TEXT), write("b.txt", MORE)

"""What texts were compiled to is recalled for the model that compiled them, and for no other in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import tiny
from commands.run import pic, write

from pictool.commands import compile as command
from pictool.commands.settings.settings import Settings
from pictool.runtime.model import Model


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tiny.save_model(tmp_path / "other", tiny.CONFIGS["llama"](), seed=9) / "model.safetensors"


def compiled(model_dir: Path) -> str:
    write("a.txt", "The harbour was quiet.")
    ran = pic("compile", "a.txt", "-m", model_dir)
    assert ran.code == 0, ran.err
    return ran.out.split()[3]


def never(_: Settings) -> NoReturn:
    raise AssertionError("the model is opened")


def test_an_unchanged_text_opens_no_model(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.reading._COARSE_NS", -1)
    assert compiled(model_dir) == "new"
    monkeypatch.setattr(command, "open_model", never)
    assert compiled(model_dir) == "cached"


def test_a_model_of_this_moment_is_opened(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another may take its place without another time."""
    assert compiled(model_dir) == "new"
    opened: list[Model] = []
    open_model: Callable[[Settings, str], Model] = vars(command)["open_model"]

    def count(settings: Settings, engine: str) -> Model:
        opened.append(open_model(settings, engine))
        return opened[-1]

    monkeypatch.setattr(command, "open_model", count)
    assert compiled(model_dir) == "cached" and len(opened) == 1


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_model_that_is_replaced_meanwhile_is_not_recalled(
    is_loaded: bool, model_dir: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are those of the files that were loaded, which may have other names now."""
    monkeypatch.setattr("pictool.reading._COARSE_NS", -1)
    open_model: Callable[[Settings, str], Model] = vars(command)["open_model"]

    def open_and_replace(settings: Settings, engine: str) -> Model:
        model = open_model(settings, engine) if is_loaded else None
        if model is not None:
            _ = model.stack
        other.replace(model_dir / "model.safetensors")
        return model or open_model(settings, engine)

    monkeypatch.setattr(command, "open_model", open_and_replace)
    assert compiled(model_dir) == "new"
    monkeypatch.setattr(command, "open_model", open_model)
    assert compiled(model_dir) == ("new" if is_loaded else "cached")

"""The first line of a results file: what its numbers were made of, so that only equal runs continue it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.compiler.compile import CODEC
from pictool.errors import InputError
from pictool.eval.case import Case
from pictool.eval.datasets.base import Dataset
from pictool.eval.units import Settings
from pictool.runtime.machine import installed, machine

if TYPE_CHECKING:
    from pictool.runtime.model import Model

FORMAT, VERSION = "pictool-eval", 1


@dataclass(frozen=True)
class Header:
    """Of a results file.

    dataset: its name and fields, the number of its cases, and `sha256` over their content. model: its name,
    fingerprints, dtype, device, and `prompts`, a hash of what makes its prompts and ends its answers. threads: of
    each process; they decide the last bits, so who continues the file uses as many.
    """

    format: str
    version: int
    pictool: str | None  # None: run from its sources
    torch: str
    dataset: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]
    threads: int
    machine: dict[str, Any]

    def report(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def identity(self) -> dict[str, Any]:
        """What two runs must share to go into one file. Names, paths and machines are no part of it."""
        model = {name: value for name, value in self.model.items() if name != "name"}
        return {
            "pictool": self.pictool, "torch": self.torch, "dataset": [self.dataset["name"], self.dataset["sha256"]],
            "model": model, "codec": CODEC, **self.settings,
        }  # fmt: skip

    @property
    def digest(self) -> str:
        """Of the identity (hex)."""
        return _sha256([self.identity])

    def words(self, field: str) -> str:
        """What a person calls a field of the identity."""
        if field == "dataset":
            given = ", ".join(f"{name}={value}" for name, value in self.dataset["params"].items())
            return f"{self.dataset['name']} ({given}; content {self.dataset['sha256'][:12]})"
        if field == "model":
            name, mark = self.model["name"], _sha256([self.identity["model"]])[:12]
            return f"{name} ({self.model['dtype']} on {self.model['device']}; {mark})"
        return json.dumps(self.identity[field], ensure_ascii=False)

    @property
    def title(self) -> str:
        """What a table or a picture calls the dataset: its file's name, if it is of one."""
        path = self.dataset["params"].get("path")
        return str(self.dataset["name"]) if path is None else Path(path).name

    def is_of_machine(self, other: Header) -> bool:
        """Whether times of both may stand side by side, as far as the system tells."""
        return all(self.machine.get(name) == other.machine.get(name) for name in ("cpu", "cores", "gpu"))

    def require_same(self, asked: Header, path: Path) -> None:
        """Refuse to continue this header's file with another experiment.

        Raises:
            InputError: names what differs, on both sides.
        """
        here, there = asked.identity, self.identity
        different = [name for name in here if here[name] != there.get(name)]
        if different:
            sides = "; ".join(f"{name} {self.words(name)} there, {asked.words(name)} here" for name in different)
            raise InputError(
                f"{path}: holds results of another experiment: {sides}. Name another file with -o, or begin it anew "
                "with --force"
            )

    @classmethod
    def of(cls, values: Any) -> Header:
        """The header of a JSON object.

        Raises:
            InputError: of another version, or incomplete.
        """
        version = values.get("version") if isinstance(values, dict) else None
        if version != VERSION:
            raise InputError(f"is of version {version}, but this pictool reads version {VERSION}")
        try:
            header = cls(**values)
            _ = header.digest, header.words("dataset"), header.words("model"), header.title, range(header.threads)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError("the header is damaged") from error
        return header


def make_header(model: Model, dataset: Dataset, cases: Sequence[Case], settings: Settings, threads: int) -> Header:
    """The header of a new experiment. Loads no weights."""
    import torch

    return Header(
        FORMAT, VERSION, installed("pictool"), torch.__version__,
        dataset={
            "name": dataset.name, "params": json.loads(json.dumps(dataset.params)), "cases": len(cases),
            "sha256": _sha256(asdict(case) for case in cases),
        },
        model=_of_model(model),
        settings=asdict(settings),
        threads=threads,
        machine={name: value for name, value in machine().items() if name != "threads"},
    )  # fmt: skip


def _of_model(model: Model) -> dict[str, Any]:
    tokenizer = model.tokenizer
    prompts = [str(tokenizer.chat_template), tokenizer.bos_token, model.bos_id, sorted(model.eos_ids)]
    return {
        "name": model.name, "fingerprint": model.fingerprint, "tokenizer": model.target.tokenizer,
        "prompts": _sha256([prompts]), "dtype": model.dtype, "device": model.device,
    }  # fmt: skip


def _sha256(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()

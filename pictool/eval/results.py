"""A results file: a header, then one JSON object per line, each the result of a case under a policy.

The header says what the numbers were made of, so that only an equal experiment continues a file. The file is
append-only: all results of a group of cases are written at once and synced. A run that was killed is continued; a last
line that is not whole was being written then, and is done again. Two processes cannot write one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pictool.compiler.compile import CODEC
from pictool.engines.answer_file import lock_output, model_identity
from pictool.errors import InputError, StoreError
from pictool.eval.cases import SpecOptions
from pictool.eval.datasets.base import Case, Dataset
from pictool.reading import parse_json, shown
from pictool.runtime.machine import installed, machine

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Times:
    """Seconds. load_s, select_s and recompute_s are parts of ttft_s, as in `Timing`; decode_s comes after it."""

    ttft_s: float
    load_s: float
    select_s: float
    recompute_s: float
    decode_s: float


FORMAT, VERSION = "pictool-eval", 2
MEASURED = ("timing", "peak_bytes")  # fields of a result that differ from run to run; all others do not
_BEGINNING = f'{{"format": "{FORMAT}"'.encode()


@dataclass(frozen=True)
class ResultsHeader:
    """The first line of a results file. Fields are the keys of its JSON, in this order.

    Fields:
        pictool: the version; None if it runs from its sources.
        dataset: its name and fields, the number of its cases, and `sha256` over their content.
        model: its name, fingerprints, dtype, device, and `prompts`, a hash of what makes its prompts and ends its
            answers.
        settings: the fields of `SpecOptions`.
        threads: of torch; they decide the last bits, so who continues the file uses as many.
    """

    format: str
    version: int
    pictool: str | None
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
            "version": self.version, "pictool": self.pictool, "torch": self.torch,
            "dataset": [self.dataset["name"], self.dataset["sha256"]], "model": model, "codec": CODEC, **self.settings,
        }  # fmt: skip

    @property
    def digest(self) -> str:
        """Of the identity (hex)."""
        return _sha256([self.identity])

    @property
    def title(self) -> str:
        """What a table or a picture calls the dataset: the name of its file, if it has one."""
        path = self.dataset["params"].get("path")
        return str(self.dataset["name"]) if path is None else Path(path).name

    def is_of_machine(self, other: ResultsHeader) -> bool:
        """Whether the times of both can be compared, as far as the system tells."""
        return all(self.machine.get(name) == other.machine.get(name) for name in ("cpu", "cores", "gpu"))

    def require_same(self, other: ResultsHeader, path: Path) -> None:
        """Refuse to continue this header's file with another experiment.

        Raises:
            InputError: names what differs.
        """
        here, there = other.identity, self.identity
        different = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if different:
            raise InputError(
                f"{path}: has results of another experiment, which differs in {', '.join(different)}; choose another "
                "file with -o"
            )

    @classmethod
    def from_json(cls, values: Any) -> ResultsHeader:
        """The header of a JSON object.

        Raises:
            InputError: of another version, or incomplete.
        """
        version = values.get("version") if isinstance(values, dict) else None
        if version != VERSION:
            raise InputError(f"has version {version}, but this pictool reads version {VERSION}")
        try:
            header = cls(**values)
            _ = header.digest, header.title
            _ = header.is_of_machine(header)
            _ = range(header.threads)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError("the header is damaged") from error
        return header


def make_header(model: Model, dataset: Dataset, cases: Sequence[Case], options: SpecOptions) -> ResultsHeader:
    """The header of a new experiment. Loads no weights."""
    import torch

    return ResultsHeader(
        FORMAT, VERSION, installed("pictool"), torch.__version__,
        dataset={
            "name": dataset.name, "params": json.loads(json.dumps(dataset.params)), "cases": len(cases),
            "sha256": _sha256(asdict(case) for case in cases),
        },
        model={"name": model.name, **model_identity(model)},
        settings=settings_of(options),
        threads=torch.get_num_threads(),
        machine={name: value for name, value in machine().items() if name != "threads"},
    )  # fmt: skip


def settings_of(options: SpecOptions) -> dict[str, Any]:
    """The options as JSON has them; without stop texts and a separator as before there were any."""
    said = {"stop": bool(options.stop), "separator": options.separator is not None}
    settings = {**asdict(options), "stop": list(options.stop)}
    return {name: value for name, value in settings.items() if said.get(name, True)}


def _sha256(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True)
class CaseResult:
    """The result of a case under a policy: one line of a results file. Fields are its JSON's keys, in this order.

    Fields:
        other_model: fingerprint of a second model that the user named.
        metric: the case's own. scores: by every metric.
        kl, answer_kl: KL(full ‖ this) in nats, of the first token and of all tokens of full's answer. Files of
            earlier versions have rows without them.
        agreement: share of tokens that are equal to those of `full`, position by position, of the longer answer.
        common_prefix, generated: tokens of the answer. tokens: of the prompt. context: of head and documents.
        rows: mean number of context rows that were computed per layer.
    """

    id: str
    label: str
    kind: str
    algo: str
    params: dict[str, Any]
    other_model: str | None
    metric: str
    scores: dict[str, float]
    answer: str
    kl: float | None
    answer_kl: float | None
    agreement: float | None
    common_prefix: int | None
    generated: int
    tokens: int
    context: int
    rows: float
    bytes_read: int
    timing: Times
    peak_bytes: int | None

    @property
    def key(self) -> tuple[str, str]:
        return self.id, self.label

    @property
    def row_share(self) -> float:
        """`rows` as a share of the context."""
        return self.rows / self.context if self.context else 0.0

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything that is the same in every run."""
        return {name: value for name, value in self.report().items() if name not in MEASURED}

    def report(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> CaseResult:
        """The result of a JSON object.

        Raises:
            InputError: a key is missing, unknown, or has a value of another type.
        """
        checked = _require_types(cls, values, "")
        for name, score in checked["scores"].items():
            if type(score) not in (int, float):
                raise InputError(f"scores.{name} has the invalid value {shown(score)}")
        _require_types(Times, checked["timing"], "timing.")
        if checked["timing"]["ttft_s"] <= 0:
            raise InputError(f"timing.ttft_s has the invalid value {shown(checked['timing']['ttft_s'])}")
        if checked["metric"] not in checked["scores"]:
            raise InputError(f"has no score for its metric {shown(checked['metric'])}")
        return cls(**{**checked, "timing": Times(**checked["timing"])})


def _require_types(cls: type[Any], values: Any, prefix: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict) or set(values) != set(hints):
        raise InputError(f"is not a {'row' if not prefix else 'timing'} of this version")
    for name, hint in hints.items():
        if hint is not Times and not _is_of_type(values[name], hint):
            raise InputError(f"{prefix}{name} has the invalid value {shown(values[name])}")
    return values


def _is_of_type(value: Any, hint: Any) -> bool:
    kind = hint if isinstance(hint, types.UnionType) else typing.get_origin(hint) or hint
    return isinstance(value, kind) and not isinstance(value, bool)


class ResultsFile:
    """An open results file, locked. `results` are those that it holds, by case and label."""

    def __init__(
        self, path: Path, file: BinaryIO, header: ResultsHeader, results: Mapping[tuple[str, str], CaseResult]
    ) -> None:
        self.path, self.header = path, header
        self.results = dict(results)
        self._file = file

    def append(self, results: Sequence[CaseResult]) -> None:
        """Write results, so that they last.

        Raises:
            StoreError: the disk is full; what was written before stays.
        """
        _write(self.path, self._file, [result.report() for result in results])
        self.results |= {result.key: result for result in results}


@contextmanager
def open_results(
    path: Path, header: ResultsHeader, on_note: Callable[[str], None] = lambda _: None
) -> Iterator[ResultsFile]:
    """Continue the results file of the experiment that `header` describes, or begin it.

    Args:
        on_note: called with what was dropped.

    Raises:
        InputError: no results file, one of another experiment, a damaged one, or one that another process writes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path}: is not a regular file; choose another with -o")
    with path.open("a+b") as file:
        lock_output(path, file)
        file.seek(0)
        data = file.read()
        if data[: len(_BEGINNING)] != _BEGINNING[: len(data)]:  # a shorter one may be cut off
            raise InputError(f"{path}: is not a results file of pic eval; choose another with -o")
        lines = data.split(b"\n")[:-1]  # without what comes after the last line break
        if not lines:
            file.truncate(0)
            _write(path, file, [header.report()])
            yield ResultsFile(path, file, header, {})
            return
        held = _read_header(path, lines[0])
        held.require_same(header, path)
        results, is_torn = _read_results(path, lines[1:])
        whole = b"".join(line + b"\n" for line in (lines[:-1] if is_torn else lines))
        if len(whole) < len(data):
            on_note(f"{path}: the last line is incomplete; it is dropped and computed again")
            file.truncate(len(whole))
        yield ResultsFile(path, file, held, results)


def _read_header(path: Path, line: bytes) -> ResultsHeader:
    try:
        return ResultsHeader.from_json(_parse(line))
    except InputError as error:
        raise InputError(f"{path}: line 1: {error}; choose another file with -o") from error


def _read_results(path: Path, lines: Sequence[bytes]) -> tuple[dict[tuple[str, str], CaseResult], bool]:
    """The results of the lines after the header, and whether the last one cannot be read."""
    results: dict[tuple[str, str], CaseResult] = {}
    for number, line in enumerate(lines, 2):
        try:
            result = CaseResult.from_json(_parse(line))
        except InputError as error:
            if number == len(lines) + 1:
                return results, True
            raise InputError(f"{path}: line {number}: {error}; remove the line to have it computed again") from error
        if result.key in results:
            raise InputError(f"{path}: line {number}: case {result.id} under {result.label} appears twice; remove one")
        results[result.key] = result
    return results, False


def _parse(line: bytes) -> Any:
    try:
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        raise InputError("is not JSON") from error


def _write(path: Path, file: BinaryIO, values: Sequence[Any]) -> None:
    text = "".join(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n" for value in values)
    try:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written ({error.strerror}); free some space, and run the command again to continue"
        ) from error

"""The datasets, one file each. A file put here is found, and so is one of another package: nothing else names it.

Another package adds datasets by an entry point:

    [project.entry-points."pictool.datasets"]
    my-dataset = "my_package.my_dataset:MyDataset"
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pictool.errors import InputError
from pictool.eval.datasets.base import Dataset, FileDataset
from pictool.eval.datasets.records import first_record
from pictool.linker.fields import make
from pictool.plugins import find_classes

REMOVED = ("picbench", "world")  # generated ones of 0.3


@cache
def datasets() -> Mapping[str, type[Dataset]]:
    """Every dataset by its name."""
    return find_classes(__name__, __path__, "pictool.datasets", Dataset)  # type: ignore[type-abstract]


def open_dataset(name_or_path: str, fields: Mapping[str, str]) -> Dataset:
    """Open a dataset by its name, or the one that a file holds, recognised by its first record.

    A name comes before a file of that name (`./NAME` is the file). The dataset's file is read by `cases`.

    Args:
        fields: the dataset's fields, as texts; lists separated by commas. For a file, `format` names the dataset.

    Raises:
        InputError: no such dataset or file, a file of no known dataset, or a field that does not fit.
    """
    values = dict(fields)
    forced = values.pop("format", None)
    if name_or_path in datasets():
        if forced is not None:
            raise InputError(f"{name_or_path}: format={forced} applies to files; this is a dataset's name")
        return make(datasets()[name_or_path], name_or_path, values)
    if not os.path.exists(name_or_path):
        if name_or_path in REMOVED:
            raise InputError(
                f"dataset {name_or_path}: is no longer part of pictool; use a file of your own questions, or create "
                f"these in a checkout (python -m benchmarks.questions {name_or_path}.jsonl)"
            )
        raise InputError(f"dataset {name_or_path!r}: is neither a file nor one of {', '.join(datasets())}")
    if "path" in values:
        raise InputError(f"{name_or_path}: path={values['path']} names a second file")
    name = _recognise(Path(name_or_path)) if forced is None else forced
    if name not in _file_datasets():
        raise InputError(f"{name_or_path}: format={name} must be one of {', '.join(_file_datasets())}")
    return make(_file_datasets()[name], name, {"path": name_or_path, **values})


def _file_datasets() -> Mapping[str, type[FileDataset]]:
    return {name: cls for name, cls in datasets().items() if issubclass(cls, FileDataset)}


def _recognise(path: Path) -> str:
    """The name of the dataset whose marks the file's first record has."""
    record = first_record(path)
    names = [name for name, cls in _file_datasets().items() if all(key in record.values for key in cls.marks)]
    if len(names) == 1:
        return names[0]
    if names:
        raise record.error(f"may belong to {' or '.join(names)}; choose one with format=")
    known = ", ".join(f"{name} ({', '.join(cls.marks)})" for name, cls in _file_datasets().items())
    raise record.error(f"matches no known dataset; known datasets: {known}")

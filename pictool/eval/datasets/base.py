"""What a dataset is: a source of cases, generated or read from a file. Nothing is downloaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pictool.eval.datasets.records import Record, read_records


@dataclass(frozen=True)
class Case:
    """A question over documents. The prompt is head + documents + query template, as `lay_out_spec` puts it together.

    Fields:
        id: stable and unique in its dataset.
        documents: texts; each is one chunk, or more if it is cut.
        answers: any of them is right; at least one.
        kind: a dataset's own sub-class, for tables by kind.
        head: text before the documents; None: the model's default.
        query_template: contains {query}; None: the model's default.
        is_one_text: the documents are pieces of one text, with nothing between them.
        separator: text between documents and before the query, less what is there already; None: the model's.
        metric: the dataset's main metric, a name in `metrics.METRICS`.
        stop: texts that end the answer and are no part of it, as in `Sampling`.
    """

    id: str
    documents: tuple[str, ...]
    query: str
    answers: tuple[str, ...]
    kind: str = ""
    head: str | None = None
    query_template: str | None = None
    metric: str = "f1"
    max_new_tokens: int = 32
    stop: tuple[str, ...] = ()
    is_one_text: bool = False
    separator: str | None = None


@dataclass(frozen=True)
class Dataset(ABC):
    """A source of cases; its fields are its options, of type int, float, str or tuples of these."""

    name: ClassVar[str]
    reference: ClassVar[str]  # paper or repository

    @property
    def params(self) -> dict[str, Any]:
        return asdict(self)

    @abstractmethod
    def cases(self) -> Iterator[Case]:
        """The cases, always the same ones in the same order, with ids that are unique.

        Raises:
            InputError: while iterating; names the file, the line and the key that is wrong.
        """


@dataclass(frozen=True)
class FileDataset(Dataset):
    """A dataset in one file of JSON records, one case each."""

    marks: ClassVar[tuple[str, ...]]  # keys by which a record is recognised as one of this dataset
    path: str

    def cases(self) -> Iterator[Case]:
        places: dict[str, str] = {}
        for record in read_records(Path(self.path)):
            case = self.case(record)
            if case.id in places:
                raise record.error(f"duplicate id {case.id!r}, first at {places[case.id]}; ids must be unique")
            places[case.id] = record.place
            yield case

    @abstractmethod
    def case(self, record: Record) -> Case:
        """The case of one record.

        Raises:
            InputError: names the file, the line and the key.
        """

"""Write generated questions for `pic eval` and `pic tune`, one record a line.

    python -m benchmarks.questions picbench.jsonl seed=2 tasks=keys,json
    python -m benchmarks.questions world.jsonl prompts=160
    pic eval world.jsonl --algo legolink-16

The name of the file, without its ending, is the dataset's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.questions import write_questions
from benchmarks.questions.picbench import Picbench
from benchmarks.questions.world import World
from pictool.eval.datasets.base import Dataset
from pictool.linker.fields import make

DATASETS: Mapping[str, type[Dataset]] = {"picbench": Picbench, "world": World}


def main(file: Path, *fields: str) -> None:
    values = dict(field.split("=", 1) for field in fields)
    write_questions(make(DATASETS[file.stem], file.stem, values), file)


if __name__ == "__main__":
    if len(sys.argv) < 2 or Path(sys.argv[1]).stem not in DATASETS:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])

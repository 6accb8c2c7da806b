"""What the check of `pic doctor` and `pic serve` finds on a model, and on the same model with links that are broken.

    python -m benchmarks.broken_links MODEL --out benchmarks/results/broken_links_smollm2.json

`unrotated`: keys stay where they were compiled. `moved`: values are those of other tokens, 31 places on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import write_results
from pictool import Model, Store, load_model
from pictool.engines import engine_of
from pictool.fidelity.divergence import measure_divergence
from pictool.linker.grid import named_policy
from pictool.runtime.memory.image import Image

POLICIES = ("auto", "legolink-16", "naive")
_relocate = Image.relocate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.model, "cpu", "float32")
    links = {"whole": (_relocate, POLICIES), "unrotated": (unrotated, ("auto",)), "moved": (moved, ("auto",))}
    lines = []
    for name, (relocate, policies) in links.items():
        with relocating(relocate):
            lines += [{"links": name, **line} for line in measure(model, policies)]
    for line in lines:
        print(line)
    write_results(options.out, {"model": model.name, "lines": lines})


def measure(model: Model, policies: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Nats an answer, the share of blind reuse's, and nats of the first token."""
    with tempfile.TemporaryDirectory() as directory:
        engine = engine_of(model)(model, Store(directory))
        measured = measure_divergence(engine, [named_policy(name) for name in policies])
    blind = measured[0].naive
    mean = statistics.fmean
    yield {"policy": "naive@none", "nats": mean(each.nats for each in blind), "first": mean(each.kl for each in blind)}
    for name, found in zip(policies, measured, strict=True):
        first = mean(each.kl for each in found.own)
        yield {"policy": name, "nats": found.nats, "share": found.share, "first": first}


@contextmanager
def relocating(relocate: Any) -> Iterator[None]:
    Image.relocate = relocate  # type: ignore[method-assign]
    try:
        yield
    finally:
        Image.relocate = _relocate  # type: ignore[method-assign]


def unrotated(image: Image, layer: int, start: int, end: int) -> None:
    pass


def moved(image: Image, layer: int, start: int, end: int) -> None:
    _relocate(image, layer, start, end)
    values = image._values[layer][:, :, start:end]
    values.copy_(values.roll(31, 2))


if __name__ == "__main__":
    main()

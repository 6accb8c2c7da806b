"""What is compiled again when a document is edited, over the versions that git has of files.

    python -m benchmarks.version_history docs/design.md docs/reference/vllm.md README.md CHANGELOG.md \\
        --out benchmarks/results/version_history.json

Each version is cut by content and at numbers of tokens, both at 512 tokens at most. A chunk that an earlier version had
is in the store; the others are compiled. Shares are of the tokens of all versions but the first.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.output import write_results
from pictool import Model, load_model
from pictool.compiler.chunking import make_chunks
from pictool.compiler.splitters.content import ContentSplitter

SIZE = 512
Cut = Callable[[str], list[str]]


def versions(name: str) -> Iterator[str]:
    """The texts that a file had, the oldest first."""
    listed = subprocess.run(["git", "log", "--format=%H", "--reverse", "--", name], capture_output=True, check=True)
    for commit in listed.stdout.decode().split():
        shown = subprocess.run(["git", "show", f"{commit}:{name}"], capture_output=True, check=False)
        if shown.returncode == 0:
            yield shown.stdout.decode()


def compiled_again(texts: Sequence[str], cut: Cut, length: Callable[[str], int]) -> float:
    """The share of tokens that are compiled, of all versions but the first."""
    known, total, again = {*cut(texts[0])}, 0, 0
    for text in texts[1:]:
        pieces = cut(text)
        total += sum(map(length, pieces))
        again += sum(length(piece) for piece in {*pieces} - known)
        known |= {*pieces}
    return again / total


def cuts(model: Model) -> dict[str, Cut]:
    return {
        "content": lambda text: list(ContentSplitter(SIZE).pieces(model, text)),
        "tokens": lambda text: [chunk.text for chunk in make_chunks(model, text, "text", SIZE)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, results = load_model(), {}
    for name in options.files:
        texts = list(versions(name))
        shares = {
            way: compiled_again(texts, cut, lambda piece: len(model.encode(piece))) for way, cut in cuts(model).items()
        }
        results[name] = {
            "versions": len(texts), "tokens_of_the_last": len(model.encode(texts[-1])),
            "compiled_again": {way: round(share, 4) for way, share in shares.items()},
        }  # fmt: skip
        print(name, results[name], flush=True)
    write_results(options.out, {"size": SIZE, "files": results})


if __name__ == "__main__":
    main()

"""Two objects compared: their headers, tokens and texts, and how far their KV is apart. Needs no model and no torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

import numpy as np

from pictool.store.objects.format import ObjectFile
from pictool.trace.object_stats import to_float32

MAX_WORDS = 4000  # of each text, beyond what begins and ends both alike, that are compared word by word


@dataclass(frozen=True)
class TextPiece:
    """A piece of two texts: in both ("="), only in the first ("-"), or only in the second ("+")."""

    where: str
    text: str


@dataclass(frozen=True)
class LayerDistance:
    """How far one layer's keys and values are apart: ‖a − b‖ / ‖a‖, 0 where both are 0."""

    key: float
    value: float


@dataclass(frozen=True)
class TokenOverlap:
    """How many token ids two objects have in common at their beginning and, beyond that, at their end."""

    sizes: tuple[int, int]
    at_start: int
    at_end: int

    @property
    def are_equal(self) -> bool:
        return self.sizes == (self.at_start, self.at_start)


def token_overlap(a: ObjectFile, b: ObjectFile) -> TokenOverlap:
    """Compare the token ids of two objects.

    Raises:
        ObjectError: damaged tokens.
    """
    first, second = a.tokens(), b.tokens()
    at_start = _num_common(first, second)
    return TokenOverlap(
        (len(first), len(second)), at_start, _num_common(first[at_start:][::-1], second[at_start:][::-1])
    )


def _num_common(
    a: np.ndarray[tuple[int, ...], np.dtype[np.int32]], b: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


def why_not_comparable(a: ObjectFile, b: ObjectFile) -> str:
    """Say why the KV of two objects cannot be compared number by number; "" if it can."""
    if a.meta.target.geometry != b.meta.target.geometry:
        return "the objects have different geometries"
    return "" if token_overlap(a, b).are_equal else "the objects have different tokens"


def layer_distances(a: ObjectFile, b: ObjectFile) -> tuple[LayerDistance, ...]:
    """Measure the distance of two objects of the same tokens and geometry, layer by layer. Two layers are in memory.

    Raises:
        ObjectError: a damaged layer.
    """
    assert not why_not_comparable(a, b)
    return tuple(
        LayerDistance(*(
            _distance(x, y, a.meta.target.dtype, b.meta.target.dtype)
            for x, y in zip(a.layer(layer), b.layer(layer), strict=True)
        ))
        for layer in range(a.meta.target.geometry.layers)
    )  # fmt: skip


def _distance(a: memoryview, b: memoryview, dtype_a: str, dtype_b: str) -> float:
    first, second = to_float32(a, dtype_a).astype(np.float64), to_float32(b, dtype_b).astype(np.float64)
    distance, norm = float(np.linalg.norm(first - second)), float(np.linalg.norm(first))
    return distance / norm if norm else 0.0 if not distance else float("inf")


def diff_texts(a: str, b: str) -> list[TextPiece]:
    """Compare two texts word by word. Where both differ in more than `MAX_WORDS` words, these are not aligned."""
    first, second = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (a, b))
    start = _num_alike(first, second)
    end = _num_alike(first[start:][::-1], second[start:][::-1])
    middle_a, middle_b = first[start : len(first) - end], second[start : len(second) - end]
    pieces = [TextPiece("=", "".join(first[:start]))]
    if max(len(middle_a), len(middle_b)) > MAX_WORDS:
        pieces += [TextPiece("-", "".join(middle_a)), TextPiece("+", "".join(middle_b))]
    else:
        matcher = difflib.SequenceMatcher(None, middle_a, middle_b, autojunk=False)
        for kind, a0, a1, b0, b1 in matcher.get_opcodes():
            if kind == "equal":
                pieces.append(TextPiece("=", "".join(middle_a[a0:a1])))
            else:
                pieces += [TextPiece("-", "".join(middle_a[a0:a1])), TextPiece("+", "".join(middle_b[b0:b1]))]
    pieces.append(TextPiece("=", "".join(first[len(first) - end :])))
    return [piece for piece in pieces if piece.text]


def _num_alike(a: list[str], b: list[str]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

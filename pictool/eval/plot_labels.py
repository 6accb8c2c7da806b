"""Labels beside the points of a plot, where they cover the least of points, of bars and of each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT_SIZE = 8.0
MARK = 6.0  # half of a point's box, in points of 1/72 inch
DISTANCES = (1.0, 8.0, 16.0, 26.0, 38.0)  # from a point's box, in the same unit; the nearer the better
ANGLES = tuple(math.radians(angle) for angle in (0, 45, -45, 90, -90, 180, 135, -135))


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        return self.width * self.height

    def overlap(self, other: Box) -> float:
        """The area in common."""
        width = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        height = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return max(0.0, width) * max(0.0, height)

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> Box:
        return cls(x - width / 2, y - height / 2, width, height)


@dataclass(frozen=True)
class Mark:
    """A point in data coordinates, its vertical bar [low, high], and its label."""

    x: float
    y: float
    low: float
    high: float
    label: str


def place_labels(axes: Axes, marks: Sequence[Mark]) -> None:
    """Write each label near its point; a thin line leads to one that is not right beside it."""
    from matplotlib.patheffects import withStroke

    figure = axes.get_figure(root=True)
    assert figure is not None
    scale, frame = figure.dpi / 72, axes.get_window_extent()
    inside = Box(frame.x0, frame.y0, frame.width, frame.height)
    taken = [box for mark in marks for box in _boxes(axes, mark, scale)]
    for mark in sorted(marks, key=lambda mark: (mark.x, mark.y, mark.label)):
        x, y = _pixels(axes, mark.x, mark.y)
        distance, box = _best(x, y, _size(mark.label, scale), taken, inside, scale)
        taken.append(box)
        offset = (box.x + box.width / 2 - x) / scale, (box.y + box.height / 2 - y) / scale
        lead = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.5} if distance > DISTANCES[0] else None
        axes.annotate(
            mark.label, (mark.x, mark.y), xytext=offset, textcoords="offset points", ha="center", va="center",
            fontsize=FONT_SIZE, arrowprops=lead, zorder=5, path_effects=[withStroke(linewidth=2.0, foreground="white")],
        )  # fmt: skip


def _pixels(axes: Axes, x: float, y: float) -> tuple[float, float]:
    across, up = axes.transData.transform((x, y))
    return float(across), float(up)


def _size(label: str, scale: float) -> tuple[float, float]:
    """About what the text takes: matplotlib knows only when it has drawn it."""
    return (0.62 * FONT_SIZE * len(label) + 2) * scale, 1.25 * FONT_SIZE * scale


def _boxes(axes: Axes, mark: Mark, scale: float) -> list[Box]:
    """What a point and its bar cover."""
    x, y = _pixels(axes, mark.x, mark.y)
    low, high = (_pixels(axes, mark.x, end)[1] for end in (mark.low, mark.high))
    return [Box.around(x, y, 2 * MARK * scale, 2 * MARK * scale), Box(x - scale, low, 2 * scale, high - low)]


def _best(
    x: float, y: float, size: tuple[float, float], taken: Sequence[Box], inside: Box, scale: float
) -> tuple[float, Box]:
    """The distance from (x, y), and the box, that covers least."""

    def cost(candidate: tuple[float, Box]) -> float:
        distance, box = candidate
        covered = sum(box.overlap(other) for other in taken)
        return covered + 3 * (box.area - box.overlap(inside)) + 0.01 * distance * box.area

    places = [(d, _beside(x, y, size, angle, (MARK + d) * scale)) for d in DISTANCES for angle in ANGLES]
    return min(places, key=cost)


def _beside(x: float, y: float, size: tuple[float, float], angle: float, gap: float) -> Box:
    """A box whose border is about `gap` away from (x, y), in a direction."""
    width, height = size
    return Box.around(
        x + math.cos(angle) * (gap + width / 2), y + math.sin(angle) * (gap + height / 2), width, height
    )  # fmt: skip

"""Draw the pictures of docs/guides/terminal-interface.md, and that of a run in span-queries.md, again, from the sample
documents and the embedded model. With a folder, draw every screen at two sizes and in two themes into it as well.

PYTHONPATH=tests:. python -m tui.pictures [FOLDER]
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI
from textual.pilot import Pilot
from textual.strip import Strip

from pictool.commands.settings.settings import Settings
from pictool.commands.tui_process.job import WorkerJob
from pictool.commands.tui_process.worker import TuiWorker
from pictool.spans.runs import read_run
from pictool.store.store import Store
from pictool.tui.app import PicApp
from pictool.tui.services import LinkForm, LoadedTrace
from tui.drive import screen_lines, settle

Rgb = tuple[int, int, int]
ROOT = Path(__file__).parents[2]
_FONT_SIZE, _LINE_HEIGHT = 16, 20  # pixels
IMAGES = ROOT / "docs" / "images"
QUERY = "On which river does Dusdale lie?"
LINKS = {
    "full": "full", "naive": "naive", "lego-16": "legolink-16", "blend": "cacheblend-15", "prophet": "prophet-15",
}  # fmt: skip
FIVE = [*LINKS]
# A picture: its size, the traces that are open, and the keys that are pressed before it is taken.
PICTURES: dict[str, tuple[tuple[int, int], Sequence[str], Sequence[str]]] = {
    "tui-home": ((100, 34), FIVE, ["escape", "down", "space", "down", "down", "space", "p"]),
    "tui-compare": ((120, 36), ["full", "lego-16", "blend"], ["slash", *"Tem", "enter"]),
    "tui-four": ((80, 24), ["full", "lego-16", "blend", "prophet"], ["right"] * 60),
    "tui-overlap": ((132, 36), ["lego-16", "blend", "prophet"], ["m", "f", *["d"] * 24]),
    "tui-prophet": ((110, 36), ["prophet"], ["m", "slash", *"Tem", "enter"]),
    "tui-attention": ((110, 36), ["naive"], ["a", *"llll", "h", "slash", *"Tem", "enter"]),
    "tui-sinks": ((100, 34), [], ["slash", *"Femlia", "enter", "enter", "a"]),
    "tui-query": ((80, 28), [], ["n", "n", "n"]),
}
# Every screen: the traces that are open, and the keys.
SCREENS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "home": (["full", "lego-16"], ["escape"]),
    "object": ([], ["enter"]),
    "trace": (["prophet"], []),
    "compare": (["full", "lego-16", "blend"], []),
    "query": ([], []),
    "link": ([], ["space", "space", "l"]),
}
SIZES, THEMES = ((80, 24), (120, 40)), ("textual-dark", "textual-light")
_MARGIN = 12  # pixels between the pictures of a sheet


def draw(lines: Sequence[Strip]) -> Image.Image:
    """Draw text on coloured cells, with a font that comes with matplotlib; what it lacks, with another."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [ImageFont.truetype(str(folder / f"DejaVuSansMono{kind}.ttf"), _FONT_SIZE) for kind in ("", "-Bold")]
    other = ImageFont.truetype(str(folder / "DejaVuSans.ttf"), _FONT_SIZE)
    cell, unknown = round(fonts[0].getlength("M")), bytes(fonts[0].getmask("\uffff"))
    uneven = {char for line in lines for text, *_ in line for char in text
              if not char.isascii() and bytes(fonts[0].getmask(char)) == unknown}  # fmt: skip
    picture = Image.new("RGB", (max(line.cell_length for line in lines) * cell, len(lines) * _LINE_HEIGHT))
    draw = ImageDraw.Draw(picture)
    for y, line in enumerate(lines):
        x = 0
        for text, style, _ in line:
            if not cell_len(text):
                continue
            foreground, background = colors_of(style or Style.null())
            end, top, bottom = x + cell_len(text) * cell, y * _LINE_HEIGHT, (y + 1) * _LINE_HEIGHT
            draw.rectangle((x, top, end - 1, bottom - 1), fill=background)
            for index, character in enumerate(text):
                left = x + cell_len(text[:index]) * cell
                font = other if character in uneven else fonts[bool(style and style.bold)]
                draw.text((left, top), character, font=font, fill=foreground)
            if style and style.underline:
                draw.line((x, bottom - 2, end - 1, bottom - 2), fill=foreground)
            x = end
    return picture


def save(picture: Image.Image, path: Path) -> None:
    """Save as PNG with a palette, which is much smaller: the colours that are most of it, and others that cover it."""
    counts: list[tuple[int, Any]] = picture.getcolors(1 << 24) or []
    most = sorted(counts, reverse=True)[:64]
    others = picture.quantize(192, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, color in most for part in color] + others)
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def sheet(pictures: Sequence[Image.Image]) -> Image.Image:
    """Put the pictures of a screen together, half as large: a row for each size, a column for each theme."""
    rows = [pictures[: len(THEMES)], pictures[len(THEMES) :]]
    width = len(THEMES) * (max(picture.width for picture in pictures) + _MARGIN) - _MARGIN
    whole = Image.new("RGB", (width, sum(row[0].height + _MARGIN for row in rows) - _MARGIN), "white")
    top = 0
    for row in rows:
        for column, picture in enumerate(row):
            whole.paste(picture, (column * (width + _MARGIN) // len(THEMES), top))
        top += row[0].height + _MARGIN
    return whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.LANCZOS)


def colors_of(style: Style) -> tuple[Rgb, Rgb]:
    """Return the foreground and background of a cell as a terminal draws them."""
    foreground, background = _rgb(style.color, True), _rgb(style.bgcolor, False)
    if style.reverse:
        foreground, background = background, foreground
    if style.dim:
        foreground = tuple((a + b) // 2 for a, b in zip(foreground, background, strict=True))  # type: ignore[assignment]
    return foreground, background


def _rgb(color: Color | None, is_foreground: bool) -> Rgb:
    theme = DIMMED_MONOKAI
    if color is None:
        return tuple(theme.foreground_color if is_foreground else theme.background_color)  # type: ignore[return-value]
    return tuple(color.get_truecolor(theme, foreground=is_foreground))  # type: ignore[return-value]


def link_all(settings: Settings) -> None:
    """Link the pages of a book by every policy, into traces in the working directory."""
    worker = TuiWorker(lambda *_: None, settings)
    documents = tuple(sorted(str(path) for path in Path("docs").glob("book-3-page-*.txt")))
    for name, algo in LINKS.items():
        worker.link(LinkForm(documents, QUERY, algo, f"{name}.trace"))


async def take(app: PicApp, size: tuple[int, int], keys: Sequence[str], theme: str = THEMES[0]) -> Image.Image:
    async with app.run_test(size=size, notifications=False) as pilot:
        app.theme = theme
        await settle(pilot)
        await _press(pilot, keys)
        return draw(screen_lines(app))


async def _press(pilot: Pilot[None], keys: Sequence[str]) -> None:
    for key in keys:
        await pilot.press("space" if key == " " else key)
        await settle(pilot)


def main(folder: Path | None) -> None:
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Path("docs").symlink_to(ROOT / "fixtures" / "docs")
        settings = Settings().override(device="cpu")
        link_all(settings)
        query = str(ROOT / "examples" / "queries" / "judge.yaml")
        subprocess.run([sys.executable, "-m", "pictool", "query", query, "--trace", "run"], check=True)
        run = read_run(Path("run"))
        with WorkerJob(settings) as job:

            def app(name: str, traces: Sequence[str]) -> PicApp:
                loaded = [LoadedTrace.read(Path(f"{trace}.trace")) for trace in traces]
                return PicApp(Store(), loaded, job, run if name.endswith("query") else None)

            for name, (traces, keys) in SCREENS.items():
                if folder is None:
                    break
                pictures = []
                for size, theme in product(SIZES, THEMES):
                    pictures.append(asyncio.run(take(app(name, traces), size, keys, theme)))
                    save(pictures[-1], folder / f"{name}-{size[0]}-{theme.removeprefix('textual-')}.png")
                save(sheet(pictures), IMAGES / f"tui-screens-{name}.png")
            for name, (size, traces, keys) in PICTURES.items():
                save(asyncio.run(take(app(name, traces), size, keys)), IMAGES / f"{name}.png")
        os.chdir("/")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if sys.argv[1:] else None)

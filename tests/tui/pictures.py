"""Draw the pictures of docs/guides/terminal-interface.md, and that of a run in span-queries.md, again, from the sample
documents and the embedded model.

PYTHONPATH=tests:. python -m tui.pictures
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

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
    "full": "full", "naive": "naive", "lego-16": "legolink-16", "blend": "cacheblend-15", "fixup": "fixup:ratio=0.15",
}  # fmt: skip
FIVE = [*LINKS]
# A picture: its size, the traces that are open, and the keys that are pressed before it is taken.
PICTURES: dict[str, tuple[tuple[int, int], Sequence[str], Sequence[str]]] = {
    "tui-home": ((100, 34), FIVE, ["escape", "down", "space", "down", "down", "space", "p"]),
    "tui-compare": ((120, 36), ["full", "lego-16", "blend"], ["slash", *"Tem", "enter"]),
    "tui-four": ((80, 24), ["full", "lego-16", "blend", "fixup"], ["f", *["right"] * 60]),
    "tui-overlap": ((132, 36), ["lego-16", "blend", "fixup"], ["m", "f", *["d"] * 24]),
    "tui-attention": ((110, 36), ["naive"], ["a", *"llll", "h", "slash", *"Tem", "enter"]),
    "tui-fixups": ((80, 24), [], ["slash", *"Femlia", "enter", "enter", "h", "f", *["right"] * 4]),
    "tui-sinks": ((100, 34), [], ["slash", *"Femlia", "enter", "enter", "a"]),
    "tui-query": ((80, 28), [], ["n", "n", "n"]),
}


def draw_png(lines: Sequence[Strip]) -> bytes:
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
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


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


async def take(name: str, app: PicApp) -> None:
    size, _, keys = PICTURES[name]
    async with app.run_test(size=size, notifications=False) as pilot:
        await settle(pilot)
        await _press(pilot, keys)
        (IMAGES / f"{name}.png").write_bytes(draw_png(screen_lines(app)))


async def _press(pilot: Pilot[None], keys: Sequence[str]) -> None:
    for key in keys:
        await pilot.press("space" if key == " " else key)
        await settle(pilot)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Path("docs").symlink_to(ROOT / "fixtures" / "docs")
        settings = Settings().override(device="cpu")
        link_all(settings)
        query = str(ROOT / "examples" / "queries" / "judge.yaml")
        subprocess.run([sys.executable, "-m", "pictool", "query", query, "--trace", "run"], check=True)
        run = read_run(Path("run"))
        with WorkerJob(settings) as job:
            for name, (_, traces, _) in PICTURES.items():
                loaded = [LoadedTrace.read(Path(f"{trace}.trace")) for trace in traces]
                asyncio.run(take(name, PicApp(Store(), loaded, job, run if name == "tui-query" else None)))
        os.chdir("/")


if __name__ == "__main__":
    main()

"""Export a view as SVG (textual's own), PNG (drawn cell by cell), or JSON (what the command's `--json` prints)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI

from pictool.errors import InputError
from pictool.escapes import to_json
from pictool.store.store import atomic_write

if TYPE_CHECKING:
    from textual.app import App
    from textual.strip import Strip

SUFFIXES = (".svg", ".png", ".json")
_FONT_SIZE = 16  # pixels
_LINE_HEIGHT = 20

Rgb = tuple[int, int, int]


def export_view(app: App[Any], path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write the screen (.svg, .png) or its data (.json).

    Raises:
        InputError: another suffix, or a PNG without Pillow.
        StoreError: the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: must end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file")
    if path.suffix == ".json":
        content = (to_json(data) + "\n").encode()
    elif path.suffix == ".svg":
        content = app.export_screenshot(title="pic").encode("utf-8", "backslashreplace")
    else:
        content = draw_png(screen_lines(app))
    with atomic_write(path) as file:
        file.write(content)


def free_path(path: Path) -> Path:
    """Return a path at which there is nothing: this one, or with -2, -3 … after its stem."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in range(2, 1_000_000))
    return path if not os.path.lexists(path) else next(name for name in names if not os.path.lexists(name))


def screen_lines(app: App[Any]) -> list[Strip]:
    """Return the lines of the screen as they are drawn."""
    return app.screen._compositor.render_strips()


def draw_png(lines: Sequence[Strip]) -> bytes:
    """Draw text on coloured cells, with a font that comes with matplotlib; what it lacks, with another."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise InputError("PNG: needs Pillow; install it with: pip install 'pictool[tui]'") from error
    fonts = [ImageFont.truetype(str(_fonts() / f"DejaVuSansMono{kind}.ttf"), _FONT_SIZE) for kind in ("", "-Bold")]
    other = ImageFont.truetype(str(_fonts() / "DejaVuSans.ttf"), _FONT_SIZE)
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


def _fonts() -> Path:
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("PNG: needs matplotlib's font; install it with: pip install 'pictool[tui]'") from error
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


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

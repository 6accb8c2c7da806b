"""A view as a file: SVG (textual's own), PNG (drawn cell by cell), or JSON (what the command's `--json` prints)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI

from pictool.errors import InputError
from pictool.store.store import atomic_write

if TYPE_CHECKING:
    from textual.app import App
    from textual.strip import Strip

SUFFIXES = (".svg", ".png", ".json")
_SIZE = 16  # of the font, in pixels
_HEIGHT = 20  # of a line


def export_view(app: App[Any], path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write what is seen (.svg, .png) or what it is made of (.json).

    Raises:
        InputError: another suffix, or no Pillow for a PNG.
        StoreError: it cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: must end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file")
    if path.suffix == ".json":
        content = (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    elif path.suffix == ".svg":
        content = app.export_screenshot(title="pic").encode("utf-8", "backslashreplace")
    else:
        content = draw_png(seen_lines(app))
    with atomic_write(path) as file:
        file.write(content)


def seen_lines(app: App[Any]) -> list[Strip]:
    """What is on the screen, line by line."""
    return app.screen._compositor.render_strips()


def draw_png(lines: Sequence[Strip]) -> bytes:
    """Text of one size on coloured cells, with a font that comes with matplotlib."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise InputError("PNG: needs Pillow; install it with: pip install 'pictool[tui]'") from error
    fonts = [ImageFont.truetype(str(_fonts() / f"DejaVuSansMono{kind}.ttf"), _SIZE) for kind in ("", "-Bold")]
    cell = round(fonts[0].getlength("M"))
    picture = Image.new("RGB", (max(line.cell_length for line in lines) * cell, len(lines) * _HEIGHT))
    draw = ImageDraw.Draw(picture)
    for y, line in enumerate(lines):
        x = 0
        for text, style, _ in line:
            if not cell_len(text):
                continue
            ink, ground = colors_of(style or Style.null())
            end = x + cell_len(text) * cell
            draw.rectangle((x, y * _HEIGHT, end - 1, (y + 1) * _HEIGHT - 1), fill=ground)
            for at, character in enumerate(text):
                left = x + cell_len(text[:at]) * cell
                draw.text((left, y * _HEIGHT), character, font=fonts[bool(style and style.bold)], fill=ink)
            if style and style.underline:
                draw.line((x, (y + 1) * _HEIGHT - 2, end - 1, (y + 1) * _HEIGHT - 2), fill=ink)
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


Triple = tuple[int, int, int]


def colors_of(style: Style) -> tuple[Triple, Triple]:
    """Ink and ground of a cell as they are seen."""
    ink, ground = _rgb(style.color, True), _rgb(style.bgcolor, False)
    if style.reverse:
        ink, ground = ground, ink
    if style.dim:
        ink = tuple((a + b) // 2 for a, b in zip(ink, ground, strict=True))  # type: ignore[assignment]
    return ink, ground


def _rgb(color: Color | None, is_ink: bool) -> Triple:
    theme = DIMMED_MONOKAI
    if color is None:
        return tuple(theme.foreground_color if is_ink else theme.background_color)  # type: ignore[return-value]
    return tuple(color.get_truecolor(theme, foreground=is_ink))  # type: ignore[return-value]

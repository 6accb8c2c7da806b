"""Reports as one web page that loads nothing: what a console prints, pictures, and the numbers as JSON."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from pictool.commands.console.terminal import Screen
from pictool.store.store import atomic_write

_COLUMNS = 100
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
pre { font: 13px ui-monospace, monospace; overflow-x: auto }
img { max-width: 100%; background: #fff }
"""


@dataclass
class Page:
    """What a page is made of: all that is printed to `console`, pictures as SVG, and data of JSON's types."""

    console: Console
    pictures: list[bytes] = field(default_factory=list)
    data: Any = None


@contextmanager
def write_page(path: Path, title: str) -> Iterator[Page]:
    """Fill a page, which is written at the end.

    Raises:
        StoreError: the file cannot be written.
    """
    printed = io.StringIO()
    page = Page(Screen(file=printed, width=_COLUMNS, highlight=False, markup=False, emoji=False))
    yield page
    pictures = "".join(
        f'<img alt="" src="data:image/svg+xml;base64,{b64encode(svg).decode()}">' for svg in page.pictures
    )
    data = f'<pre id="data">{escape(json.dumps(page.data, indent=1))}</pre>'
    text = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1><pre>{escape(printed.getvalue())}</pre>{pictures}
<details><summary>All numbers, as JSON</summary>{data}</details>
</body></html>
"""
    with atomic_write(path) as file:
        file.write(text.encode())

"""A report as one web page that loads nothing: what a console prints, pictures, and the numbers as JSON."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from pictool.commands.console.terminal import Screen
from pictool.store.store import atomic_write

_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }}
pre {{ font: 13px ui-monospace, monospace; overflow-x: auto }}
svg {{ background: #fff; max-width: 100%; height: auto }}
</style>
<h1>{title}</h1>
<pre>{text}</pre>
{pictures}
<details><summary>All numbers, as JSON</summary><pre id="data">{data}</pre></details>
"""


@dataclass
class Page:
    """What a page is made of: all that is printed to `console`, pictures as SVG, and data of JSON's types."""

    title: str
    console: Console
    pictures: list[str] = field(default_factory=list)
    data: Any = None


@contextmanager
def write_page(path: Path, title: str) -> Iterator[Page]:
    """Fill a page, which is written at the end.

    Raises:
        StoreError: the file cannot be written.
    """
    printed = io.StringIO()
    page = Page(title, Screen(file=printed, width=100, highlight=False, markup=False, emoji=False))
    yield page
    text = _PAGE.format(
        title=html.escape(title), text=html.escape(printed.getvalue()), pictures="\n".join(page.pictures),
        data=html.escape(json.dumps(page.data, indent=1)),
    )  # fmt: skip
    with atomic_write(path) as file:
        file.write(text.encode())

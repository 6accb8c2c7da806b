"""Hooks of MkDocs (mkdocs.yml) for `make site`: its first page is README.md, and docs/README.md is its navigation.

Pages keep the links that a forge understands. A link to a page outside docs/ leads to its place in the site; one to a
file that is no page leads to the forge, if mkdocs.yml has its address, and is plain text otherwise.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIRST, INDEX = "README.md", "docs/README.md"
_GROUP = re.compile(r"^\*\*(\w+)\*\*(.*?)(?=^\*\*|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^)\s#]+)(#[^)\s]+)?\)")


def navigation() -> dict[str, list[str]]:
    """The groups of docs/README.md: the pages that each names, relative to the root of the repository."""
    groups = _GROUP.findall((ROOT / INDEX).read_text(encoding="utf-8"))
    return {
        group: [posixpath.normpath(f"docs/{link}") for _, link, _ in _LINK.findall(pages)] for group, pages in groups
    }


def place(path: str) -> str:
    """Where the site has a page."""
    return {FIRST: "index.md", INDEX: "documentation.md"}.get(path, path.removeprefix("docs/"))


def on_config(config: Any) -> None:
    config.nav = [place(FIRST), place(INDEX)]
    config.nav += [{group: [place(path) for path in pages]} for group, pages in navigation().items()]


def on_files(files: Any, config: Any) -> None:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    files.remove(files.get_file_from_path("README.md"))  # docs/README.md, which would be a second first page
    outside = [path for pages in navigation().values() for path in pages if not path.startswith("docs/")]
    for path in (FIRST, INDEX, *outside):
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    places = {Path(file.abs_src_path): file.src_uri for file in files if file.abs_src_path}

    def of_site(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = Path(os.path.normpath(Path(page.file.abs_src_path).parent / path))
        if target in places:
            return f"[{text}]({posixpath.relpath(places[target], posixpath.dirname(page.file.src_uri) or '.')}{anchor})"
        if not target.exists():
            return link[0]  # another site's; or a dead one, which MkDocs reports
        forge = config.extra["forge"]
        return f"[{text}]({forge}/{target.relative_to(ROOT).as_posix()}{anchor})" if forge else text

    return _LINK.sub(of_site, _without_escapes(markdown))


def _without_escapes(markdown: str) -> str:
    """Forges need `\\|` for a bar in the code of a table; Python-Markdown would show the backslash."""
    return re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), markdown)

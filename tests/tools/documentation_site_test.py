"""What the site makes of a page's links, and of bars in tables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from documentation_site.hooks import ROOT, on_page_markdown


def of_site(markdown: str, forge: str = "") -> str:
    """The text of docs/guides/gpu.md as the site's, if it were this."""
    places = {
        "docs/guides/gpu.md": "guides/gpu.md",
        "docs/reference/store.md": "reference/store.md",
        "README.md": "index.md",
        "CONTRIBUTING.md": "CONTRIBUTING.md",
    }
    files = [SimpleNamespace(abs_src_path=str(ROOT / path), src_uri=place) for path, place in places.items()]
    return on_page_markdown(markdown, SimpleNamespace(file=files[0]), SimpleNamespace(extra={"forge": forge}), files)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](../reference/store.md#b),[c](../../README.md#d)", "[a](../reference/store.md#b),[c](../index.md#d)"),
        ("[the\nfirst](../../README.md)", "[the\nfirst](../index.md)"),
        ("[`a`](../../CONTRIBUTING.md#set-up)", "[`a`](../CONTRIBUTING.md#set-up)"),
        ("[a](#here), [b](https://example.org/a.md)", "[a](#here), [b](https://example.org/a.md)"),
        ("[dead](../../no.md)", "[dead](../../no.md)"),
        ("![picture](../../LICENSE)", "![picture](../../LICENSE)"),
    ],
)
def test_links_to_pages_lead_to_their_places_in_the_site(link: str, expected: str) -> None:
    assert of_site(link, forge="https://forge.example") == expected


def test_files_that_are_no_pages_are_at_the_forge_or_plain_text() -> None:
    assert of_site("[`a`](../../LICENSE#L1), b") == "`a`, b"
    assert of_site("[`a`](../../LICENSE#L1), b", "https://f.example/x") == "[`a`](https://f.example/x/LICENSE#L1), b"


def test_bars_in_code_need_no_escape() -> None:
    assert of_site(r"| `a\|b` | c \| d | `e` |") == r"| `a|b` | c \| d | `e` |"

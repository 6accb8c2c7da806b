"""URLs with secrets: what is shown of them."""

from __future__ import annotations

import re

_URL = re.compile(r"([A-Za-z][\w+.-]{0,30}:)?//([^/\s]*@)?([^\s?#'\"<>]*)(\?[^\s#'\")]*)?")


def without_credentials(text: str) -> str:
    """A text whose URLs have no user, no password and no query, where signatures and tokens are."""
    return _URL.sub(lambda url: f"{url[1] or ''}//{url[3]}{'?…' if url[4] else ''}", text)

"""URLs with secrets: what is shown of them, and requests whose key goes to the server that was named alone."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from http.client import HTTPMessage, HTTPResponse
from typing import IO, NoReturn, cast

_URL = re.compile(r"([A-Za-z][\w+.-]{0,30}:)?//([^/\s]*@)?([^\s?#'\"<>]*)(\?[^\s#'\")]*)?")


def without_credentials(text: str) -> str:
    """A text whose URLs have no user, no password and no query, where signatures and tokens are."""
    return _URL.sub(lambda url: f"{url[1] or ''}//{url[3]}{'?…' if url[4] else ''}", text)


def has_credentials(url: str) -> bool:
    """Whether a URL has a user or a password."""
    return any(found[2] for found in _URL.finditer(url))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib sends all headers, a bearer key among them, wherever the server says."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> NoReturn:
        where = without_credentials(newurl)[:200]
        raise urllib.error.URLError(f"it redirects to {where}, which gets no key; name that server if it is right")


def open_url(request: urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """The response of the server that the request names. Raises URLError: it redirects; or as `urlopen`."""
    return cast("HTTPResponse", urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s))

"""Objects by HTTP, from a server that is not trusted: what it sends is bounded in bytes and in time.

fsspec's file system reads a body to its end and decodes it, so a body without an end, or a few kilobytes of gzip, fill
the memory, and one byte every few seconds never times out. Here a body is read as it comes and never decoded, no longer
than was asked for, and given up once it falls behind the slowest rate that is accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem
from yarl import URL

from pictool.store.remote.pace import BadAnswer, RequestTimeout, TooSlow

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
SECRET = ("headers", "auth", "cookies", "params", "proxy_auth", "proxy_headers")  # of a request's options
Take = Callable[[bytes], None]


class HttpFiles(HTTPFileSystem):  # type: ignore[misc]
    """fsspec's file system, with its configuration, and with reads that are bounded."""

    def read_range(self, url: str, start: int, end: int, pace: RequestTimeout) -> tuple[bytes, bool]:
        """Bytes [start, end), fewer where the file ends; and whether the server knows ranges.

        Of a server that ignores ranges no more than `end` bytes are read, and those before `start` are dropped.
        """
        body = bytearray()
        status = sync(self.loop, self._receive, url, (start, end), body.extend, pace)
        if status == 206:
            if len(body) > end - start:
                raise BadAnswer(f"more than the {end - start:,d} bytes that were asked for came")
            return bytes(body), True
        return bytes(body[start:end]), False

    def read_all(self, url: str, num_bytes: int, take: Take, pace: RequestTimeout) -> int:
        """Pass a whole file of `num_bytes` to `take` as it comes; returns the bytes that came.

        Raises:
            BadAnswer: it is longer.
        """
        count = 0

        def take_counted(data: bytes) -> None:
            nonlocal count
            count += len(data)
            if count > num_bytes:
                raise BadAnswer(f"longer than the {num_bytes:,d} bytes that its header says")
            take(data)

        sync(self.loop, self._receive, url, None, take_counted, pace)
        return count

    async def _receive(self, url: str, wanted: tuple[int, int] | None, take: Take, pace: RequestTimeout) -> int:
        """Pass a body to `take`, up to one byte more than `wanted`; returns the status."""
        session, options = await self.set_session(), dict(self.kwargs)
        headers = {"Accept-Encoding": "identity"}
        if wanted is not None:
            headers["Range"] = f"bytes={wanted[0]}-{wanted[1] - 1}"
        count, began = 0, asyncio.get_running_loop().time()
        try:
            async with (
                asyncio.timeout_at(began + pace.timeout_s) as deadline,
                _followed(session, self.encode_url(url), headers, options) as response,
            ):
                self._raise_not_found_for_status(response, url)
                _require_plain(response)
                most = None if wanted is None else wanted[1] - (wanted[0] if response.status == 206 else 0)
                async for data in response.content.iter_any():
                    count += len(data)
                    deadline.reschedule(began + pace.allowed_s(count))
                    take(data)
                    if most is not None and count > most:
                        response.close()
                        break
                return int(response.status)
        except TimeoutError as error:
            if not count:
                raise
            raise TooSlow(f"{count:,d} bytes in {pace.allowed_s(count):.0f} s are too slow") from error


@asynccontextmanager
async def _followed(
    session: aiohttp.ClientSession, url: URL, headers: dict[str, str], options: dict[str, Any]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response to a GET after its redirects. What is secret of `options` goes to the origin of `url` alone."""
    origin = url.origin()
    for _ in range(_MAX_REDIRECTS + 1):
        is_own = url.origin() == origin
        kept = {name: value for name, value in options.items() if is_own or name not in SECRET}
        sent = {**options.get("headers", {}), **headers} if is_own else headers
        async with session.get(url, **kept | {"headers": sent, "allow_redirects": False}) as response:
            where = response.headers.get("Location")
            if response.status not in _REDIRECTS or where is None:
                yield response
                return
            response.close()  # its body is not read
            url = _next_url(url, where)
    raise BadAnswer(f"more than {_MAX_REDIRECTS} redirects")


def _next_url(url: URL, location: str) -> URL:
    try:
        there = url.join(URL(location))
        there.origin()
    except ValueError as error:
        raise BadAnswer("it redirects to what is no URL") from error
    if there.scheme not in ("http", "https"):
        raise BadAnswer(f"it redirects to {there.scheme}")
    return there


def _require_plain(response: aiohttp.ClientResponse) -> None:
    coding = response.headers.get("Content-Encoding", "identity").lower()
    if coding not in ("", "identity"):
        raise BadAnswer(f"the server codes what it sends ({coding[:20]!r}), though it was asked not to")

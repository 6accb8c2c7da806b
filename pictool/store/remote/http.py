"""Objects by HTTP, from a server that is not trusted: what it sends is bounded in bytes and in time.

fsspec's file system reads a body to its end and decodes it, so a body without an end, or a few kilobytes of gzip, fill
the memory, and one byte every few seconds never times out. Here a body is read as it comes and never decoded, no longer
than was asked for, and given up once it falls behind the slowest rate that is accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem
from yarl import URL

_MAX_REDIRECTS = 5
OF_REQUESTS = ("headers", "auth", "cookies", "params")  # options that a session would send to every host
Take = Callable[[bytes], None]
Allowed = Callable[[int], float]  # the seconds that a transfer of so many bytes may take


class HttpFiles(HTTPFileSystem):  # type: ignore[misc]
    """fsspec's file system, with its configuration, and with reads that are bounded.

    They raise ValueError for an answer that no attempt makes better.
    """

    def read_range(self, url: str, start: int, end: int, allowed_s: Allowed) -> tuple[bytes, bool]:
        """Bytes [start, end), fewer where the file ends; and whether the server knows ranges.

        Of a server that ignores ranges no more than `end` bytes are read, and those before `start` are dropped.
        """
        body = bytearray()
        if sync(self.loop, self._receive, url, (start, end), end - start, body.extend, allowed_s):
            return bytes(body), True
        return bytes(body[start:end]), False

    def read_all(self, url: str, num_bytes: int, take: Take, allowed_s: Allowed) -> None:
        """Pass a whole file of at most `num_bytes` to `take` as it comes."""
        sync(self.loop, self._receive, url, None, num_bytes, take, allowed_s)

    async def _receive(
        self, url: str, span: tuple[int, int] | None, most: int, take: Take, allowed_s: Allowed
    ) -> bool:  # fmt: skip
        """Pass a body of at most `most` bytes to `take`; returns whether it is the `span`.

        Where it is the whole file instead, its first bytes are taken, up to the end of the span and somewhat more.
        """
        session, options = await self.set_session(), dict(self.kwargs)
        origin, own = URL(url).origin(), options.pop("headers", {})

        async def send(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            if request.url.origin() != origin:  # it redirected there
                for name in own:
                    request.headers.popall(name, None)
            return await handler(request)

        headers = {**own, "Accept-Encoding": "identity"}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        options |= {"headers": headers, "middlewares": [send], "max_redirects": _MAX_REDIRECTS + 1}
        count, began = 0, asyncio.get_running_loop().time()
        try:
            async with (
                asyncio.timeout_at(began + allowed_s(0)) as deadline,
                session.get(self.encode_url(url), **options) as response,
            ):
                self._raise_not_found_for_status(response, url)
                _require_plain(response)
                is_whole = span is not None and response.status != 206
                async for data in response.content.iter_any():
                    count += len(data)
                    deadline.reschedule(began + allowed_s(count))
                    if count > most and not is_whole:
                        raise ValueError(f"the server sent more than the requested {most:,d} bytes")
                    take(data)
                    if is_whole and span is not None and count >= span[1]:
                        response.close()
                        break
                return not is_whole
        except TimeoutError as error:
            if not count:
                raise
            raise ValueError(f"{count:,d} bytes in {allowed_s(count):.0f} s is too slow") from error
        except (aiohttp.TooManyRedirects, aiohttp.RedirectClientError) as error:
            raise ValueError(f"more than {_MAX_REDIRECTS} redirects, or one to a URL that is not http") from error


def http_options(configured: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The options for opening http, besides those in the user's configuration of fsspec."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, timeout_s), sock_read=timeout_s)
    client = dict(configured.get("client_kwargs", {}))
    of_requests = {name: client.pop(name) for name in OF_REQUESTS if name in client}
    of_requests["headers"] = {**of_requests.get("headers", {}), **configured.get("headers", {})}
    return {
        "timeout": configured.get("timeout", timeout), **of_requests,
        "client_kwargs": {**client, "auto_decompress": False},
    }  # fmt: skip


def _require_plain(response: aiohttp.ClientResponse) -> None:
    coding = response.headers.get("Content-Encoding", "identity").lower()
    if coding not in ("", "identity"):
        raise ValueError(f"the server encodes its response ({coding[:20]!r}) although asked not to")

"""A loopback HTTP server that answers as it is told: with bytes of its own making, or never."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from functools import cache

from hostile.values import text

Answer = Callable[["Request"], None]
_DEADLINE_S = 20.0  # nothing is served for longer
_BLOCK = 1 << 20


class Request:
    """One request: its path, its range, and the connection to answer on."""

    def __init__(
        self, connection: socket.socket, head: bytes, content: dict[str, bytes], stop: threading.Event
    ) -> None:
        self.connection, self.stop = connection, stop
        words = head.decode("latin-1").split(" ")
        self.path = words[1] if len(words) > 1 else ""
        self.body = content.get(self.path)
        found = re.search(rb"(?i)\r\nrange: bytes=(\d*)-(\d*)", head)
        self.span = (int(found[1] or 0), int(found[2] or 1 << 60)) if found else None
        self.until = time.monotonic() + _DEADLINE_S

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def send_head(self, status: object, *lines: str) -> None:
        self.send("\r\n".join((f"HTTP/1.1 {status} X", *lines, "", "")).encode("latin-1", "replace"))

    def ranged(self) -> tuple[int, bytes, str]:
        """The honest status, body and Content-Range."""
        body = self.body or b""
        if self.body is None:
            return 404, b"", ""
        if self.span is None:
            return 200, body, ""
        start, end = self.span
        part = body[start : end + 1]
        return 206, part, f"Content-Range: bytes {start}-{start + len(part) - 1}/{len(body)}"

    def honest(self) -> None:
        status, part, span = self.ranged()
        self.send_head(status, f"Content-Length: {len(part)}", *([span] if span else []))
        self.send(part)

    def forever(self, data: bytes, pause_s: float = 0.0) -> None:
        while not self.stop.is_set() and time.monotonic() < self.until:
            self.send(data)
            self.stop.wait(pause_s)


class HostileServer:
    """Serves `content` (path → bytes) by `answer` until `close`."""

    def __init__(self, content: dict[str, bytes], answer: Answer) -> None:
        self._content, self._answer, self._stop = content, answer, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        for connection in [self._listener, *self._connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection:
            data = b""
            while not self._stop.is_set():
                while b"\r\n\r\n" not in data:
                    received = connection.recv(1 << 16)
                    if not received:
                        return
                    data += received
                head, _, data = data.partition(b"\r\n\r\n")
                self._answer(Request(connection, head, self._content, self._stop))


@cache
def gzip_bomb() -> tuple[bytes, bytes]:
    """The head of an endless gzip stream of zeros, and 16 MB of it in 16 KB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return head, packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)


def endless(request: Request, *head: str) -> None:
    request.send_head(206 if request.span else 200, *head)
    request.forever(bytes(_BLOCK))


def endless_chunks(request: Request) -> None:
    request.send_head(206 if request.span else 200, "Transfer-Encoding: chunked")
    request.forever(b"%x\r\n" % _BLOCK + bytes(_BLOCK) + b"\r\n")


def gzipped(request: Request) -> None:
    head, more = gzip_bomb()
    request.send_head(206 if request.span else 200, "Content-Encoding: gzip", "Transfer-Encoding: chunked")
    request.send(b"%x\r\n" % len(head) + head + b"\r\n")
    request.forever(b"%x\r\n" % len(more) + more + b"\r\n", 0.01)


def drip(request: Request) -> None:
    status, part, span = request.ranged()
    request.send_head(status, f"Content-Length: {max(1, len(part))}", *([span] if span else []))
    for byte in part or b"\0":
        if request.stop.wait(0.05) or time.monotonic() > request.until:
            return
        request.send(bytes([byte]))


def drip_head(request: Request) -> None:
    request.send(b"HTTP/1.1 200 OK\r\nX: ")
    request.forever(b"a", 0.05)


def silent(request: Request) -> None:
    request.stop.wait(_DEADLINE_S)


def reset(request: Request) -> None:
    _, part, _ = request.ranged()
    request.send_head(206, f"Content-Length: {len(part)}")
    request.send(part[: len(part) // 2])
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()


def redirect_to(target: str) -> Answer:
    return lambda request: request.send_head(302, f"Location: {target.format(path=request.path)}", "Content-Length: 0")


def with_status(status: object, reason: str = "X") -> Answer:
    def answer(request: Request) -> None:
        body = b"<html>no</html>"
        line = f"HTTP/1.1 {status} {reason}\r\nContent-Length: {len(body)}\r\n\r\n"
        request.send(line.encode("utf-8", "replace") + body)

    return answer


def with_length(length: object) -> Answer:
    def answer(request: Request) -> None:
        status, part, span = request.ranged()
        request.send_head(status, f"Content-Length: {length}", *([span] if span else []))
        request.send(part)
        request.connection.shutdown(socket.SHUT_WR)

    return answer


def with_span(span: str) -> Answer:
    def answer(request: Request) -> None:
        _, part, _ = request.ranged()
        request.send_head(206, f"Content-Length: {len(part)}", f"Content-Range: {span}")
        request.send(part)

    return answer


def whole(request: Request) -> None:
    """Ranges are ignored."""
    body = request.body or b""
    request.send_head(200 if request.body is not None else 404, f"Content-Length: {len(body)}")
    request.send(body)


def garbage(data: bytes) -> Answer:
    def answer(request: Request) -> None:
        request.send(data)
        request.connection.shutdown(socket.SHUT_WR)

    return answer


def with_encoding(name: str) -> Answer:
    def answer(request: Request) -> None:
        status, part, span = request.ranged()
        request.send_head(
            status, f"Content-Length: {len(part)}", f"Content-Encoding: {name}", *([span] if span else [])
        )
        request.send(part)

    return answer


def draw_answer(draw: random.Random) -> tuple[str, Answer]:
    """How a server answers, and what that is called."""
    status, length = (
        draw.choice(
            (
                100,
                101,
                199,
                201,
                204,
                301,
                304,
                400,
                401,
                403,
                404,
                407,
                408,
                410,
                413,
                416,
                418,
                425,
                429,
                451,
                500,
                502,
                503,
                504,
                599,
                600,
                999,
                0,
                -1,
                "x",
            )
        ),
        draw.choice((0, -1, "x", 1 << 31, 1 << 40, 1 << 70, "5, 6", "", "0x10", 3)),
    )
    target = draw.choice(
        (
            "{path}",
            "file:///etc/passwd",
            "http://127.0.0.1:1{path}",
            "ftp://127.0.0.1/x",
            "//",
            "http://[",
            "{path}x",
            "\x1b[2J",
            "javascript:1",
            "data:,x",
            "",
        )
    )
    span = draw.choice(("bytes 0-0/1", "bytes */*", "x", "bytes 5-1/3", "bytes 0-99999999999999/999999999999999", ""))
    raw = draw.choice(
        (
            b"",
            b"\r\n\r\n",
            b"HTTP/9.9 200\r\n\r\n",
            b"\x00" * 99,
            b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
            b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
            b"HTTP/1.1 200 \x1b[2J\r\n\r\nx",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nx",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nx",
            b"SSH-2.0-x\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        )
    )
    encoding, reason = (
        draw.choice(("gzip", "deflate", "br", "zstd", "identity", "x", "gzip, gzip")),
        text(draw)[:2000].replace("\r", "").replace("\n", ""),
    )
    kinds: dict[str, Answer] = {
        "honest": Request.honest,
        "endless": endless,
        "endless of a length": lambda request: endless(request, f"Content-Length: {1 << 50}"),
        "endless chunks": endless_chunks,
        "a gzip bomb": gzipped,
        "a byte now and then": drip,
        "a head without end": drip_head,
        "silence": silent,
        "a reset": reset,
        f"redirects to {target!r}": redirect_to(target),
        f"status {status}": with_status(status),
        f"reason {reason[:30]!r}": with_status(500, reason),
        f"length {length}": with_length(length),
        f"range {span}": with_span(span),
        "whole files": whole,
        f"garbage {raw[:30]!r}": garbage(raw),
        f"encoding {encoding}": with_encoding(encoding),
    }
    name = draw.choices(list(kinds), [6, 1, 1, 1, 1, 1, 0.5, 0.5, 2, 4, 6, 3, 5, 4, 3, 5, 3])[0]
    return name, kinds[name]

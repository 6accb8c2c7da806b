"""A real HTTP server on loopback that serves a directory with ranges, and goes wrong as it is told."""

from __future__ import annotations

import re
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pictool.store.remote.remote import Remote, Retry

QUICK = Retry(attempts=3, first_s=0.01, most_s=0.02)


class Server(ThreadingHTTPServer):
    """`faults` are what goes wrong with the next requests, one each; `always` with all behind them.

    A number is an HTTP status. "reset": the connection breaks amid the body. "cut": it is closed there. "short": fewer
    bytes, honestly told. "whole": ranges are ignored. "wrong": a bit is flipped. "hang": nothing is said, until `gate`
    is set. "endless": zeros follow the whole object, for ever; "more": as many as it has. "overlong": a range comes
    with more bytes than were asked for. "gzip": the body is a coded gigabyte. "drip": a byte comes every 50 ms, "slow
    head": so the header. "loop": redirects to itself. `spared` are bytes at an object's beginning; requests that begin
    in them have no fault.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.faults, self.always, self.spared = root, list[str](), "", 0
        self.gate, self.lock = threading.Event(), threading.Lock()
        self.num_zeros = 0  # sent by "endless"
        self.asked: list[tuple[str, int]] = []  # (key, first byte) of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def remote(self) -> Remote:
        return Remote(self.url, QUICK, timeout_s=5)

    def next_fault(self, key: str, start: int) -> str:
        with self.lock:
            self.asked.append((key, start))
            if start < self.spared:
                return ""
            return self.faults.pop(0) if self.faults else self.always

    def handle_error(self, *_: Any) -> None:
        """Clients that go away are no errors here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path = self.server.root / self.path.lstrip("/")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        fault = self.server.next_fault(path.stem, start)
        if fault == "hang":
            self.server.gate.wait(60)
        if fault in _HOSTILE:
            _HOSTILE[fault](self, path.read_bytes(), start)
            return
        if fault.isdigit() or not path.is_file():
            self._send(int(fault or 404), b"")
            return
        data, size = path.read_bytes(), path.stat().st_size
        if asked and fault != "whole":
            data = data[start : int(asked[2]) + 1]
        if fault == "wrong":
            data = bytes([data[0] ^ 1]) + data[1:]
        if fault == "short":
            data = data[: len(data) // 2]
        sent = len(data) // 2 if fault in ("cut", "reset") else len(data)
        self._send(
            206 if asked and fault != "whole" else 200, data, sent, f"bytes {start}-{start + len(data) - 1}/{size}"
        )
        if sent < len(data):
            self._break(fault == "reset")

    def _send(self, status: int, data: bytes, sent: int | None = None, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 206:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(data[:sent])
        self.wfile.flush()

    def _break(self, is_reset: bool) -> None:
        if is_reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close() if is_reset else self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        pass

    # What no honest server does

    def _begin(self, status: int, **headers: str) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _send_endless(self, data: bytes, start: int) -> None:
        self._begin(200)
        self.wfile.write(data)
        while not self.server.gate.is_set():
            self.wfile.write(bytes(1 << 16))
            self.server.num_zeros += 1 << 16

    def _send_more(self, data: bytes, start: int) -> None:
        self._begin(200)
        self.wfile.write(data + bytes(len(data)))

    def _send_overlong(self, data: bytes, start: int) -> None:
        self._begin(206, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.wfile.write(data[start:] + bytes(1 << 22))

    def _send_gzip(self, data: bytes, start: int) -> None:
        self._begin(206, Content_Encoding="gzip")
        coder = zlib.compressobj(9, wbits=31)
        self.wfile.write(b"".join(coder.compress(bytes(1 << 24)) for _ in range(64)) + coder.flush())

    def _send_drip(self, data: bytes, start: int) -> None:
        self._begin(206, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")
        for byte in data[start:]:
            self.wfile.write(bytes([byte]))
            if self.server.gate.wait(0.05):
                return

    def _send_slow_head(self, data: bytes, start: int) -> None:
        self.close_connection = True
        for byte in b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nabcde":
            self.wfile.write(bytes([byte]))
            if self.server.gate.wait(0.05):
                return

    def _send_loop(self, data: bytes, start: int) -> None:
        self._begin(302, Location=self.path, Content_Length="0")


_HOSTILE = {
    "endless": _Handler._send_endless, "more": _Handler._send_more, "overlong": _Handler._send_overlong,
    "gzip": _Handler._send_gzip, "drip": _Handler._send_drip, "slow head": _Handler._send_slow_head,
    "loop": _Handler._send_loop,
}  # fmt: skip


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    server = Server(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()

"""Reading logs: files and streams, plain, gzip or zstd, line by line within bounds. Nothing is skipped silently."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from pictool.errors import InputError
from pictool.estimate.bodies import FormError
from pictool.estimate.forms import Forms, records_of
from pictool.estimate.segments import LoggedPrompt
from pictool.reading import NotRegularError, open_regular, require_shape

MAX_LINE = 64 << 20  # bytes of a record
_CHECKED = 1 << 20  # a longer line's shape is checked before it is parsed
_PART = 1 << 20
_COMPRESSED = 1 << 12  # bytes of zstd that are read at once: a block of 128 KiB may take 4
_MAX_IDLE = 1 << 30  # bytes without a line end: no log
STDIN = "-"
_ID_BYTES = 128  # that an id takes, of which there may be three kinds
_BAD_RECORD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_KNOWN = "pic estimate reads OpenAI's and Anthropic's requests, logs of gateways and vLLM, and traces, as lines of JSON"


class LogStream(Protocol):
    """Gives bytes as they come."""

    def read1(self, size: int, /) -> bytes: ...


@dataclass
class Unread:
    """Lines, or records in them, that could not be read: how many, of which kinds, and where the first is."""

    lines: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: str = ""
    _last: tuple[str, int] = ("", 0)

    def add(self, name: str, number: int, reason: str) -> None:
        self.lines += self._last != (name, number)
        self._last = name, number
        self.reasons[reason] += 1
        self.first = self.first or f"{name}, line {number}: {reason}"


class LogReader:
    """Reads logs one after another.

    Args:
        memory: bytes for ids of requests, which count once; None: all ids are kept.

    Attributes:
        forms: has what was found, and what was left out.
        unread: what could not be read. problems: files that end early, one line each.
        num_bytes: read so far, uncompressed. num_lines: with something on them.
    """

    def __init__(self, memory: int | None = None) -> None:
        self.forms = Forms(None if memory is None else memory // (3 * _ID_BYTES))
        self.unread, self.problems = Unread(), list[str]()
        self.num_bytes = self.num_lines = 0

    def read(self, names: Sequence[str]) -> Iterator[LoggedPrompt]:
        """The prompts of logs.

        Raises:
            InputError: a file that cannot be opened or read, or that is no log; or no prompt is in any.
        """
        for name in names:
            lines, left_out = self.num_lines, self.forms.left_out.total()
            yield from self._read_one(name)
            is_none = not self.forms.found.total() and self.forms.left_out.total() == left_out
            if is_none and (self.num_lines > lines or self.problems):
                where = self.unread.first or next(iter(self.problems), f"{name}: has no requests")
                raise InputError(f"{where}; {_KNOWN}")
        if not self.forms.found.total():
            reasons = show_counts(self.forms.left_out)
            raise InputError(
                f"{' '.join(names)}: {f'has no usable prompt; {reasons}' if reasons else 'has no requests'}"
            )

    def _read_one(self, name: str) -> Iterator[LoggedPrompt]:
        shown = "stdin" if name == STDIN else name
        with ExitStack() as opened:
            try:
                stream = decompressed(_open(name, opened), opened)
                for number, line in enumerate(self._lines(stream), 1):
                    if line is None:
                        self.unread.add(shown, number, f"is longer than {MAX_LINE >> 20} MiB")
                    elif stripped := line.strip():
                        yield from self._parse(shown, number, stripped)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.problems.append(
                    f"{shown}: is truncated or damaged after line {self.num_lines:,d} ({error}); earlier lines are "
                    "counted"
                )
            except OSError as error:
                raise InputError(f"{shown}: cannot be read ({error.strerror or error})") from error

    def _lines(self, stream: LogStream) -> Iterator[bytes | None]:
        """Lines in UTF-8; None for one that is too long."""
        head = stream.read1(_PART)
        parts, size, is_skipped = list[bytes](), 0, False  # of the line that is read, and its bytes
        while head:
            self.num_bytes += len(head)
            *lines, last = head.split(b"\n")
            if lines:
                lines[0] = b"" if is_skipped else b"".join((*parts, lines[0]))
                parts, size, is_skipped = [], 0, False
                yield from lines
            size += len(last)
            parts.append(last)
            if size > MAX_LINE:
                if not is_skipped:
                    yield None
                parts, is_skipped = [], True
            if size > _MAX_IDLE:
                raise EOFError(f"no line ends within {_MAX_IDLE >> 30} GiB")
            head = stream.read1(_PART)
        if rest := b"" if is_skipped else b"".join(parts):
            yield rest

    def _parse(self, name: str, number: int, line: bytes) -> Iterator[LoggedPrompt]:
        self.num_lines += 1
        try:
            reads = self._reads(line.removeprefix(codecs.BOM_UTF8))
        except _BAD_RECORD as error:
            self.unread.add(name, number, _reason(error))
            return
        for read in reads:
            try:
                prompts = read()
            except _BAD_RECORD as error:
                self.unread.add(name, number, _reason(error))
            else:
                yield from prompts

    def _reads(self, line: bytes) -> list[Callable[[], list[LoggedPrompt]]]:
        """What reads each record of a line, or a line of vLLM's log."""
        if line[:1] not in (b"{", b"[") and self.forms.is_line(text := line.decode(errors="replace")):
            return [partial(self.forms.line, text)]
        if len(line) > _CHECKED:
            require_shape(line)
        return [partial(self.forms.prompts, record) for record in records_of(json.loads(line))]


def _reason(error: Exception) -> str:
    """Why a record could not be read."""
    match error:
        case FormError():
            return str(error)
        case json.JSONDecodeError():
            return f"is not JSON ({error.msg})"
        case UnicodeDecodeError():
            return "is not UTF-8"
        case RecursionError():
            return "is nested too deeply"
        case ValueError():
            return "has a value that cannot be read"
    return "does not match its form"


def show_counts(counts: Counter[str]) -> str:
    """For people: 5 embeddings, 3 failed (429). The most first."""
    return ", ".join(f"{number:,d} {reason}" for reason, number in counts.most_common())


def _open(name: str, opened: ExitStack) -> BinaryIO:
    """Open a log. Raises InputError: no regular file; or OSError."""
    if name == STDIN:
        return sys.stdin.buffer
    path = Path(name)
    try:
        if path.is_fifo():
            return opened.enter_context(open(_open_pipe(path), "rb"))
        return opened.enter_context(open(open_regular(path), "rb"))
    except NotRegularError as error:
        raise InputError(f"{name}: {error.strerror}; specify the log's files") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be opened ({getattr(error, 'strerror', None) or error})") from error


def _open_pipe(path: Path) -> int:
    """A pipe, as of a shell's <(…). One that nobody has opened for writing is at its end: it is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return descriptor


def decompressed(raw: BinaryIO, opened: ExitStack) -> LogStream:
    """A stream by its first bytes: gzip, zstd, or as it is."""
    stream: Any = raw if hasattr(raw, "peek") else io.BufferedReader(raw, _PART)  # type: ignore[type-var]
    head = stream.peek(4)[:4]
    if head[:2] == b"\x1f\x8b":
        return opened.enter_context(gzip.GzipFile(fileobj=stream))
    return ZstdStream(stream) if head == b"\x28\xb5\x2f\xfd" else cast("LogStream", stream)


class ZstdStream:
    """What zstd frames hold, in parts of a bounded size. zstandard's own reader takes a cut frame for a whole one."""

    def __init__(self, stream: LogStream) -> None:
        import zstandard

        self._stream, self._make = stream, zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj
        self._frame, self._error = self._make(), zstandard.ZstdError
        self._rest, self._is_within = b"", False

    def read1(self, size: int) -> bytes:
        """Some bytes; none at the end. Raises EOFError: the last frame is cut. zlib.error: it is damaged."""
        while data := self._rest or self._stream.read1(_COMPRESSED):
            try:
                found: bytes = self._frame.decompress(data)
            except self._error as error:
                raise zlib.error(str(error)) from error
            self._rest, self._is_within = self._frame.unused_data, not self._frame.eof
            if self._frame.eof:
                self._frame = self._make()
            if found:
                return found
        if self._is_within:
            raise EOFError("the last frame is incomplete")
        return b""

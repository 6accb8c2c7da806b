"""Whether the terminal has a light background: by `COLORFGBG`, or by asking it (OSC 11).

The question is sent before the app is imported, and the answer read after it, so that it costs no time. It is followed
by a second one that every terminal answers (DA1): a terminal that knows only the latter is not waited for.
"""

from __future__ import annotations

import os
import re
import select
import termios
import time
from types import TracebackType

_QUESTION = b"\x1b]11;?\x1b\\\x1b[c"
_COLOR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_LAST = re.compile(rb"\x1b\[\?[\d;]*c")
_LIGHT_INDICES = (7, 15)  # of the 16 colours, as COLORFGBG names them
_MUTE = ("", "dumb", "linux")  # terminals that do not know the question
_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue in the luminance (Rec. 601)
WAIT_S = 0.5


class BackgroundQuestion:
    """Asks the terminal when it is entered; `is_light` reads the answer. When it is left, the terminal is as before.

    Args:
        reader, writer: descriptors of the terminal.
    """

    def __init__(self, reader: int = 0, writer: int = 2) -> None:
        self._reader, self._writer = reader, writer
        self._before: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> BackgroundQuestion:
        if by_environment() is None and os.environ.get("TERM", "") not in _MUTE:
            self._before = termios.tcgetattr(self._reader)
            quiet = termios.tcgetattr(self._reader)
            quiet[3] &= ~(termios.ECHO | termios.ICANON)  # of the local modes
            termios.tcsetattr(self._reader, termios.TCSANOW, quiet)
            os.write(self._writer, _QUESTION)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._before is not None:
            termios.tcsetattr(self._reader, termios.TCSANOW, self._before)

    def is_light(self) -> bool:
        """Whether the background is light; False if the terminal does not say."""
        known = by_environment()
        if known is not None or self._before is None:
            return bool(known)
        return is_light(self._read())

    def _read(self) -> bytes:
        """The answers, until the last one is there, or the time is over."""
        answer, end = b"", time.monotonic() + WAIT_S
        while not _LAST.search(answer) and (left := end - time.monotonic()) > 0:
            if not select.select([self._reader], [], [], left)[0]:
                break
            data = os.read(self._reader, 1024)
            if not data:
                break
            answer += data
        return answer


def by_environment() -> bool | None:
    """What `COLORFGBG` ("foreground;background", of the 16 colours) says; None if it says nothing."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return int(background) in _LIGHT_INDICES if background.isdecimal() else None


def is_light(answer: bytes) -> bool:
    """Whether a terminal's answer names a colour that is nearer to white than to black."""
    color = _COLOR.search(answer)
    if color is None:
        return False
    parts = [int(part, 16) / (16 ** len(part) - 1) for part in color.groups()]
    luminance: float = sum(weight * part for weight, part in zip(_WEIGHTS, parts, strict=True))
    return luminance > 0.5

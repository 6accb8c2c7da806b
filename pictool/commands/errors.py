"""What a user's mistake becomes: one line on stderr and an exit code, never a traceback."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn, Protocol
from weakref import WeakSet

from pictool.errors import PicError
from pictool.escapes import visible

_MAX_MESSAGE = 2000  # characters


class UsageError(PicError):
    """Options that make no sense together, whatever the files hold."""

    exit_code = 2


class Cancellable(Protocol):
    def cancel(self) -> None:
        """Give up what runs; it is not waited for."""


_running: WeakSet[Cancellable] = WeakSet()


def cancel_on_interrupt(work: Cancellable) -> None:
    """Have this cancelled if the command is interrupted, so that the process does not wait for it."""
    _running.add(work)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the exceptions that a user can cause into messages and exit codes (docs/design.md §6)."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except PicError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            print("pic: interrupted", file=sys.stderr)
            for work in list(_running):
                work.cancel()
            sys.exit(130)
        except BrokenPipeError:
            drop_stdout()
            sys.exit(1)
        except OSError as error:
            drop_stdout()
            fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)

    return run


def fail(message: str, code: int) -> NoReturn:
    print("pic: error:", visible(_shortened(" ".join(message.splitlines()))), file=sys.stderr)
    sys.exit(code)


def _shortened(message: str) -> str:
    """A message whose end is readable, whatever a file holds that it quotes: the middle is left out if it is long."""
    return (
        message if len(message) <= _MAX_MESSAGE else f"{message[: _MAX_MESSAGE // 2]} … {message[-_MAX_MESSAGE // 2 :]}"
    )


def drop_stdout() -> None:
    """Forget what cannot be written, so that Python's own last flush does not complain of it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

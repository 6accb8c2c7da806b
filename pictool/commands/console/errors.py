"""What a user's mistake becomes: one line on stderr and an exit code, never a traceback."""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

from pictool.commands.console.verbosity import is_verbose
from pictool.errors import InputError, PicError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.store.store import Store

INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells have it
GRACE_S = 5.0  # for so long an interrupted command may still clean up
_MAX_MESSAGE = 2000  # characters
# Modules of the extra [torch], without which `pic estimate` runs.
OF_TORCH = frozenset((
    "aiohttp", "fsspec", "huggingface_hub", "jinja2", "ml_dtypes", "networkx", "safetensors", "threadpoolctl",
    "tokenizers", "torch", "transformers",
))  # fmt: skip


class UsageError(PicError):
    """Options that make no sense together, whatever the files hold."""

    exit_code = 2


@contextmanager
def of_command_line() -> Iterator[None]:
    """What is an error of input here is one of the command line, since that is where the input is from."""
    try:
        yield
    except InputError as error:
        raise UsageError(str(error)) from error


fetching: WeakSet[Store] = WeakSet()  # cancelled if the command is interrupted, so that the process waits for none


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
            for store in list(fetching):
                store.cancel()
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            drop_stdout()
            sys.exit(1)
        except OSError as error:
            drop_stdout()
            fail(os_problem(error), 1)
        except ModuleNotFoundError as error:
            if error.name not in OF_TORCH:
                raise
            fail(f"{error.name} is not installed; pip install 'pictool[torch]'", 1)

    return run


def os_problem(error: OSError) -> str:
    """An error of the system in a line: what it concerns, and what is wrong."""
    if error.errno == errno.EBADF and error.filename is None:
        return "stdin or stdout: is closed; leave it open, or redirect it to a file"
    return f"{error.filename or 'input or output'}: {error.strerror or error}"


def end_within(seconds: float) -> None:
    """End this process after so long at the latest, whatever its threads wait for; it has said why it ends.

    An interrupt can come between any two steps of a library that starts a thread or passes it work. What such a thread
    leaves behind is what a killed process leaves: files in tmp/, which the next gc removes.
    """
    timer = threading.Timer(seconds, os._exit, [INTERRUPTED])
    timer.daemon = True
    timer.start()


def fail(message: str, code: int) -> NoReturn:
    if is_verbose() and sys.exc_info()[0] is not None:
        traceback.print_exc()
    line = " ".join(message.splitlines())
    if len(line) > _MAX_MESSAGE:  # its end is readable, whatever a file holds that it quotes
        line = f"{line[: _MAX_MESSAGE // 2]} … {line[-_MAX_MESSAGE // 2 :]}"
    print("pic: error:", visible(line), file=sys.stderr)
    sys.exit(code)


def drop_stdout() -> None:
    """Forget what cannot be written, so that Python's own last flush does not complain of it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

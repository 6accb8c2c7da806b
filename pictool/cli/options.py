"""Options that several commands have, and what turns a user's mistake into one line and an exit code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn, Optional

import typer

from pictool.errors import PicError

ModelOption = Annotated[Optional[str], typer.Option("-m", "--model", help="Directory, hub name or embedded[-small].")]
StoreOption = Annotated[Optional[str], typer.Option("--store", help="Directory of objects (PIC_STORE, .pic).")]
RemoteOption = Annotated[Optional[str], typer.Option("--remote", help="URL of a store to ask too (PIC_REMOTE).")]
DeviceOption = Annotated[Optional[str], typer.Option("--device", help="auto, cpu or cuda.")]
DtypeOption = Annotated[Optional[str], typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
EngineOption = Annotated[str, typer.Option("--engine", help="torch, or vllm (docs/guides/vllm.md).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DepfileOption = Annotated[bool, typer.Option("--depfile", help="Write what -o depends on beside it, for make (OUT.d).")]
CodecOption = Annotated[Optional[str], typer.Option("--codec", help="How KV is kept: none, zstd, int8, int4 or fp8.")]
SaltOption = Annotated[
    Optional[str], typer.Option("--salt", help="Separates tenants: other salts never hit (PIC_SALT).")
]
ChunkOption = Annotated[Optional[int], typer.Option("--chunk-tokens", min=1, help="Cut files into chunks of N tokens.")]


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A user's mistake is one line on stderr and an exit code, never a traceback."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except PicError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            print("pic: interrupted", file=sys.stderr)
            _give_up_fetching()
            sys.exit(130)
        except BrokenPipeError:
            drop_stdout()
            sys.exit(1)
        except OSError as error:
            drop_stdout()
            fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)

    return run


def _give_up_fetching() -> None:
    """Do not wait for what is being fetched from a remote."""
    if common := sys.modules.get("pictool.commands.common"):
        common.cancel_fetching()


def fail(message: str, code: int) -> NoReturn:
    print("pic: error:", " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(code)


def drop_stdout() -> None:
    """Forget what cannot be written, so that Python's own last flush does not complain of it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

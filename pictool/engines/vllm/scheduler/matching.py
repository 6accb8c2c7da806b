"""Objects that a request links: opened by their keys, for the model and the tenant that they must be of."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from pictool.core import Target
from pictool.engines.vllm.request import RequestError, UnusableObjectError
from pictool.errors import InputError, PicError
from pictool.reading import FileState
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

KEY_DIGITS = 64


def adapted(target: Target, directory: str) -> Target:
    """What objects are made for under a LoRA adapter: its files are a part of the model's fingerprint.

    Raises:
        InputError: it is no local directory, or cannot be read.
    """
    digest = hashlib.sha256(target.model.encode())
    with _reading(directory):
        for path in sorted(Path(directory).iterdir()):
            if path.is_file():
                digest.update(f"{path.name} {blake3().update_mmap(path).hexdigest()} ".encode())
    return replace(target, model=digest.hexdigest())


def adapter_files(directory: str) -> list[tuple[str, FileState]]:
    """The files of a LoRA adapter as they are now, without reading them. Raises InputError as `adapted` does."""
    with _reading(directory):
        files = [path for path in sorted(Path(directory).iterdir()) if path.is_file()]
        return [(path.name, FileState.of(path.stat())) for path in files]


@contextmanager
def _reading(directory: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"the adapter {directory} cannot be read ({error.strerror}); use a directory") from error


def full_key(store: Store, name: object, salt: str, listed: dict[str, list[str]] | None = None) -> str:
    """The key that a request of a tenant names: in full, or abbreviated as in git.

    Args:
        listed: what was listed for the request's other keys (`Store.resolve`).

    Raises:
        RequestError: not a key.
        UnusableObjectError: an abbreviation of no object, or of several.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]+", name) or len(name) > KEY_DIGITS:
        raise RequestError(f"kv_transfer_params: {name!r} is not an object key ({KEY_DIGITS} hex digits)")
    try:
        return name if len(name) == KEY_DIGITS else store.resolve(name, salt, listed)
    except (PicError, OSError) as error:
        raise UnusableObjectError(name, error) from error


def open_object(store: Store, target: Target, key: str, salt: str) -> ObjectFile:
    """Open an object by its full key, and check that it is of this salt and model. Of another salt, it is absent.

    It is not marked as used (`Store.mark_used`): the planner does that once for a linked object.

    Raises:
        UnusableObjectError: missing, damaged (header or tokens), foreign, or another object than its name says.
    """
    try:
        file = store.peek(key)
        try:
            if file.meta.key_of(file.tokens(), salt) != key:
                raise store.absent(key)  # so that no tenant learns of another's object
            file.meta.require(target, f"{key[:12]}")
        except BaseException:
            file.close()
            raise
    except (PicError, OSError) as error:
        raise UnusableObjectError(key, error) from error
    return file

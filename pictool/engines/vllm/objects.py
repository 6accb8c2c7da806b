"""Objects as a request names them: opened, and checked against the model and their own key before anything is used."""

from __future__ import annotations

import re

from pictool.core import Target
from pictool.errors import ForeignObjectError, InputError, ObjectError, StoreError
from pictool.linker.policies.base import Table
from pictool.linker.resolve import Part
from pictool.runtime.model import Model
from pictool.store.format import ObjectFile
from pictool.store.store import Store

KEY_DIGITS = 64


def open_object(store: Store, target: Target, key: str, salt: str) -> ObjectFile:
    """Open the object of a whole key; it is of this model, and its key is that of its tokens and the tenant's salt.

    It is not marked as used (`Store.mark_used`): a request that links it does that once.

    Raises:
        PicError: missing, damaged (header or tokens), foreign, or another object than its name says.
    """
    file = store.peek(key)
    try:
        file.meta.require(target, f"{key[:12]}")
        if target.key(file.tokens(), file.meta.sinks, file.meta.codec, salt) != key:
            raise ForeignObjectError(
                f"{file.path}: its key {key[:12]} is not that of its tokens and this request's cache_salt; compile it "
                "again, with this salt"
            )
    except BaseException:
        file.close()
        raise
    return file


def table_of(model: Model, store: Store, part: Part) -> Table | None:
    """The table of a part's object; None without one, or if it is still to be compiled.

    Raises:
        ObjectError: an object that was given as a file, or a table, is damaged.
    """
    try:
        file = store.peek(part.key(model)) if part.path is None else ObjectFile(part.path)
    except (StoreError, ObjectError):
        if part.path is not None:
            raise
        return None
    with file:
        return file.fixups()


def whole_key(store: Store, name: object) -> str:
    """The key that a request names: whole, or abbreviated as in git.

    Raises:
        InputError: not a key.
        StoreError: an abbreviation of no object, or of several.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]+", name) or len(name) > KEY_DIGITS:
        raise InputError(f"kv_transfer_params: {name!r} is no object key ({KEY_DIGITS} hex digits)")
    return name if len(name) == KEY_DIGITS else store.resolve(name)

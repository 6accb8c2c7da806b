"""Objects that a request links: opened by their keys, for the model and the tenant that they must be of."""

from __future__ import annotations

import re

from pictool.core import Target
from pictool.errors import ForeignObjectError, InputError
from pictool.store.format import ObjectFile
from pictool.store.store import Store

KEY_DIGITS = 64


def full_key(store: Store, name: object) -> str:
    """The key that a request names: in full, or abbreviated as in git.

    Raises:
        InputError: not a key.
        StoreError: an abbreviation of no object, or of several.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]+", name) or len(name) > KEY_DIGITS:
        raise InputError(f"kv_transfer_params: {name!r} is no object key ({KEY_DIGITS} hex digits)")
    return name if len(name) == KEY_DIGITS else store.resolve(name)


def open_object(store: Store, target: Target, key: str, salt: str) -> ObjectFile:
    """Open an object by its full key, and check that it is of this model, and its key of its tokens and the salt.

    It is not marked as used (`Store.mark_used`): the planner does that once for a linked object.

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

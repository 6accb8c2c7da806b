"""The object that a lease names, as far as it is its tenant's: both homes open it here."""

from __future__ import annotations

import logging

from pictool.core import TokenIds
from pictool.errors import ObjectError, StoreError
from pictool.runtime.model import Model
from pictool.serve.errors import not_found
from pictool.store.store import Store


def leased_object(store: Store, key: str, model: Model, log: logging.Logger) -> tuple[str, TokenIds]:
    """The key and the tokens of an object, which is this model's and its salt's.

    Raises:
        ApiError: 404 for one that is lost, damaged, or not; only the log says which.
    """
    try:
        with store.peek(key) as file:
            file.meta.require(model.target, "object")
            tokens = file.tokens()
            if file.meta.key != file.meta.key_of(tokens, model.salt):
                raise StoreError("another salt")
            return key, tokens
    except (ObjectError, StoreError) as error:
        log.warning("pic: a leased object cannot be used: %s", error)
        raise not_found("a cache's object; make the cache again", "cache_id", "cache_object_missing") from error

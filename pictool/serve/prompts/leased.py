"""Objects that requests name, by leases or keys, as far as they are their tenant's: both backends find them here."""

from __future__ import annotations

import logging
from dataclasses import replace

from pictool.compiler.chunking import require_text
from pictool.core import Target, TokenIds
from pictool.errors import ObjectError, StoreError
from pictool.linker.spec import Spec
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
            require_text(model, tokens, "object")
            if file.meta.key != file.meta.key_of(tokens, model.salt):
                raise StoreError("another salt")
            return key, tokens
    except (ObjectError, StoreError) as error:
        log.warning("pic: a leased object cannot be used: %s", error)
        raise not_found(
            "an object of the cache (create the cache again)", "cache_id", "cache_object_missing"
        ) from error


def has_object(store: Store, key: str, target: Target) -> bool:
    """Whether an object is here, of this model, so that a request may name it."""
    try:
        with store.peek_local(key) as file:
            return file.meta.target == target
    except (ObjectError, StoreError):
        return False


def with_objects(spec: Spec, store: Store, salt: str) -> Spec:
    """A spec whose keys are objects of a salt. Raises ApiError 404."""
    documents = list(spec.documents)
    for i, name in enumerate(documents):
        if isinstance(name, str):
            try:
                documents[i] = store.path(store.find(name, salt))
            except StoreError as error:
                raise not_found(f"object {name[:12]}", "documents", "object_not_found") from error
    return replace(spec, documents=documents)

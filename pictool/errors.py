"""The one family of exceptions that users can cause; each carries the exit code of the command that meets it."""

from __future__ import annotations


class PicError(Exception):
    """A mistake in the input or the surroundings. The message is one line: what is wrong, where, and the remedy."""

    exit_code = 1


class InputError(PicError):
    """A document, query, script or option that cannot be used."""


class ModelError(PicError):
    """A model that cannot be loaded, or is not supported."""


class ChangedModelError(ModelError):
    """A model whose weights, or their files, are not those that were loaded."""


class NotFiniteError(ModelError):
    """Numbers that overflowed, or were none before anything was computed from them."""


class ObjectError(PicError):
    """A file that is not an object, or a damaged or truncated one."""


class ForeignObjectError(ObjectError):
    """An object made for another model, tokenizer, dtype, codec or format version."""


class UnreadableObjectError(ObjectError):
    """A file that the system does not let be read; whether it is whole is not known."""


class RemoteError(ObjectError):
    """An object that a remote does not give, or not whole. `key` is the object's."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class StoreError(PicError):
    """A store that cannot be read or written, or a key that it does not hold."""


class NoRoomError(StoreError):
    """What does not fit into a store's budget, beside what must stay there, or into a tenant's share of it."""


class UnwritableStoreError(StoreError):
    """A store, or a file outside of one, that the system does not let be written: permissions, a full disk."""


class TraceError(PicError):
    """A file that is not a trace, a damaged one, or one that does not fit the model or another trace."""

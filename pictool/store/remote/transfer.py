"""Push and pull: objects sent to a store's remote, and fetched from it by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from pictool.errors import InputError, StoreError
from pictool.store.entries import is_key
from pictool.store.remote.remote import Remote
from pictool.store.signatures import Signed, read_sidecar
from pictool.store.store import Store


@dataclass(frozen=True)
class TransferResult:
    """Keys that were sent or fetched, and their bytes; `present` were there already."""

    keys: tuple[str, ...]
    num_bytes: int
    present: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[TransferResult]) -> TransferResult:
        """Several as one."""
        keys, present = (tuple(chain(*names)) for names in ([p.keys for p in parts], [p.present for p in parts]))
        return cls(keys, sum(part.num_bytes for part in parts), present)


def push(
    store: Store, keys: Sequence[str], on_object: Callable[[], None] = lambda: None, force: bool = False
) -> TransferResult:
    """Send objects to the store's remote. Every object is checked first; one that is there stays (`Remote.has_same`).

    What killed pushes left there is removed.

    Args:
        force: send also what is there.

    Raises:
        InputError: the store has no remote.
        PicError: an object is missing or damaged, or the remote cannot be written; those before it are sent.
    """
    remote, sent, present, num_bytes = _require_remote(store), list[str](), list[str](), 0
    remote.require_writable()
    remote.remove_stale_temps()
    for key in dict.fromkeys(keys):
        with store.peek_local(key) as file:
            file.verify()
            if not force and remote.has_same(file):
                present.append(key)
            else:
                remote.write(key, store.path(key))
                if not remote.has_same(file) and remote.another(file) is None:  # nor what somebody else compiled
                    raise StoreError(f"{remote.name(key)}: another object is there after the push; push it again")
                sent.append(key)
                num_bytes += file.num_bytes
            if signatures := read_sidecar(store.path(key)):
                remote.write_signatures(Signed.of_object(file), signatures)
        on_object()
    return TransferResult(tuple(sent), num_bytes, tuple(present))


def pull(store: Store, keys: Sequence[str], on_object: Callable[[], None] = lambda: None) -> TransferResult:
    """Fetch objects, named by whole keys, from the store's remote. An intact one that is here already stays.

    Their signatures are fetched only if the store requires some.

    Raises:
        InputError: the store has no remote, or an abbreviated key.
        PicError: an object that the remote has not (or not whole), or a damaged one here; those before it are here.
    """
    remote, fetched, present, num_bytes = require_pullable(store, keys), list[str](), list[str](), 0
    for key in dict.fromkeys(keys):
        if store.path(key).exists():
            if store.requires_signed:
                store.pull_signatures(key)
            with store.peek_local(key) as file:
                file.verify()
            present.append(key)
        elif store.fetch(key):
            fetched.append(key)  # with its signatures, where they are required
            num_bytes += store.path(key).stat().st_size
        else:
            raise StoreError(f"{remote.name(key)}: no such object; check what was pushed")
        on_object()
    return TransferResult(tuple(fetched), num_bytes, tuple(present))


def require_pullable(store: Store, keys: Sequence[str]) -> Remote:
    """The remote that has objects. Raises InputError: there is none, or a key is abbreviated."""
    if abbreviated := [key for key in keys if not is_key(key)]:
        raise InputError(f"{abbreviated[0]}: must be a whole key (64 hex digits); a remote cannot be searched")
    return _require_remote(store)


def _require_remote(store: Store) -> Remote:
    if store.remote is None:
        raise InputError("no remote is set; set one with --remote, PIC_REMOTE, or remote in pic.yaml")
    return store.remote

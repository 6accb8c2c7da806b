"""Stored documents recognised in prompts by their content: an index of a store, and the thread that keeps it.

No request waits for the index to be read, and a refresh costs what is new in the store, not what is in it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from pictool.core import Contexts, Identity, Target, TokenIds
from pictool.errors import ForeignObjectError, PicError, StoreError, UnreadableObjectError
from pictool.recognition.matches import Decode, Match, find_run
from pictool.recognition.search import HashedTokens, SearchTable, TokenRun, choose_runs
from pictool.store.codecs import codecs
from pictool.store.entries import keys_of, shards
from pictool.store.objects.format import ObjectFile
from pictool.store.signatures import sidecar_of
from pictool.store.store import Store

_LEAST_PAUSE_S = 1.0  # between two readings of the store, however often one is asked for
FileState = tuple[int, int, int]  # inode, size, time of the last change


@dataclass
class _Document:
    """Tokens that are in the store under some keys: those of tenants' salts, and of codecs."""

    tokens: TokenIds
    digest: bytes
    unsalted: dict[tuple[str, Contexts], str] = field(default_factory=dict)  # the key without a salt, by codec and
    # what came before
    keys: set[str] = field(default_factory=set)


class _Listing:
    """The documents, and the table by which they are found. Immutable."""

    def __init__(self, documents: Sequence[_Document] = (), table: SearchTable | None = None) -> None:
        self.documents, self.table = documents, table or SearchTable.of([])
        self.by_digest = {document.digest: document for document in documents}

    def changed(self, new: Sequence[_Document]) -> _Listing:
        """Without the documents that no object has any more, and with new ones."""
        is_kept = np.array([bool(document.keys) for document in self.documents], dtype=bool)
        kept = [document for document, keeps in zip(self.documents, is_kept, strict=True) if keeps]
        return _Listing([*kept, *new], self.table.changed(is_kept, [document.tokens for document in new]))


@dataclass(frozen=True)
class _Object:
    """What the index takes from an object's file."""

    tokens: TokenIds
    kind: tuple[str, Contexts]
    unsalted: str


@dataclass(frozen=True)
class _Unsound:
    """A file that is no whole object, as long as it is the same file; None: it must be read again."""

    state: FileState | None


class ContentIndex:
    """Recognises a store's documents in prompts.

    Args:
        target: what objects must be made for.
        min_tokens: the shortest match that is recognised.
        decode: of the target's tokenizer.
        cut: of a hybrid, that of the objects which are recognised.
    """

    def __init__(
        self, store: Store, target: Target, min_tokens: int, decode: Decode,
        cut: int | None = None,
    ) -> None:  # fmt: skip
        self._store, self._target, self._min_tokens = store, target, min_tokens
        self._decode, self._cut = decode, cut
        self._refreshing, self._changing = threading.Lock(), threading.Lock()
        self._listing = _Listing()
        self._known: dict[str, _Document | None] = {}  # None: in the store, but of no use here
        self._unsound: dict[str, _Unsound] = {}
        self.version = 0  # another one once the documents have changed

    def find(self, tokens: TokenIds, salt: str = "", codec: str | None = None) -> list[Match]:
        """The documents of this salt that are in a prompt, in its order, without overlaps.

        Longer documents are chosen before shorter ones.

        Args:
            codec: that of the objects; None: any, of several of a document a lossless one.
        """
        listing = self._listing
        candidates = listing.table.candidates(HashedTokens(tokens))
        is_own = np.zeros(len(listing.documents), dtype=bool)
        is_own[candidates.which] = True
        keys = {which: self._key_of(listing.documents[which], salt, codec) for which in np.flatnonzero(is_own).tolist()}
        is_own[[which for which, key in keys.items() if key is None]] = False

        def place(which: int, shift: int, low: int, high: int) -> TokenRun | None:
            run = find_run(tokens, listing.documents[which].tokens, shift, low, high, self._decode, which)
            return run if run is not None and run.end - run.start >= self._min_tokens else None

        runs = choose_runs(candidates.of(is_own[candidates.which]), len(tokens), place)
        return [Match.of(str(keys[run.which]), listing.documents[run.which].tokens, run) for run in runs]

    def documents_of(self, salt: str = "") -> dict[str, TokenIds]:
        """The documents of this salt, by key."""
        listing = self._listing
        keys = [self._key_of(document, salt, None) for document in listing.documents]
        return {key: each.tokens for key, each in zip(keys, listing.documents, strict=True) if key is not None}

    def mark_suspect(self, key: str) -> None:
        """Recognise an object no more until `refresh` has read all of it and found it whole. Returns at once."""
        with self._changing:
            if self._known.get(key) is not None:
                self._drop(key)
                self._unsound[key] = _Unsound(None)
                self.version += 1

    def refresh(self) -> None:
        """Read what is new in the store, and drop what was removed from it. May run in a thread beside the others.

        An object that was damaged, or is suspect, is read as a whole, once its file is another.

        Raises:
            StoreError: a directory that cannot be read. Its objects stay as they are; all others have been read.
        """
        with self._refreshing:
            with self._changing:  # `mark_suspect` makes known objects unsound, and nothing else changes meanwhile
                known, unsound = {*self._known, *self._unsound}, dict(self._unsound)
            present, problems = self._list_keys(known)
            again = {key for key in unsound.keys() & present if self._is_other(key, unsound[key])}
            read = {key: self._read(key, checks_all=key in again) for key in sorted((present - known) | again)}
            with self._changing:
                self._update(known - present, read)
                self.version += bool(known - present or read)
        if problems:
            raise StoreError(f"{'; '.join(problems)}; its documents are not recognised until it can be read")

    def _key_of(self, document: _Document, salt: str, codec: str | None) -> str | None:
        """The key under which a tenant has a document in a codec; None if it has not.

        Preferred are those that were computed after most, and of these lossless ones.
        """
        kinds = [kind for kind in document.unsalted if codec in (None, kind[0])]
        for kind in sorted(kinds, key=lambda kind: (-sum(map(len, kind[1])), not codecs()[kind[0]].is_lossless, kind)):
            key = Identity.of(document.unsalted[kind], salt).key
            if key in document.keys:
                return key
        return None

    def _list_keys(self, known: set[str]) -> tuple[set[str], list[str]]:
        """The keys of the store, and which directories cannot be read; of these, the keys that are known."""
        root, present, problems = self._store.root, set[str](), list[str]()
        try:
            names = shards(root)
        except OSError as error:
            return known, [f"{root / 'objects'}: cannot be read ({error.strerror})"]
        for shard in names:
            try:
                present.update(keys_of(root, shard))
            except OSError as error:
                problems.append(f"{root / 'objects' / shard}: cannot be read ({error.strerror})")
                present |= {key for key in known if key.startswith(shard)}
        return present, problems

    def _is_other(self, key: str, unsound: _Unsound) -> bool:
        """Whether a file is another than the one that was no whole object."""
        return unsound.state is None or unsound.state != self._state(key)

    def _state(self, key: str) -> FileState | None:
        with suppress(OSError):
            status = self._store.path(key).stat()
            changed = status.st_ctime_ns
            if self._store.requires_signed:  # which makes of an absent object one that is there
                with suppress(FileNotFoundError):
                    changed = max(changed, sidecar_of(self._store.path(key)).stat().st_ctime_ns)
            return status.st_ino, status.st_size, changed
        return None

    def _read(self, key: str, checks_all: bool) -> _Object | _Unsound | None:
        """What the index needs of an object; None if it is of no use here, whatever becomes of its file."""
        state = self._state(key)
        try:
            with self._store.peek_local(key) as file:
                return self._read_file(file, key, checks_all)
        except ForeignObjectError:
            return None
        except UnreadableObjectError:  # by its permissions, or the disk's: it may be whole
            return _Unsound(None)
        except PicError:
            return _Unsound(state)

    def _read_file(self, file: ObjectFile, key: str, checks_all: bool) -> _Object | None:
        meta = file.meta
        meta.require(self._target, key[:12])
        meta.require_known_context(key[:12])
        if meta.parent is not None or meta.num_tokens < self._min_tokens or meta.cut != self._cut:
            return None
        if checks_all:
            file.verify()
        tokens = file.tokens()
        return _Object(tokens, (meta.codec, meta.after), meta.key_of(tokens))

    def _update(self, gone: Iterable[str], read: Mapping[str, _Object | _Unsound | None]) -> None:
        """Take over what was read; the search tables are made again once for all of it."""
        for key in gone:
            self._drop(key)
            self._unsound.pop(key, None)
        new: dict[bytes, _Document] = {}
        for key, found in read.items():
            self._unsound.pop(key, None)
            if isinstance(found, _Unsound):
                self._unsound[key] = found
            else:
                self._known[key] = None if found is None else self._document_of(key, found, new)
        if new or not all(document.keys for document in self._listing.documents):
            self._listing = self._listing.changed([*new.values()])

    def _document_of(self, key: str, found: _Object, new: dict[bytes, _Document]) -> _Document:
        """The document of an object's tokens, which may be a new one, with the object as one of its own."""
        digest = hashlib.sha256(found.tokens.tobytes()).digest()
        document = self._listing.by_digest.get(digest)
        if document is None:
            document = new.setdefault(digest, _Document(found.tokens, digest))
        document.unsalted[found.kind] = found.unsalted
        document.keys.add(key)
        return document

    def _drop(self, key: str) -> None:
        document = self._known.pop(key, None)
        if document is not None:
            document.keys.discard(key)


class IndexThread:
    """Keeps an index up to date: reads the store when it is started, and every `interval_s` seconds.

    `warn` receives whatever error a reading meets, once, and its end; the next reading comes as ever.
    """

    def __init__(self, index: ContentIndex, interval_s: float, warn: Callable[[str], None]) -> None:
        self._index, self._interval_s, self._warn = index, interval_s, warn
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_read, self._wakes, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._is_late = False  # somebody went on without the first reading
        self._problem: str | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start to read, unless that was done."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pic-index", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the store has been read once; False if that takes longer. `warn` then receives its end."""
        has_read = self._has_read.wait(timeout_s)
        self._is_late |= not has_read
        return has_read

    def wake(self) -> None:
        """Read the store soon: at most once a second."""
        self._wakes.set()

    def close(self) -> None:
        """End the thread. Does not wait for it."""
        self._closing.set()
        self._wakes.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wakes.clear()
            self._refresh()
            if not self._has_read.is_set():
                self._has_read.set()
                if self._is_late:
                    self._warn("the index of stored documents: the whole store has been read")
            pause_s = min(_LEAST_PAUSE_S, self._interval_s)
            if not self._closing.wait(pause_s):
                self._wakes.wait(self._interval_s - pause_s)

    def _refresh(self) -> None:
        problem = None
        try:
            self._index.refresh()
        except Exception as error:  # of whatever kind: without this thread nothing new is ever recognised
            problem = str(error) if isinstance(error, PicError) else f"{type(error).__name__}: {error}"
        if problem is not None and problem != self._problem:
            self._warn(f"the index of stored documents: {problem}")
        if problem is None and self._problem is not None:
            self._warn("the index of stored documents: the store is read again")
        self._problem = problem

"""Signatures of objects and of whole files: Ed25519, each beside what it signs, in NAME.sig.

    sidecar   := line*                                         at most 16 lines, 8 KiB
    line      := "ed25519:"(64 hex: the public key) SP (64 hex: the digest) SP (128 hex: the signature) LF
    message   := "pictool signature 1" LF "object" LF (key) LF (digest)       of an object
                 "pictool signature 1" LF "file" LF LF (digest)               of a whole file
    signers   := (["revoked" SP] "ed25519:"(64 hex) SP (name) LF)*

An object's digest is BLAKE3 of its header with its length: tokens, text, target and every layer are bound by the
checksums in it. A file's digest is BLAKE3 of its bytes. No signature has a date, so no clock decides anything: a key is
trusted or not, and what a revoked one signed, at whatever time, is absent.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from pictool.errors import InputError
from pictool.needs import require_extra
from pictool.reading import open_regular, read_file, with_home
from pictool.store.files import atomic_write, locked_for_change
from pictool.store.objects.format import EncodedObject, ObjectFile

SUFFIX = ".sig"
MAX_BYTES = 8 << 10  # of a sidecar
MAX_LINES = 16
DEFAULT = "default"  # in place of a file's name: the one in the user's configuration
_MAX_SIGNERS_BYTES = 1 << 20
_MAX_NAME = 64
_LINE = re.compile(r"(ed25519:[0-9a-f]{64}) ([0-9a-f]{64}) ([0-9a-f]{128})")
_SIGNER = re.compile(r"(revoked )?(ed25519:[0-9a-f]{64}) (\S(?:.*\S)?)")


def sidecar_of(path: Path) -> Path:
    """The file with the signatures of another."""
    return path.with_name(path.name + SUFFIX)


@dataclass(frozen=True)
class Signed:
    """What a signature is of: an object, by its key and its header's digest, or a whole file, by its digest."""

    digest: str
    key: str = ""

    @classmethod
    def of_object(cls, own: ObjectFile | EncodedObject) -> Signed:
        return cls(blake3(own.header()).hexdigest(), own.meta.key)

    @classmethod
    def of_file(cls, path: Path) -> Signed:
        """Raises InputError: it cannot be read."""
        digest = blake3()
        try:
            with open(open_regular(path), "rb") as file:
                while data := file.read(1 << 20):
                    digest.update(data)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        return cls(digest.hexdigest())

    @property
    def message(self) -> bytes:
        kind = "object" if self.key else "file"
        return f"pictool signature 1\n{kind}\n{self.key}\n{self.digest}".encode()


def read_sidecar(path: Path) -> bytes:
    """The signatures beside a file; nothing, if there is no regular file of their size."""
    with suppress(OSError, ValueError):
        return read_file(sidecar_of(path), MAX_BYTES)
    return b""


def lines_of(sidecar: bytes) -> list[tuple[str, str, str]]:
    """(public key, digest, signature) of each line that is one."""
    lines = sidecar[:MAX_BYTES].decode("ascii", "replace").split("\n")[:MAX_LINES]
    return [match.groups() for line in lines if (match := _LINE.fullmatch(line))]  # type: ignore[misc]


def merge(*sidecars: bytes, digest: str = "") -> bytes:
    """The lines of several sidecars, each once: those of `digest` first, and of the first sidecar before others'."""
    lines = dict.fromkeys(line for sidecar in sidecars for line in lines_of(sidecar))
    kept = sorted(lines, key=lambda line: line[1] != digest)[:MAX_LINES]
    return "".join(f"{' '.join(line)}\n" for line in kept).encode()


def write_sidecar(
    path: Path, sidecar: bytes, digest: str, temp_dir: Path | None = None, durable: bool = True
) -> None:  # fmt: skip
    """Add signatures to those beside a file, whoever else does. `temp_dir`, `durable`, errors: as of `atomic_write`.

    In a store its lock is held.
    """
    target = sidecar_of(path)
    with locked_for_change(target, temp_dir), atomic_write(target, temp_dir, durable=durable) as file:
        file.write(merge(sidecar, read_sidecar(path), digest=digest))


@dataclass(frozen=True)
class Signers:
    """Whose signatures count: names by public key. `path` is where they are listed."""

    path: Path
    trusted: Mapping[str, str]
    revoked: Mapping[str, str]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.trusted, self.revoked)  # without the keys of a library

    @classmethod
    def change(cls, path: Path, change: Callable[[Signers], Signers], is_new: bool = False) -> Signers:
        """Read a list of signers, change and write it, while nobody else does. `is_new`: as of `read`.

        Raises:
            InputError: as `read` and `change`. StoreError: it cannot be written.
        """
        change(cls.read(path, is_new))  # a mistake is told before anything is made
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with locked_for_change(path):
            changed = change(cls.read(path))
            changed.write()
        return changed

    @classmethod
    def read(cls, path: Path, is_new: bool = False) -> Signers:
        """Read a list of signers. `is_new`: it need not be there yet.

        Raises:
            InputError: it is missing, not such a list, or others may write to it.
        """
        require_extra("signed", "a signature", "cryptography")
        try:
            mode = path.stat()
            text = read_file(path, _MAX_SIGNERS_BYTES).decode()
        except FileNotFoundError as error:
            if is_new:
                return cls(path, {}, {})
            raise InputError(f"{path}: no such list of signers; create one with pic store trust NAME KEY") from error
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not text"
            raise InputError(f"{path}: the list of signers cannot be read ({why})") from error
        if mode.st_uid not in (os.getuid(), 0) or mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InputError(f"{path}: other users can write to this list of signers; check it, then chmod go-w")
        trusted, revoked = dict[str, str](), dict[str, str]()
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            found = _SIGNER.fullmatch(line)
            if found is None:
                raise InputError(f"{path}:{number}: is not a signer; a line is [revoked] ed25519:KEY NAME")
            (revoked if found[1] else trusted)[found[2]] = found[3]
        return cls(path, {key: name for key, name in trusted.items() if key not in revoked}, revoked)

    def trust(self, name: str, key: str) -> Signers:
        """These and one more. Raises InputError: a key or name that is none, or is taken, or was revoked."""
        if not _SIGNER.fullmatch(f"{key} {name}") or len(name) > _MAX_NAME or not name.isprintable():
            raise InputError(f"trust {name} {key}: must be a name, and a key as ed25519:… (pic store sign)")
        if key in self.revoked:
            raise InputError(
                f"{key}: was revoked as {self.revoked[key]}; sign with a new key (pic store sign --signing-key=FILE)"
            )
        if name in {other for listed, other in self.trusted.items() if listed != key}:
            raise InputError(f"{name}: already names another key; choose another name, or revoke that key first")
        return Signers(self.path, {**self.trusted, key: name}, self.revoked)

    def revoke(self, name: str) -> Signers:
        """These without one, by its name or key, which stays listed as revoked. Raises InputError: no such signer."""
        keys = [key for key, own in self.trusted.items() if name in (key, own)]
        if not keys:
            raise InputError(f"{name}: no such signer in {self.path}; pic store trust lists them")
        kept = {key: own for key, own in self.trusted.items() if key not in keys}
        return Signers(self.path, kept, {**self.revoked, **{key: self.trusted[key] for key in keys}})

    def write(self) -> None:
        """Write the list, for its owner alone to change."""
        lines = [f"{key} {name}\n" for key, name in self.trusted.items()]
        lines += [f"revoked {key} {name}\n" for key, name in self.revoked.items()]
        _write_own(self.path, "".join(lines).encode(), 0o644)

    def signer_of(self, signed: Signed, sidecar: bytes) -> str | None:
        """The name of a trusted signer with a signature that holds; None if there is none."""
        for key, digest, signature in lines_of(sidecar):
            if key in self.trusted and digest == signed.digest and self._holds(key, signed.message, signature):
                return self.trusted[key]
        return None

    def _holds(self, key: str, message: bytes, signature: str) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._keys[key].verify(bytes.fromhex(signature), message)
        except InvalidSignature:
            return False
        return True

    @cached_property
    def _keys(self) -> dict[str, Any]:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        return {key: Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.partition(":")[2])) for key in self.trusted}


@dataclass(frozen=True)
class SigningKey:
    """A private key, from a file that only its owner may read."""

    path: Path
    _private: Any = field(repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).read, (self.path,)  # no private key travels: another process, or machine, reads its own

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """Raises InputError: it is missing, no Ed25519 key, or others may read it."""
        require_extra("signed", "a signature", "cryptography")
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            mode = path.stat()
            if mode.st_uid not in (os.getuid(), 0) or mode.st_mode & 0o077:
                raise InputError(
                    f"{path}: other users own or can read this private key; nothing was signed. If it may be "
                    "known, remove it, create a new one (pic store sign) and revoke this one; otherwise chmod 600"
                )
            private = load_pem_private_key(read_file(path, 1 << 16), None)
        except FileNotFoundError as error:
            raise InputError(f"{path}: no such private key; create one with pic store sign") from error
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, TypeError) as error:  # TypeError: it has a password
            raise InputError(f"{path}: is not a private key without a password; choose another") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise InputError(f"{path}: is not an Ed25519 key; create one with pic store sign")
        return cls(path, private)

    @classmethod
    def new(cls, path: Path) -> SigningKey:
        """Make a key. Raises InputError: there is one already."""
        require_extra("signed", "a signature", "cryptography")
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if os.path.lexists(path):
            raise InputError(f"{path}: already exists; remove it to create a new key, then sign again")
        private = Ed25519PrivateKey.generate()
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write_own(path, pem, 0o600)
        return cls(path, private)

    @property
    def public(self) -> str:
        return f"ed25519:{self._private.public_key().public_bytes_raw().hex()}"

    def sign(self, signed: Signed) -> bytes:
        """A sidecar with this key's signature."""
        return f"{self.public} {signed.digest} {self._private.sign(signed.message).hex()}\n".encode()


@dataclass(frozen=True)
class Trust:
    """Whose objects a store uses (None: anybody's), and the key that signs what is written to it, if there is one."""

    signers: Signers | None = None
    key: SigningKey | None = None

    @classmethod
    def open(cls, require_signed: str | None, signing_key: str | None) -> Trust | None:
        """What two settings say, each a file, `default`, or nothing. Raises InputError as reading them does."""
        if not require_signed and not signing_key:
            return None
        signers = Signers.read(path_of(require_signed, "signers")) if require_signed else None
        return cls(signers, SigningKey.read(path_of(signing_key, "signing-key")) if signing_key else None)

    @property
    def fields(self) -> dict[str, str | None]:
        """The two settings, with whole paths, for other processes."""
        files = {"require_signed": self.signers, "signing_key": self.key}
        return {name: None if file is None else str(file.path.absolute()) for name, file in files.items()}


def path_of(setting: str | None, name: str) -> Path:
    """The file that a setting names; the user's own one for none and `default`."""
    if setting not in (None, "", DEFAULT):
        return with_home(str(setting))
    home = os.environ.get("XDG_CONFIG_HOME") or with_home("~/.config")
    return Path(home, "pictool", name)


def require_signed_file(trust: Trust | None, path: Path) -> None:
    """Check that a whole file has a trusted signer, if one is required. Raises InputError."""
    signers = None if trust is None else trust.signers
    if signers is not None and signers.signer_of(Signed.of_file(path), read_sidecar(path)) is None:
        raise InputError(f"{path}: has no valid signature by a key in {signers.path}; sign it (pic store sign)")


def sign_file(key: SigningKey, path: Path) -> None:
    """Sign a whole file, beside it."""
    signed = Signed.of_file(path)
    write_sidecar(path, key.sign(signed), signed.digest)


def sign_object_file(key: SigningKey, path: Path, temp_dir: Path | None = None) -> None:
    """Sign an object that is whole, beside its file. `temp_dir`: that of the store which it is in.

    Raises:
        ObjectError: it is damaged. StoreError: the signature cannot be written.
    """
    with ObjectFile(path) as file:
        file.verify()
        signed = Signed.of_object(file)
    write_sidecar(path, key.sign(signed), signed.digest, temp_dir)


def _write_own(path: Path, data: bytes, mode: int) -> None:
    """Write a file in a directory that is the user's alone; never readable by more than `mode` says."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with atomic_write(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)

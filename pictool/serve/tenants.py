"""Tenants of a server and their bearer keys. A tenant's salt is part of the key of each of its objects."""

from __future__ import annotations

import hashlib
import ipaddress
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pictool.errors import InputError
from pictool.reading import read_file

OPERATOR = "operator"  # the tenant that may read the metrics of all
_MAX_BYTES = 1 << 20
_LEAST_KEY = 16  # characters
_FORM = "a line is TENANT KEY SALT (or - for none)"


@dataclass(frozen=True)
class Tenant:
    """`name` is for logs and queues, `salt` separates what it stores; "" shares the objects without a salt."""

    name: str
    salt: str = field(default="", repr=False)

    @property
    def id(self) -> str:
        """What leases and files are kept under: equal for equal salts, and tells nothing of them."""
        return hashlib.sha256(f"pictool tenant {self.salt}".encode(errors="surrogatepass")).hexdigest()[:32]


class Keys:
    """The tenants of bearer keys. Without any key, every request is one tenant's."""

    def __init__(self, tenants: Mapping[str, Tenant] | None = None, default: Tenant = Tenant("default")) -> None:
        self._tenants = {_digest(key): tenant for key, tenant in (tenants or {}).items()}
        self._default = default

    @property
    def are_required(self) -> bool:
        return bool(self._tenants)

    @property
    def tenants(self) -> frozenset[Tenant]:
        return frozenset(self._tenants.values()) or frozenset({self._default})

    def find(self, key: str | None) -> Tenant | None:
        """The tenant of a key; None for an unknown key. A digest is looked up, so timing reveals no key."""
        if not self._tenants:
            return self._default
        return None if key is None else self._tenants.get(_digest(key))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def read_keys(path: Path) -> Keys:
    """Read a file of keys: lines of `TENANT KEY SALT`, # comments. A tenant may have several keys of one salt.

    Raises:
        InputError: names the line and what is wrong, and nothing of a key or salt; or others may read the file.
    """
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise InputError(f"{path}: other users can read these keys; chmod 600 it first")
        text = read_file(path, _MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: the keys cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text; {_FORM}") from error
    tenants: dict[str, Tenant] = {}
    salts: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        problem = _problem(words, tenants, salts)
        if problem:
            raise InputError(f"{path}: line {number}: {problem}")
        name, key, salt = words
        salts[name] = salt
        tenants[key] = Tenant(name, "" if salt == "-" else salt)
    if not tenants:
        raise InputError(f"{path}: has no keys; {_FORM}")
    return Keys(tenants)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _problem(words: list[str], tenants: Mapping[str, Tenant], salts: Mapping[str, str]) -> str | None:
    """The problem with a line's words; None if they are valid."""
    if len(words) != 3:
        return f"has {len(words)} words; {_FORM}"
    name, key, salt = words
    if not all(map(str.isprintable, words)):
        return "has control characters"
    if len(key) < _LEAST_KEY:
        return f"the key of {name} has fewer than {_LEAST_KEY} characters; create one with: openssl rand -hex 32"
    if key in tenants:
        return f"{name} and {tenants[key].name} have the same key; each tenant needs its own"
    if salts.get(name, salt) != salt:
        return f"{name} has a different salt on an earlier line; a tenant has one"
    return None

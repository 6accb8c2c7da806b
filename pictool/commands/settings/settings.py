"""Settings: what the command line, the environment and `pic.yaml` say together, read once per invocation of `pic`."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pictool.commands.console.errors import UsageError
from pictool.commands.console.verbosity import note
from pictool.commands.settings.salt import with_salt
from pictool.commands.settings.types import parse_size
from pictool.errors import InputError
from pictool.reading import read_file, shown, with_home
from pictool.store.entries import DEFAULT_ROOT
from pictool.urls import without_credentials

FILE = "pic.yaml"
DEFAULT = "default"
SIGNED = ("require_signed", "signing_key")
_VARIABLES = {
    "model": "PIC_MODEL", "store": "PIC_STORE", "device": "PIC_DEVICE", "dtype": "PIC_DTYPE", "codec": "PIC_CODEC",
    "after": "PIC_AFTER",
    "max_size": "PIC_MAX_SIZE", "salt": "PIC_SALT", "salt_file": "PIC_SALT_FILE", "remote": "PIC_REMOTE",
    "algo": "PIC_ALGO", "memory": "PIC_MEMORY", "remote_rate": "PIC_REMOTE_RATE",
    "require_signed": "PIC_REQUIRE_SIGNED", "signing_key": "PIC_SIGNING_KEY",
    "separator": "PIC_SEPARATOR",
}  # fmt: skip
_MAY_BE_EMPTY = ("separator",)  # an empty variable is unset, but for these
_OTHER_VARIABLES = (
    "PIC_TRUST",
    "PIC_GPU_LAYERS",
    "PIC_GRAPHS",
    "PIC_ROUTER_SECRET",
    "PIC_UPSTREAM_KEY",
    "PIC_ENGINE_ENDS_WITH_PARENT",
)
# What earlier versions had: noted, and ignored.
GONE = {"server": "pic link links in its own process", "server_key": "pic link links in its own process"}
_TRUST = "PIC_TRUST"  # directories whose files are obeyed, whoever's they are
# Settings that say where texts and secrets go, and whose objects are used.
_STEERING = ("remote", "model", "store", "salt_file", "require_signed", "signing_key")
_SIZES = ("max_size", "memory", "remote_rate")
_TEXTS = ("head", "query_template", "separator")
_PATHS = (
    "store",
    "salt_file",
    "remote",
    "model",
    "require_signed",
    "signing_key",
)  # relative ones of a file are relative to it


@dataclass(frozen=True)
class Settings:
    """The settings of a command. The command line takes precedence over the environment, which does over `pic.yaml`.

    Fields:
        model: `transformers` directory, hub name, `embedded`, `embedded-small`, or GGUF file (`FILE.gguf`,
            `ollama:NAME`, `lmstudio:NAME`, `smollm2`); by default `embedded`.
        store: directory of objects; by default `.pic`.
        device: `cpu`, `cuda` (ROCm too), `cuda:1`, `xpu` or `mps`; `auto` is torch's accelerator, else the CPU.
        dtype: `float32`, `bfloat16` or `float16`; `auto` is float32 on a CPU, the checkpoint's dtype on CUDA.
        head: the system message of a chat model; for other models text before the documents.
        query_template: the text after the documents; contains `{query}`. By default `Question: {query}`,
            a line break, `Answer:`.
        separator: the text between documents and before the query, less what is there already; by default a blank
            line, or what the model's `tokenizer_config.json` says (`document_separator`). An empty text joins them.
        max_size: size limit of the store, as `10G` or `2GiB`; by default none.
        after: what documents are compiled after, as `--after`; by default `previous`. `pic eval`, `tune`, `bench` and
            `doctor` take the default.
        codec: how the KV of documents is stored. `pic eval` and `pic tune` read only the option.
        algo: the policy, as `prophet-20`, of `pic ask`, `pic link`, `pic query` and `pic serve`; by default `auto`.
            `pic tune` writes it.
        salt: a tenant's secret text, part of every key. Never shown.
        remote: URL of a store to fetch missing objects from; an empty text turns it off.
        memory: host memory for layers that links of one process share, as `2G`.
        remote_rate: bytes a second below which a transfer from the remote is given up; by default 8K.
        require_signed: a list of signers, or `default` (`~/.config/pictool/signers`): an object that none of them
            signed is absent. An empty text turns it off.
        signing_key: a private key, or `default` (`~/.config/pictool/signing-key`), that signs each object which is
            compiled.
        salt_file: a file that holds the salt.
        strange_file: the file, if it is neither trusted nor below the home directory (`_read_trusted`).
        origins: where a setting comes from: an option, an environment variable or a file. Others have their default.
    """

    model: str | None = None
    store: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    head: str | None = None
    query_template: str | None = None
    separator: str | None = None
    max_size: int | None = None
    codec: str = "none"
    after: str = "previous"
    algo: str | None = None
    salt: str = field(default="", repr=False)
    remote: str | None = None
    memory: int = 0
    remote_rate: int | None = None
    require_signed: str | None = None
    signing_key: str | None = None
    strange_file: str | None = field(default=None, compare=False, repr=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def override(self, **options: str | None) -> Settings:
        """These settings with options of the command line before them; None is an option that was not used.

        Raises:
            UsageError: a value that makes no sense.
        """
        used = {name: value for name, value in options.items() if value is not None}
        origins = {name: f"--{name.replace('_', '-')}" for name in used}
        used = with_salt(used, "--salt", "--salt-file")
        for name, value in used.items():
            if problem := _problem(name, value):
                raise UsageError(f"{origins[name]} {without_credentials(value)}: {problem}")
        expanded = {name: _expanded(name, value) for name, value in used.items()}
        origins |= {"salt": origins.pop("salt_file")} if "salt_file" in origins else {}
        return replace(self, **expanded, origins={**self.origins, **origins})  # type: ignore[arg-type]

    def check_strange_file(self) -> None:
        """Say what a file outside of the user's own directories names.

        Raises:
            InputError: it names a remote by a URL, which credentials or a salt would follow.
        """
        file = self.strange_file
        if file is None:
            return
        if self.remote and "://" in self.remote and self.origin("remote") == file:
            raise InputError(
                f"{file}: sets the remote {without_credentials(self.remote)}, but is outside your home directory; "
                f"if the file is yours, set {_TRUST} to its directory, or set PIC_REMOTE yourself"
            )
        used = [name for name in _STEERING if self.origin(name) == file]
        if used:
            note(f"using {', '.join(used)} from {file}, which is outside your home directory ({_TRUST})")

    def option(self, name: str) -> str | None:
        """A setting as the command line says it; None if it does not."""
        return getattr(self, name) if self.origin(name).startswith("--") else None

    def origin(self, name: str) -> str:
        """Who says a setting."""
        return self.origins.get(name, DEFAULT)


def read_settings() -> Settings:
    """The settings of the environment, and of `pic.yaml` in the working directory or the nearest one above that has it.

    Raises:
        InputError: a file that cannot be used, or a value that makes no sense; it names the file or the variable.
    """
    of_file, path, strange_file = {}, find_file(), None
    if path is not None:
        of_file = _file_settings(path)
        if not _is_trusted(path):
            strange_file = str(path)
            _require_own(path, [name for name in _STEERING if of_file.get(name)])
    _note_unknown_variables()
    named = {
        name: os.environ[key]
        for name, key in _VARIABLES.items()
        if os.environ.get(key) or (name in _MAY_BE_EMPTY and key in os.environ)
    }
    origins = {name: str(path) for name in of_file} | {name: _VARIABLES[name] for name in named}
    of_file = with_salt(of_file, f"{path}: salt", "salt_file")
    values: dict[str, Any] = of_file | with_salt(named, _VARIABLES["salt"], _VARIABLES["salt_file"])
    if "salt_file" in origins:
        origins["salt"] = origins.pop("salt_file")
    for name, value in values.items():
        if problem := _problem(name, value):
            raise InputError(f"{origins[name]}: {name} {without_credentials(value)!r}: {problem}")
        values[name] = parse_size(f"{origins[name]}: {name}", value) if name in _SIZES else _expanded(name, value)
    return Settings(**values, strange_file=strange_file, origins=origins)


def _is_trusted(path: Path) -> bool:
    """Whether a file is below a directory of PIC_TRUST, or is the user's own, below the home directory, and written by
    nobody else.
    """
    resolved = path.resolve()
    trusted = [with_home(name).resolve() for name in os.environ.get(_TRUST, "").split(os.pathsep) if name]
    if any(resolved.is_relative_to(directory) for directory in trusted):
        return True
    home = with_home("~")
    return _stranger(path) is None and resolved.is_relative_to(home.resolve())


def _stranger(path: Path) -> str | None:
    """Why a file may say what its user never wrote; None if only the user, or root, writes it."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        return "belongs to another user"
    return "is writable by everyone" if status.st_mode & stat.S_IWOTH else None


def _require_own(path: Path, names: Sequence[str]) -> None:
    """Refuse what says where texts and secrets go, in a file that another user may have written. Raises InputError."""
    if names and (why := _stranger(path)):
        raise InputError(
            f"{path}: {why}, and sets {', '.join(names)}; check the file, then set "
            f"{_TRUST}={path.resolve().parent} to trust it"
        )


def _note_unknown_variables() -> None:
    for name, why in GONE.items():
        if f"PIC_{name.upper()}" in os.environ:
            note(f"PIC_{name.upper()}: is no longer a setting and is ignored; {why}")
    known = (*_VARIABLES.values(), *_OTHER_VARIABLES)
    for name in sorted(os.environ):
        if name.startswith("PIC_") and name not in known and name.removeprefix("PIC_").lower() not in GONE:
            near = difflib.get_close_matches(name, known, 1)
            note(f"{name}: unknown variable{f'; did you mean {near[0]}?' if near else ''}")


def variable(name: str) -> str | None:
    """The variable of the environment that says a setting, if there is one."""
    return _VARIABLES.get(name)


def find_file() -> Path | None:
    """`pic.yaml` here, or in the nearest directory above that has one of this user's (or root's); None: nowhere.

    One of another user above is not read: who may write to a directory above, as /tmp, says nothing here.
    """
    if os.path.lexists(FILE):
        return Path(FILE)
    here = Path.cwd()
    for above in here.parents:
        path = above / FILE
        if path.is_file() and path.stat().st_uid in (os.getuid(), 0):
            return Path(os.path.relpath(path))
    return None


def setting_keys() -> tuple[str, ...]:
    """The keys of `pic.yaml`."""
    return (*(field.name for field in fields(Settings) if field.name not in ("strange_file", "origins")), "salt_file")


def _file_settings(path: Path) -> dict[str, Any]:
    """What a file says, its relative paths as the working directory has them."""
    values = {name: text_or_none(path, name, value) for name, value in read_yaml(path, setting_keys()).items()}
    for name in GONE.keys() & values.keys():
        note(f"{path}: {name}: is no longer a setting and is ignored; {GONE[name]}")
        del values[name]
    said = {name: value for name, value in values.items() if value is not None}
    if path.parent == Path():
        return said
    return {"store": DEFAULT_ROOT} | {
        name: _beside(path, name, value) if name in _PATHS else value
        for name, value in ({"store": DEFAULT_ROOT} | said).items()
    }


def _beside(path: Path, name: str, value: str) -> str:
    """A path in a file elsewhere. A URL stays, and so does the name of a model that is no directory there."""
    if not value or "://" in value or value.startswith("~") or (name in SIGNED and value == DEFAULT):
        return value
    joined = os.path.normpath(path.parent / value)
    return value if name == "model" and not Path(joined).is_dir() else joined


def _problem(name: str, value: str) -> str | None:
    """What is wrong with a setting that is one of several names; None if nothing is."""
    if name == "codec":
        from pictool.store.codecs import codecs

        return None if value in codecs() else f"must be one of {', '.join(codecs())}"
    if name == "after":
        from pictool.compiler.contexts import NAMES

        return None if value in NAMES else f"must be one of {', '.join(NAMES)}"
    if name in _TEXTS:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"invalid UTF-8 at character {error.start}; convert it first"
    if name in ("device", "dtype"):
        from pictool.runtime.device import device_problem, dtype_problem

        return device_problem(value) if name == "device" else dtype_problem(value)
    return None


def _expanded(name: str, value: str) -> str:
    """A path with the home directory in place of `~`, as shells have it; other settings stay."""
    return str(with_home(value)) if name in _PATHS and value.startswith("~") else value


def read_yaml(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """A YAML mapping with no other keys than `keys`, and those of earlier versions; an empty file is an empty one.

    Raises:
        InputError: unreadable, too large, not YAML, aliases, a key twice, not a mapping, or an unknown key.
    """
    from pictool import strict_yaml

    try:
        data = strict_yaml.load(read_file(path, strict_yaml.MAX_BYTES))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); it must be a YAML file") from error
    except Exception as error:  # YAMLError; PyYAML raises others too where a tag and a value do not go together
        raise InputError(f"{path}: is not usable YAML ({strict_yaml.problem(error)}); correct it") from error
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be a mapping with the keys {', '.join(keys)}")
    if unknown := [key[:80] if isinstance(key, str) else shown(key) for key in data if key not in (*keys, *GONE)]:
        raise InputError(f"{path}: unknown key {', '.join(unknown)[:200]}; known keys: {', '.join(keys)}")
    return dict(data)


def text_or_none(path: Path, key: str, value: Any) -> str | None:
    """A value of a YAML file that must be a text."""
    if value is not None and not isinstance(value, str):
        raise InputError(f"{path}: {key} must be a string; put it in quotes")
    if value is not None and ("\0" in value or any("\ud800" <= character <= "\udfff" for character in value)):
        raise InputError(f"{path}: {key} contains an invalid character (a null byte or an unpaired surrogate)")
    return value

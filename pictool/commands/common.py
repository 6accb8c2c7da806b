"""What several commands need: opening model and store, refusing what makes no sense, printing."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pictool.commands.config import setting
from pictool.commands.units import parse_size
from pictool.errors import InputError, PicError
from pictool.store.remote import Remote
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_remotes: WeakSet[Remote] = WeakSet()  # of the stores that were opened


class UsageError(PicError):
    """Options that make no sense together, whatever the files hold."""

    exit_code = 2


def open_store(root: str | None, remote: str | None = None) -> Store:
    """The store that is named, with its budget, its remote (an empty text is none) and its host memory."""
    size, memory = setting("max_size", None, "PIC_MAX_SIZE"), setting("memory", None, "PIC_MEMORY")
    store = Store(
        setting("store", root, "PIC_STORE"), None if size is None else parse_size("max_size", size),
        remote=setting("remote", remote, "PIC_REMOTE") or None,
        memory_bytes=0 if memory is None else parse_size("memory", memory), on_warning=note,
    )  # fmt: skip
    if store.root.exists() and not store.root.is_dir():
        raise InputError(f"{store.root}: is no directory, so no store; name another with --store")
    if store.remote is not None:
        _remotes.add(store.remote)
    return store


def cancel_fetching() -> None:
    """Give up what opened stores are fetching, so that the process does not wait for it. Later stores do fetch."""
    for remote in list(_remotes):
        remote.cancel()


def codec_setting(given: str | None) -> str:
    """How KV is kept: as given, else by `PIC_CODEC` or `pic.yaml`, else as it is."""
    return setting("codec", given, "PIC_CODEC") or "none"


def open_model(name: str | None, device: str | None, dtype: str | None, salt: str | None = None) -> Model:
    quiet_libraries()
    from pictool.runtime.model import load_model

    return load_model(
        setting("model", name, "PIC_MODEL"),
        setting("device", device, "PIC_DEVICE") or "auto",
        setting("dtype", dtype, "PIC_DTYPE") or "auto",
        setting("salt", salt, "PIC_SALT") or "",
    )


def quiet_libraries() -> None:
    """No progress bars or advice of the libraries underneath; their errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def note(text: str) -> None:
    """A line for the user on stderr."""
    print(f"pic: {text}", file=sys.stderr)


def to_json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False)


def print_json(data: Any) -> None:
    print(to_json(data))


def require_text(what: str, text: str) -> str:
    """The text, if it is Unicode; an argument or a YAML escape can smuggle in half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what}: is not UTF-8 text at character {error.start}; convert it first") from error
    return text

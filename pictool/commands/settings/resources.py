"""Opening what the settings name: the store and the model."""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import cache
from typing import TYPE_CHECKING

from pictool.commands.console.errors import fetching
from pictool.commands.console.verbosity import detail, note, waiting
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError, PicError, StoreError, UnreadableObjectError
from pictool.urls import without_credentials

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.store import Store


def open_store(settings: Settings) -> Store:
    """The store with its budget, its remote and its host memory; warnings are notes on stderr."""
    from pictool.store.remote.remote import MIN_RATE, Remote
    from pictool.store.signatures import Trust
    from pictool.store.store import Store

    note_logs()
    remote = Remote(settings.remote, min_rate=settings.remote_rate or MIN_RATE) if settings.remote else None
    store = Store(
        settings.store, settings.max_size, remote=remote, memory_bytes=settings.memory,
        on_warning=note, trust=Trust.open(settings.require_signed, settings.signing_key),
    )  # fmt: skip
    if store.root.exists() and not store.root.is_dir():
        raise InputError(f"{store.root}: is not a directory; choose another store with --store")
    if store.remote is not None:
        fetching.add(store)
    far = f", remote {without_credentials(settings.remote)} ({settings.origin('remote')})" if settings.remote else ""
    detail(f"store {store.root} ({settings.origin('store')}){far}")
    return store


def open_existing(settings: Settings) -> Store:
    """The store, which is there.

    Raises:
        StoreError: it is not.
    """
    store = open_store(settings)
    if not store.root.exists():
        raise StoreError(f"{store.root}: no such store; choose another with --store, or create one with pic compile")
    return store


def find_intact(store: Store, chains: bool) -> list[str]:
    """The keys of all objects but those whose headers are damaged, which are named.

    Raises:
        UnreadableObjectError: whether one is damaged is not known.
    """
    keys = []
    for entry in store.objects(chains=chains):
        try:
            if entry.problem is not None:
                store.peek_any(entry.key).close()
            keys.append(entry.key)
        except UnreadableObjectError:
            raise
        except PicError as error:
            note(f"skipped: {error}")
    return keys


def note_logs() -> None:
    """Show what the store logs as notes: that a directory of an earlier version is marked now."""
    logger, handler = logging.getLogger("pictool.store"), logging.Handler()
    handler.emit = lambda record: note(record.getMessage())  # type: ignore[method-assign]
    logger.handlers, logger.propagate = [handler], False  # some libraries install handlers of all loggers


def open_model(settings: Settings, engine: str | None = None) -> Model:
    """The model, for the engine that is named; its weights are loaded when they are needed."""
    from pictool.engines import DEFAULT, engine_name
    from pictool.runtime.gguf import is_gguf
    from pictool.runtime.model import require_name

    began = time.perf_counter()
    require_name(settings.model)
    with waiting("loading transformers"):
        quiet_libraries()
        from pictool.runtime.model import load_model
    if is_gguf(settings.model) and engine_name(settings.model, engine) != DEFAULT:
        from pictool.engines.llamacpp.model import open_gguf

        name = settings.model or ""
        model: Model = open_gguf(name, settings.device, settings.dtype, settings.salt, on_wait=waiting)
    else:
        with waiting("opening the model"):
            model = load_model(settings.model, settings.device, settings.dtype, settings.salt)
        model.on_wait = waiting
    model.on_note = cache(note)  # a text may be read more than once
    if settings.separator is not None:
        model.separator = settings.separator
    where = ", ".join(map(str, model.files)) or "in memory"
    opened_s = time.perf_counter() - began
    detail(
        f"model {model.name} ({settings.origin('model')}): {where}, {model.device}, {model.dtype}, "
        f"opened in {opened_s:.1f} s"
    )
    return model


def quiet_libraries() -> None:
    """Turn off progress bars and advice of the libraries underneath; their errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    shows_downloads = "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ and sys.stderr.isatty()
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()  # and those of downloads with it
    if shows_downloads:
        enable_progress_bars()

"""Temporary: what inspect, diff and tui still call."""

from __future__ import annotations

from pictool.commands.errors import UsageError as UsageError
from pictool.commands.outputs import note as note
from pictool.commands.outputs import print_json as print_json
from pictool.commands.resources import open_model as _open_model
from pictool.commands.resources import open_store as _open_store
from pictool.commands.settings import read_settings


def open_store(root, remote=None):
    return _open_store(read_settings().override(store=root, remote=remote))


def open_model(name, device, dtype, salt=None):
    return _open_model(read_settings().override(model=name, device=device, dtype=dtype, salt=salt))

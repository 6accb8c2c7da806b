"""What `pic tui` remembers of its user: the theme.

$XDG_CONFIG_HOME/pictool/tui.json (~/.config if it is not set), a JSON object with the field `theme`. A file that cannot
be used is ignored, with one note, and written anew once another theme is chosen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pictool.errors import StoreError
from pictool.escapes import to_json
from pictool.reading import parse_json, read_file
from pictool.store.files import atomic_write

_MAX_BYTES = 1 << 16


@dataclass
class Preferences:
    """The remembered theme (None: none), where it is kept (None: nowhere), and why that could not be read."""

    path: Path | None = None
    theme: str | None = None
    problem: str = ""

    @classmethod
    def read(cls, path: Path | None) -> Preferences:
        """Read the file, if there is one."""
        if path is None or not os.path.lexists(path):
            return cls(path)
        try:
            data = parse_json(read_file(path, _MAX_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            return cls(path, None, f"{path}: cannot be used ({_reason(error)}), and is ignored")
        theme = data.get("theme") if isinstance(data, dict) else None
        if not isinstance(theme, str):
            return cls(path, None, f"{path}: must be a JSON object with the name of a theme, and is ignored")
        return cls(path, theme)

    def remember_theme(self, theme: str) -> None:
        """Write the theme's name to the file, for the next time.

        Raises:
            StoreError: it cannot be written.
        """
        if theme == self.theme:
            return
        self.theme = theme
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self.path.parent}: cannot be made ({error.strerror}); no theme is remembered"
            ) from error
        with atomic_write(self.path) as file:
            file.write(to_json({"theme": theme}).encode() + b"\n")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def preferences_path() -> Path | None:
    """The file of this user, by the XDG base directory specification; None for one without a home."""
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        directory = named if named.is_absolute() else Path.home() / ".config"
    except RuntimeError:
        return None
    return directory / "pictool" / "tui.json"

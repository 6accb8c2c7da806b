"""The keys at the bottom of a screen: as many as fit, none of them cut."""

from __future__ import annotations

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

_SPACES = 3  # before, within and after a key and its description


class KeyFooter(Footer):
    """Textual's footer, without the keys that there is no room for; `?` lists them all."""

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)

    def compose(self) -> ComposeResult:
        room = self.app.size.width
        for key in super().compose():
            if isinstance(key, FooterKey):
                room -= cell_len(key.key_display) + cell_len(key.description) + _SPACES
            if room >= 0:
                yield key

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.recompose)

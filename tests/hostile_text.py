"""Names and texts that try to steer a terminal, and to be read as markup; and how to see that they did not."""

from __future__ import annotations

import re

ESCAPES = "\x1b]52;c;aGk=\x07\x1b[8m\x9b2J\r\b\x7f\u202e\u2066\u200b\ufeff\U000e0041\ud800"
MARKUP = "[red]a[/][link=http://x.y]b[/link][@click=app.quit]c[/][/nope] :smile: $\\frac{$"
HOSTILE = f"{MARKUP} {ESCAPES}"
NAME = "[red]\x1b[8m\x9b2J\u202e\r[@click=app.quit].txt"  # of a file
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u180e\u200b\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
    "|[\ud800-\udfff]"
)


def steering(text: str) -> list[str]:
    """The characters that steer or hide in what was sent to a terminal, but for styles and line ends of our own."""
    assert "\x1b[8m" not in text, "a style of a text's own"
    return _STEERING.findall(_STYLE.sub("", text))

"""Numbers, sizes and times in sentences."""

from __future__ import annotations


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things: `1 chunk`, `2 chunks`."""
    return f"{number:,d} {noun if number == 1 else plural or noun + 's'}"


def show_size(num_bytes: int) -> str:
    """For people: 1.5 GB."""
    size = float(num_bytes)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def show_age(seconds: float) -> str:
    """For people: 5s, 12m, 3h, 9d, 2y; less than a second, or a time to come, is `now`."""
    for least, unit, name in ((365 * 86400, 365 * 86400, "y"), (86400, 86400, "d"), (3600, 3600, "h"), (60, 60, "m")):
        if seconds >= least:
            return f"{seconds / unit:.0f}{name}"
    return f"{seconds:.0f}s" if seconds >= 1 else "now"

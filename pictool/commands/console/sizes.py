"""Sizes and ages as people write them: 10G, 500MiB, 30d."""

from __future__ import annotations

import re

from pictool.errors import InputError

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZES |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("KMGT", 1)}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"


def parse_size(option: str, text: str) -> int:
    """Bytes: 10G and 10GB are 10·10⁹, 10Gi and 10GiB are 10·2³⁰, 10B is 10. Only 0 needs no unit.

    Raises:
        InputError: names the option.
    """
    if match := re.fullmatch(_NUMBER + r" ?(?:([KMGT]i?)B?|B)?", text.strip(), re.ASCII | re.IGNORECASE):
        unit = "" if match[2] is None else match[2][:1].upper() + match[2][1:].lower()
        if unit or text.strip().upper().endswith("B") or float(match[1]) == 0:
            return int(float(match[1]) * _SIZES[unit])
    raise InputError(f"{option} {text!r}: must be a size such as 500M, 10G or 2GiB; a unit is needed")


def parse_age(option: str, text: str) -> float:
    """Seconds: 90s, 10m, 12h, 30d, 2w."""
    if match := re.fullmatch(_NUMBER + r" ?([smhdw])", text.strip(), re.ASCII):
        return float(match[1]) * _AGES[match[2]]
    raise InputError(f"{option} {text!r}: must be an age such as 90s, 12h, 30d or 2w")


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

"""What `router` and its user share in one process: Ray copies the router's own module."""

from __future__ import annotations

from collections import Counter

order = "residency"  # or "round robin", "two choices"
calls = Counter[str]()  # that were sent, by replica
choose_s: list[float] = []  # seconds of each choice

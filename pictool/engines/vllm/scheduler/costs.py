"""Whether a link is expected to be slower than a prefill of its tokens, by what this server has measured."""

from __future__ import annotations

import time
from collections import deque
from statistics import median, quantiles

_MOST_SIZES = 256  # policies and sizes that are remembered
_LINKS, _LEAST_LINKS = 8, 3  # of a policy and size: the last ones, and how many must be known
_STEPS, _LEAST_STEPS = 64, 8  # likewise of steps
_PREFILL = 32  # tokens of a step, from which on it is mostly a prefill
_AGAIN = 16  # of so many declined requests one is linked, so that a faster disk, or a less busy device, is noticed


class LinkCosts:
    """Seconds a token of links, by policy and size, and of ordinary prefills.

    A prefill's is the lower quartile of those of the last steps without links: pauses between steps do not count.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[str, int], deque[float]] = {}
        self._declined: dict[tuple[str, int], int] = {}
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._last: tuple[float, int] | None = None  # when the last step began, and its tokens, if it had no links

    def begin_step(self, tokens: int, has_links: bool) -> None:
        """A step of the engine begins, and so the last one has ended."""
        now = time.perf_counter()
        if self._last is not None:
            began, last_tokens = self._last
            self._steps.append((now - began) / last_tokens)
        self._last = (now, tokens) if tokens >= _PREFILL and not has_links else None

    def linked(self, policy: str, tokens: int, seconds: float) -> None:
        """A link of so many tokens was loaded, and its rows computed."""
        if len(self._links) >= _MOST_SIZES:
            self._links.clear()
        self._links.setdefault((policy, tokens.bit_length()), deque(maxlen=_LINKS)).append(seconds / tokens)

    def declines(self, policy: str, tokens: int) -> bool:
        """Whether links of this policy and about this size were slower than prefills; not so in one of 16 cases."""
        size = (policy, tokens.bit_length())
        links = self._links.get(size, ())
        if len(links) < _LEAST_LINKS or len(self._steps) < _LEAST_STEPS or median(links) <= quantiles(self._steps)[0]:
            return False
        self._declined[size] = self._declined.get(size, 0) + 1
        if self._declined[size] < _AGAIN:
            return True
        self._declined[size] = 0
        return False

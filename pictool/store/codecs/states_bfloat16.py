from __future__ import annotations

from typing import ClassVar

from pictool.store.codecs.none import Uncoded


class StatesBFloat16(Uncoded):
    """Keys and values as they are; the recurrent states of a hybrid's linear layers rounded to bfloat16."""

    name: ClassVar[str] = "states_bfloat16"
    is_lossless: ClassVar[bool] = False
    state_dtype: ClassVar[str] = "bfloat16"

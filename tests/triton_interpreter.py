"""Triton's interpreter, made to run beside the numpy that we have."""

from __future__ import annotations

import os
from typing import Any


def allow_numpy_2_4() -> None:
    """Triton's interpreter (3.6 to 3.7) takes int() of an array of one number, which numpy 2.4 refuses."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched

"""Evaluation: datasets of cases, the metrics that score their answers, and runs that can be continued."""

from __future__ import annotations

import importlib.util

from pictool.errors import InputError

EXTRA = ("rouge_score", "scipy")  # packages of the extra `eval`: ROUGE-L, and bootstrap intervals


def require_extra(*packages: str) -> None:
    """Refuse what needs packages of the extra `eval` that are not installed.

    Raises:
        InputError: names the first one, and how to install it.
    """
    for package in packages or EXTRA:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"evaluations need {package}, which is not installed; pip install 'pictool[eval]'")

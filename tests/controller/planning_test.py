"""The share of rows of policies without a ratio: it must not depend on what documents say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from serve.live import tiny_model

from pictool.controller.cost import PromptSize
from pictool.controller.planning import static_share
from pictool.errors import InputError
from pictool.linker.policies.base import Needs, Policy, Prompt, Selection, no_rows


@dataclass(frozen=True)
class FromTables(Policy):
    """A policy of somebody else that reads tables, and has no ratio."""

    name: ClassVar[str] = "from-tables"
    reference: ClassVar[str] = "nowhere"

    @property
    def needs(self) -> Needs:
        return Needs(tables=True)

    def select(self, prompt: Prompt) -> Selection:
        return Selection(no_rows(prompt.layout))


def test_rows_that_depend_on_the_documents_are_not_planned() -> None:
    with pytest.raises(InputError, match="the rows of from-tables depend on the content of documents and prompts"):
        static_share(tiny_model(), FromTables(), PromptSize(context=400, tail=10, objects=4, token_bytes=8))

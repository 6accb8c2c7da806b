"""The user's own prompts for the server's start-up check: `pic tune` leaves a few in the store, cut short.

`STORE/check.json` is `{"prompts": [{"documents": [TEXT, …], "query": TEXT, "head": TEXT|null, "query_template":
TEXT|null, "separator": TEXT|null}, …]}`. The documents are the beginnings of those that were tuned on, so that a start
takes no longer than with the prompts that pictool makes up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pictool.errors import InputError
from pictool.reading import parse_json, read_file
from pictool.store.directory import ensure_store
from pictool.store.files import atomic_write

FILE = "check.json"
_PROMPTS, _DOCUMENTS, _CHARACTERS = 4, 4, 400
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class SamplePrompt:
    """A question over texts. `head`, `query_template` and `separator` as of a spec."""

    documents: tuple[str, ...]
    query: str
    head: str | None = None
    query_template: str | None = None
    separator: str | None = None

    def cut(self) -> SamplePrompt:
        """The same over the beginnings of a few of its texts; of a single text, over its first pieces."""
        texts = list(self.documents[:_DOCUMENTS])
        if len(texts) == 1:
            (text,) = texts
            texts = [text[start : start + _CHARACTERS] for start in range(0, _DOCUMENTS * _CHARACTERS, _CHARACTERS)]
        pieces = tuple(piece for text in texts if (piece := _beginning(text)).strip())
        return SamplePrompt(pieces, self.query, self.head, self.query_template, self.separator)


def keep_sample(root: Path, prompts: Iterable[SamplePrompt]) -> None:
    """Keep the first prompts in a store. Those of fewer than two pieces, and of long questions, are left out.

    Raises:
        StoreError: the store cannot be written.
    """
    cut = (prompt.cut() for prompt in prompts)
    fitting = (prompt for prompt in cut if len(prompt.documents) > 1 and _frame_length(prompt) <= 2 * _CHARACTERS)
    data = {"prompts": [asdict(prompt) for prompt in islice(fitting, _PROMPTS)]}
    ensure_store(root)
    with atomic_write(root / FILE, root / "tmp") as file:
        file.write(json.dumps(data, ensure_ascii=False, indent=1).encode())


def read_sample(root: Path) -> list[SamplePrompt]:
    """The prompts that a store keeps; none if nothing was tuned there.

    Raises:
        InputError: the file is damaged.
    """
    path = root / FILE
    try:
        data = parse_json(read_file(path, _MAX_BYTES))
        return [_prompt(entry) for entry in data["prompts"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or f"is not what pic tune writes there ({error})"
        raise InputError(f"{path}: {problem}; run pic tune again, or remove it") from error


def _prompt(entry: dict[str, Any]) -> SamplePrompt:
    prompt = SamplePrompt(tuple(entry["documents"]), entry["query"], entry["head"], entry["query_template"])
    prompt = replace(prompt, separator=entry.get("separator"))  # files before 0.4.0 have none
    texts = [*prompt.documents, prompt.query, prompt.head or "", prompt.query_template or "", prompt.separator or ""]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a prompt has something that is no text")
    "".join(texts).encode()  # a half of a surrogate pair is a ValueError
    return prompt


def _beginning(text: str) -> str:
    """At most so many characters, to the end of a word if one ends there."""
    if len(text) <= _CHARACTERS:
        return text
    cut = text[:_CHARACTERS]
    words = cut.rstrip().rsplit(maxsplit=1)
    return words[0] if len(words) > 1 else cut


def _frame_length(prompt: SamplePrompt) -> int:
    return len(prompt.query) + len(prompt.head or "") + len(prompt.query_template or "") + len(prompt.separator or "")

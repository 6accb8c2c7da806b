"""Link scripts (`-T script.yaml`): a whole prompt as a file.

head: "You answer from the documents."      # optional
documents: [docs/a.txt, docs/b.kvo]         # paths are relative to the script
query: "Which festival does Gadwick hold?"
query_template: "Question: {query}\\nAnswer:"   # optional
policy: {algo: legolink, k: 16}             # optional; any field of the policy
max_new_tokens: 32                          # optional
codec: int8                                 # optional: how the KV of documents given as texts is kept
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pictool.commands.config import read_yaml, text_or_none
from pictool.errors import InputError
from pictool.store.codecs import codecs

_KEYS = ("head", "documents", "query", "query_template", "policy", "max_new_tokens", "codec")


@dataclass(frozen=True)
class LinkScript:
    """What a link script says; None where it is silent."""

    head: str | None = None
    documents: tuple[str, ...] = ()
    query: str | None = None
    query_template: str | None = None
    algo: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    codec: str | None = None


def read_script(path: Path) -> LinkScript:
    """Read a link script.

    Raises:
        InputError: names the script, the key, and what it must be.
    """
    data = read_yaml(path, _KEYS)
    documents = data.get("documents") or []
    if not isinstance(documents, list) or not all(isinstance(one, str) for one in documents):
        raise InputError(f"{path}: documents must be a list of paths or keys")
    policy = data.get("policy") or {}
    if isinstance(policy, str):
        policy = {"algo": policy}
    if policy and (not isinstance(policy, Mapping) or not isinstance(policy.get("algo"), str)):
        raise InputError(f"{path}: policy must be a name, or a mapping with algo and the policy's fields")
    new_tokens = data.get("max_new_tokens")
    if new_tokens is not None and (type(new_tokens) is not int or new_tokens < 1):
        raise InputError(f"{path}: max_new_tokens must be a whole number above 0")
    texts = {key: text_or_none(path, key, data.get(key)) for key in ("head", "query", "query_template", "codec")}
    if texts["codec"] is not None and texts["codec"] not in codecs():
        raise InputError(f"{path}: codec {texts['codec']!r} must be one of {', '.join(codecs())}")
    params = {name: value for name, value in policy.items() if name != "algo"}
    found = tuple(_beside(path, one) for one in documents)
    return LinkScript(documents=found, algo=policy.get("algo"), params=params, max_new_tokens=new_tokens, **texts)


def _beside(script: Path, document: str) -> str:
    """A document's path, relative to the script; what is no file there is left as it is (a key)."""
    joined = os.path.normpath(script.parent / document)
    looks_like_file = "/" in document or "." in document
    return joined if looks_like_file or os.path.exists(joined) else document

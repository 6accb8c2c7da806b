"""YAML that a person wrote (settings, span queries), read within bounds.

A few lines of aliases and merge keys stand for gigabytes, or for themselves: an alias counts as all that it stands for,
and where a file has no use for them they are refused. Keys that come twice are, too, of which YAML libraries keep one.
Tags that make Python objects are refused by PyYAML's safe loader.
"""

from __future__ import annotations

from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
_MAX_DEPTH = 20
_MAX_DIGITS = 1000  # of a number; one of more takes long to convert, and no setting has one


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds. It is the one written in Python: libyaml's cannot be bounded.

    `max_nodes`: as if each alias were written out, so no merge gives a mapping more keys. `sizes`: of anchored nodes.
    """

    num_nodes = depth = 0

    def __init__(self, text: str, max_nodes: int, max_depth: int | None, has_aliases: bool) -> None:
        super().__init__(text)
        self.max_nodes, self.max_depth, self.has_aliases = max_nodes, max_depth, has_aliases
        self.sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = cast(Any, self.peek_event())  # type: ignore[no-untyped-call]
        before, mark = self.num_nodes, event.start_mark
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and not self.has_aliases:
            raise ConstructorError(None, None, "aliases (*) are not supported; write the value out", mark)
        if is_alias and event.anchor in self.anchors and event.anchor not in self.sizes:
            raise ConstructorError(None, None, f"the alias *{event.anchor[:40]} is within its own anchor", mark)
        self.num_nodes += self.sizes.get(event.anchor, 1) if is_alias else 1
        self.depth += 1
        if self.num_nodes > self.max_nodes or (self.max_depth is not None and self.depth > self.max_depth):
            raise ConstructorError(None, None, "has too many values, or is nested too deeply", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if not is_alias and isinstance(node, yaml.MappingNode):
            _require_unique(node)
        if not is_alias and event.anchor is not None:
            self.sizes[event.anchor] = self.num_nodes - before
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > _MAX_DIGITS:
            raise ConstructorError(None, None, "is a number with too many digits", node.start_mark)
        number: int | float = (
            self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
        )
        return number


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def _require_unique(node: yaml.MappingNode) -> None:
    """Refuse a key that appears twice in the text of a mapping; merges come later."""
    seen = set()
    for key, _ in node.value:
        name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
        if name in seen:
            raise ConstructorError(None, None, f"the key {str(key.value)[:40]} appears twice", key.start_mark)
        seen.add(name)


def load(
    data: bytes | str, max_nodes: int = MAX_NODES, max_depth: int | None = _MAX_DEPTH, has_aliases: bool = False
) -> Any:
    """The one value of a YAML text; None if it is empty.

    Args:
        max_nodes: scalars, lists and mappings, those of aliases among them. max_depth: None: as deep as Python reads.
        has_aliases: whether aliases and merge keys are read.

    Raises:
        yaml.YAMLError: no YAML, several documents, or beyond the bounds.
        ValueError: not UTF-8, or a value that its tag does not allow (an impossible date).
        RecursionError: nested beyond what the scanner takes.
    """
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    loader = _Loader(text, max_nodes, max_depth, has_aliases)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]


def problem(error: Exception) -> str:
    """What is wrong with a text that `load` refused, and where, in one line."""
    if not isinstance(
        error, yaml.YAMLError | ValueError | RecursionError
    ):  # where a tag and a value do not go together
        return type(error).__name__
    mark, text = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + " ".join(text.split())[:200]

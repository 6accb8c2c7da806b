"""YAML of settings, scripts and tiers: a small mapping that a person wrote, read within bounds.

Aliases are refused (a few lines of them stand for gigabytes, or for themselves), as are keys that come twice, of which
YAML libraries keep one. Tags that make Python objects are refused by PyYAML's safe loader.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError

MAX_BYTES = 1 << 20
_MAX_NODES = 10_000
_MAX_DEPTH = 20
_MAX_DIGITS = 1000  # of a number; one of more takes long to convert, and no setting has one


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds. It is the one written in Python: libyaml's cannot be bounded."""

    num_nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.num_nodes += 1
        self.depth += 1
        event = cast(Any, self.peek_event())  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise ConstructorError(None, None, "aliases (*) are not read here; write the value out", mark)
        if self.num_nodes > _MAX_NODES or self.depth > _MAX_DEPTH:
            raise ConstructorError(None, None, "has too many values, or too deep ones", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if name in seen:
                raise ConstructorError(None, None, f"the key {str(key.value)[:40]} comes twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > _MAX_DIGITS:
            raise ConstructorError(None, None, "is a number of too many digits", node.start_mark)
        number: int | float = (
            self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
        )
        return number


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def load(data: bytes) -> Any:
    """The one value of a YAML text; None if it is empty.

    Raises:
        yaml.YAMLError: no YAML, several documents, or beyond the bounds.
        ValueError: not UTF-8, or a value that its tag does not allow (an impossible date).
        RecursionError: nested beyond what the scanner takes.
    """
    loader = _Loader(data.decode("utf-8-sig"))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]

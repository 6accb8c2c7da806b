"""Every sentence that the program may say, one a line in tests/sentences.txt, which `make reference` writes.

A sentence is a text of the code that is raised or noted, or has three words of prose; not a docstring, a text of
several lines, or the help of an option (docs/reference has that). A value is {its name}, or {…}. There are no line
numbers: only a change of words changes the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_name("sentences.txt")
PACKAGE = Path(__file__).parents[1] / "pictool"
_PROSE = re.compile(r"[A-Za-z']+,?(?: [a-z']+,?){2}")
_WORDS = re.compile(r"[a-z] \S|: \S")
_SAYING = re.compile(r".*[eE]rror|_?fail|note|_?warn(ing)?|once|on_\w+|_mismatch|_unread|no_share")
_SILENT = re.compile(r"option|argument|Option|Argument|Binding|Typer|execute(many)?|fullmatch|getLogger")


def sentences() -> str:
    """The lines of tests/sentences.txt: MODULE: SENTENCE."""
    lines = list[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        found = {line for line in _sentences(ast.parse(path.read_text(encoding="utf-8")), False) if "\n" not in line}
        lines += [f"{path.relative_to(PACKAGE).as_posix()}: {line}" for line in sorted(found)]
    return "\n".join(lines) + "\n"


def _sentences(node: ast.AST, is_said: bool) -> Iterator[str]:
    """The sentences of a node, and of all within it."""
    if _is_skipped(node):
        return
    is_said = is_said or isinstance(node, ast.Raise) or _is_call(node, _SAYING)
    text = _text(node)
    if text is not None and (_PROSE.search(text) or (is_said and _WORDS.search(text))):
        yield text
    for child in ast.iter_child_nodes(node):
        is_part = isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)
        if not is_part:
            yield from _sentences(child, is_said)


def _is_skipped(node: ast.AST) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_silent = isinstance(node, ast.keyword) and node.arg in ("help", "epilog", "metavar", "param", "code")
    return is_docstring or is_silent or isinstance(node, ast.Assert) or _is_call(node, _SILENT)


def _is_call(node: ast.AST, names: re.Pattern[str]) -> bool:
    return isinstance(node, ast.Call) and names.fullmatch(_name(node.func)) is not None


def _text(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or f"{{{_name(part)}}}" for part in parts)
    return None


def _name(node: ast.AST) -> str:
    """The name of a value or a function; … for one that is computed."""
    match node:
        case ast.FormattedValue(value=value):
            return _name(value)
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    return "…"

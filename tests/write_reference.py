"""Write the tables of docs/reference that the program itself can tell, and the list of its sentences: `make reference`.

A page has each between two marks, `<!-- make reference: KIND NAME -->` and `<!-- end -->`; what is between them is
replaced. tests/docs_test.py compares the pages with what this program would write.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import sentences
import typer
from vllm_matrix import MATRIX, Cell
from vllm_matrix import REFUSED as REFUSED_BY_NAME

from pictool.commands.app import COMMANDS
from pictool.commands.linking.folder import FolderOptions
from pictool.commands.settings import options as shared
from pictool.commands.settings.settings import Settings, setting_keys, variable
from pictool.linker.policies import policies
from pictool.runtime.architectures import IN_VLLM, REFUSED
from pictool.store.codecs import codecs

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
GENERATED = re.compile(r"(<!-- make reference: ([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
# Options that mean the same wherever they are, and have a table of their own.
FOLDERS = [kind for name, kind in get_type_hints(FolderOptions, include_extras=True).items() if name != "names"]
SHARED: list[Any] = [
    *shared.SETTINGS.values(), shared.AlgoOption, shared.NewTokensOption, shared.ChunkOption, *FOLDERS,
    shared.EngineOption, shared.JsonOption,
]  # fmt: skip
COMMON = [annotation.__metadata__[0].help for annotation in SHARED]
Rows = Iterator[tuple[str, ...]]


def table(head: Sequence[str], rows: Rows) -> str:
    """A table of Markdown."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(head), *escaped]
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|\n" for line in lines)


def commands_of(name: str) -> dict[str, Any]:
    """The commands below `pic NAME` by their words: itself, or those of a group."""
    command: Any = typer.main.get_command(importlib.import_module(f"pictool.commands.{name}").app)
    inner = getattr(command, "commands", {})
    return {f"{name} {word}": inner[word] for word in inner} or {name: command}


def is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option" and not parameter.hidden)


def is_common(parameter: Any) -> bool:
    return parameter.help in COMMON


def option_cell(parameter: Any) -> str:
    names: list[str] = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}`" for name in [*names[:-1], f"{names[-1]} {parameter.metavar or ''}".strip()])


def default_cell(value: Any) -> str:
    """A default as it is written; empty where there is none, or the meaning says it."""
    if value is None or isinstance(value, bool) or value in ("", []) or callable(value):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def option_rows(name: str) -> Rows:
    """The options of a command, or of a group, whose equal options share a row."""
    inner = commands_of(name)
    users: dict[tuple[str, str, str], list[str]] = {}
    for words, command in inner.items():
        for parameter in filter(is_option, command.params):
            if not is_common(parameter) and parameter.opts[-1] != "--help":
                row = option_cell(parameter), default_cell(parameter.default), parameter.help
                users.setdefault(row, []).append(words.split()[-1])
    for (option, default, meaning), having in users.items():
        yield (option, *([_listed(having, len(inner))] if len(inner) > 1 else []), default, meaning)


def _listed(words: Sequence[str], number: int) -> str:
    return "all" if len(words) == number else ", ".join(f"`{word}`" for word in words)


def options(name: str) -> str:
    """The table of the options of `pic NAME`."""
    is_group = len(commands_of(name)) > 1
    return table(["option", *(["of"] if is_group else []), "default", "meaning"], option_rows(name))


def common_options(_: str) -> str:
    """The table of the options that many commands have."""
    rows: dict[str, tuple[str, list[str]]] = {}
    for name in COMMANDS:
        found = {option_cell(option): option for command in commands_of(name).values() for option in command.params
                 if is_option(option) and is_common(option)}  # fmt: skip
        for cell, option in found.items():
            rows.setdefault(cell, (option.help, []))[1].append(name)
    ordered = sorted(rows.items(), key=lambda item: COMMON.index(item[1][0]))
    cells = ((cell, _users(users), meaning) for cell, (meaning, users) in ordered)
    return table(["option", "commands", "meaning"], cells)


def _users(names: Sequence[str]) -> str:
    """Which commands have an option, as short as it can be said."""
    others = [name for name in COMMANDS if name not in names]
    listed = others if len(others) < len(names) // 2 else names
    return ("all but " if listed is others else "") + ", ".join(f"`{name}`" for name in listed)


def commands(name: str) -> str:
    """The table of the commands of a group."""
    rows = ((_usage(words, command), _first_line(command.help)) for words, command in commands_of(name).items())
    return table(["command", "what it does"], rows)


def _usage(words: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    return f"`pic {' '.join([words, *map(_argument, arguments)])}`"


def _argument(parameter: Any) -> str:
    text = f"{parameter.metavar}…" if parameter.nargs == -1 else str(parameter.metavar)
    return text if parameter.required else f"[{text}]"


def _first_line(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def meanings(kind: type) -> dict[str, str]:
    """What the docstring of a class says of its fields: `name: text`, or `name, name: text`, below `Fields:`."""
    _, *described = re.split(r"\n(?:Fields|Attributes):\n", inspect.getdoc(kind) or "")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", "".join(described)):
        names, _, text = entry.strip().partition(": ")
        found |= dict.fromkeys(names.split(", "), _phrase(text.replace("``", "`")))
    return found


def _phrase(text: str) -> str:
    """A text on one line; one sentence without its end."""
    joined = " ".join(text.split())
    return joined if re.search(r"\. [A-Z`]", joined) else joined.removesuffix(".")


def policy_fields(name: str) -> str:
    """The table of a policy's fields."""
    policy, said = policies()[name], meanings(policies()[name])
    rows = ((f"`{field.name}`", _value(field.default), said[field.name]) for field in fields(policy))
    return table(["field", "default", "meaning"], rows)


def _value(default: Any) -> str:
    if isinstance(default, float):
        return f"{default:.3g}"
    return "" if default in ("", MISSING) else f"`{default}`" if isinstance(default, str) else str(default)


def policy_table(_: str) -> str:
    """The table of all policies."""
    return table(["policy", "source", "what it computes", "code"], (_policy_row(*item) for item in policies().items()))


def _policy_row(name: str, policy: type) -> tuple[str, ...]:
    file = Path(inspect.getfile(policy)).relative_to(ROOT)
    source = re.sub(r"docs/(\S+/(\w+)\.md)", r"[\2](../\1)", policy.reference)  # type: ignore[attr-defined]
    first = _phrase(_first_line(policy.__doc__ or "").partition(": ")[2])
    return f"`{name}`", source, first, f"[{file.name}](../../{file})"


def codec_table(_: str) -> str:
    """The table of all codecs."""
    rows = (
        (f"`{name}`", _phrase(_first_line(codec.__doc__ or "")), "yes" if codec.is_lossless else "no")
        for name, codec in codecs().items()
    )
    return table(["codec", "what it stores", "lossless"], rows)


def setting_table(_: str) -> str:
    """The table of the keys of `pic.yaml`."""
    said = meanings(Settings)
    rows = ((f"`{key}`", _code(variable(key)), _setting_option(key), said[key]) for key in setting_keys())
    return table(["`pic.yaml`", "environment", "option", "meaning"], rows)


def _code(text: str | None) -> str:
    return "" if text is None else f"`{text}`"


def _setting_option(key: str) -> str:
    if key not in shared.SETTINGS:
        return ""
    option: Any = shared.SETTINGS[key].__metadata__[0]  # type: ignore[attr-defined]
    return ", ".join(f"`{name}`" for name in (option.default, *option.param_decls))  # typer keeps the first there


def refused_models(_: str) -> str:
    return table(["`model_type`", "why"], ((f"`{kind}`", why) for kind, why in REFUSED.items()))


def models_in_vllm(_: str) -> str:
    return f"{', '.join(f'`{kind}`' for kind in IN_VLLM)}\n"


def connector_settings(_: str) -> str:
    """The table of the fields of `kv_connector_extra_config`."""
    from pictool.engines.vllm.client import setup

    said = meanings(setup.ConnectorSettings)
    rows = ((f"`{name}`", _json(value), said[name]) for name, value in setup.DEFAULTS.items())
    return table(["field", "default", "meaning"], rows)


def _json(value: Any) -> str:
    """A value as JSON has it; whole mebibytes as such."""
    if type(value) is int and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} MiB"
    return "" if value is None else f"`{json.dumps(value)}`" if isinstance(value, bool | str) else f"{value:g}"


def metrics(_: str) -> str:
    """The table of what a server counts."""
    from pictool.serve.metrics import Metrics
    from pictool.serve.work import BackendStatus

    text = Metrics(lambda: BackendStatus(0, 0, ""), lambda: 0).text().decode()
    rows = re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)
    return table(["metric", "meaning"], ((f"`{name}`", meaning) for name, meaning in rows if "_created" not in name))


def clients(_: str) -> str:
    """The table of clients and what each does."""
    from clients.table import FEATURES, rows

    return table(["client", "dialect", *FEATURES], rows())


def vllm_matrix(_: str) -> str:
    """The table of what the connector does with vLLM's features."""
    rows = (
        (area, _feature(area, feature), cell.verdict, _seen(cell))
        for area, cells in MATRIX.items()
        for feature, cell in cells.items()
    )
    return table(["area", "feature", "verdict", "the test, and what it says"], rows)


def _feature(area: str, feature: str) -> str:
    is_name = (area == "models" and " " not in feature) or (feature.startswith("--") and "`" not in feature)
    return f"`{feature}`" if is_name else feature


def _seen(cell: Cell) -> str:
    file, _, name = cell.test.partition("::")
    test = f"[{name}](../../tests/in_vllm/{file})" if cell.test else ""
    says = f'"{cell.says.replace(" .*", " …")}"' if cell.verdict == REFUSED_BY_NAME else cell.says
    return "; ".join(filter(None, (test, says)))


KINDS: Mapping[str, Callable[[str], str]] = {
    "options": options, "common options": common_options, "commands": commands, "fields": policy_fields,
    "policies": policy_table, "codecs": codec_table, "settings": setting_table, "refused models": refused_models,
    "models in vLLM": models_in_vllm, "connector": connector_settings, "metrics": metrics, "clients": clients,
    "matrix": vllm_matrix,
}  # fmt: skip


def rewritten(text: str) -> str:
    """A page with its generated tables as the program tells them now."""
    return GENERATED.sub(lambda found: f"{found[1]}{_generated(found[2])}{found[3]}", text)


def _generated(mark: str) -> str:
    kind, _, name = (mark, "", "") if mark in KINDS else mark.partition(" ")
    return KINDS[kind](name)


def main() -> None:
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    sentences.FILE.write_text(sentences.sentences(), encoding="utf-8")


if __name__ == "__main__":
    main()

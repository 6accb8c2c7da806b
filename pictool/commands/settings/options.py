"""How a function becomes a command: its options, the settings that it receives, its help, its errors."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Optional, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from pictool.commands.console.errors import UsageError, fail, reports_errors
from pictool.commands.console.verbosity import note
from pictool.commands.settings.salt import MAKE_ONE, is_weak
from pictool.commands.settings.settings import Settings, read_settings
from pictool.commands.settings.types import parse_algo
from pictool.errors import PicError

SALT = ("salt", "salt_file")  # settings of every command whose model or keys are a tenant's
WITHOUT_VALUE = "default"  # of an option that was given without its value
_ADDRESS = re.compile(r"auto|local|ray://\S+|[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+")
F = TypeVar("F", bound=Callable[..., None])

# Headings of options in help texts, in their order
OPTIONS, PROMPT, DATASET, POLICY, ANSWER = "Options", "Prompt", "Dataset", "Policy", "Answer"
SECTIONS, ANALYSIS, COMPILING, OUTPUT = "Sections", "Analysis", "Compiling", "Output"
BATCH, CLUSTER, MODEL, STORE, ACCESS = "Batch", "Cluster", "Model", "Store", "Access"
FILES = "Files"
_HEADINGS = (
    "Arguments", OPTIONS, FILES, PROMPT, DATASET, POLICY, ANSWER, SECTIONS, ANALYSIS, COMPILING, BATCH, CLUSTER, OUTPUT,
    MODEL, STORE, ACCESS,
)  # fmt: skip
SPECS = "NAME, NAME-NUMBER or NAME:FIELD=VALUE[,VALUE...]; repeatable. An unknown name lists all."


def option(
    names: str, metavar: str | None, help: str, heading: str = OPTIONS, type: Callable[[str, str], Any] | None = None,
    **more: Any,
) -> Any:  # fmt: skip
    """An option of the command line.

    Args:
        names: as `-q, --query`.
        metavar: what stands for its value in the help; None for a flag.
        type: makes its value, one of `types`; else that is of the annotation's type.
        more: as of `typer.Option`.
    """
    listed = names.split(", ")
    if listed[0] in ("--algo", "--allow"):
        more["autocompletion"] = _policy_names
    if type is not None:

        def parse(value: Any) -> Any:
            return type(listed[-1], value) if isinstance(value, str) else value

        more["parser"] = parse
    return typer.Option(*listed, metavar=metavar, help=help, rich_help_panel=heading, **more)


def _policy_names(incomplete: str) -> list[str]:
    """What the shell offers for a policy. For all other values it offers files."""
    from pictool.linker.policies import policies

    return [name for name in policies() if name.startswith(incomplete)]


def argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help)


JsonOption = Annotated[bool, option("--json", None, "Print the report as JSON.", OUTPUT)]
EngineOption = Annotated[
    Optional[str],
    option(
        "--engine", "NAME", "torch (default); pic serve has vllm; GGUF files choose llamacpp if it is there.", MODEL
    ),
]
ChunkOption = Annotated[
    Optional[int],
    option(
        "--chunk-tokens",
        "N",
        "Cut texts into chunks of at most N tokens, at sentence ends if possible.",
        COMPILING,
        min=1,
    ),
]
CodecOption = Annotated[
    Optional[str],
    option("--codec", "NAME", "Codec of stored KV (PIC_CODEC; none). An unknown name lists all.", COMPILING),
]
AfterOption = Annotated[
    Optional[str],
    option(
        "--after",
        "WHAT",
        "Context that each chunk is compiled after (PIC_AFTER; previous: the text before it, else a neutral "
        "paragraph). An unknown name lists all.",
        COMPILING,
    ),
]
RayOption = Annotated[
    Optional[str],
    option(
        "--ray",
        "[ADDRESS]",
        (
            "Run on a Ray cluster: HOST:PORT, auto (the one on this machine) or local (one that ends "
            "with the command). Without ADDRESS: RAY_ADDRESS, else local."
        ),
        CLUSTER,
    ),
]
HeadOption = Annotated[
    Optional[str],
    option("--head", "TEXT", "System message of a chat model; for other models, text before the documents.", PROMPT),
]
TemplateOption = Annotated[
    Optional[str], option("--query-template", "TEXT", "Text after the documents; contains {query}.", PROMPT)
]
NewTokensOption = Annotated[
    Optional[int], option("--max-new-tokens", "N", "Generate at most N tokens (64).", ANSWER, min=1)
]
AlgoOption = Annotated[
    Any,
    option(
        "--algo",
        "SPEC",
        "Policy (PIC_ALGO): NAME, NAME-NUMBER or NAME:FIELD=VALUE. An unknown name lists all.",
        POLICY,
        type=parse_algo,
    ),
]
SeparatorOption = Annotated[
    Optional[str],
    option(
        "--separator",
        "TEXT",
        "Text between documents and before the question (PIC_SEPARATOR; a blank line).",
        PROMPT,
    ),
]

# The options that override settings, by the setting; a command names those that it has.
SETTINGS = {
    "model": Annotated[
        Optional[str],
        option(
            "-m, --model",
            "NAME",
            "A directory, hub name, GGUF file, smollm2 or embedded[-small] (PIC_MODEL; embedded).",
            MODEL,
        ),
    ],
    "device": Annotated[
        Optional[str], option("--device", "NAME", "auto, cpu, cuda, xpu or mps (PIC_DEVICE; auto).", MODEL)
    ],
    "dtype": Annotated[
        Optional[str], option("--dtype", "NAME", "auto, float32, bfloat16 or float16 (PIC_DTYPE; auto).", MODEL)
    ],
    "codec": CodecOption,
    "after": AfterOption,
    "head": HeadOption,
    "query_template": TemplateOption,
    "separator": SeparatorOption,
    "store": Annotated[Optional[str], option("--store", "DIR", "Directory of the store (PIC_STORE; .pic).", STORE)],
    "remote": Annotated[
        Optional[str],
        option("--remote", "URL", "Remote store to fetch missing objects from or push to (PIC_REMOTE).", STORE),
    ],
    "salt": Annotated[
        Optional[str],
        option("--salt", "TEXT", "Share objects only with the same salt (PIC_SALT). Visible in ps.", ACCESS),
    ],
    "salt_file": Annotated[Optional[str], option("--salt-file", "FILE", "File with the salt (PIC_SALT_FILE).", ACCESS)],
    "require_signed": Annotated[
        Optional[str],
        option(
            "--require-signed",
            "[=FILE]",
            "Use only objects signed by a key in FILE (PIC_REQUIRE_SIGNED; the list of pic store trust).",
            ACCESS,
        ),
    ],
    "signing_key": Annotated[
        Optional[str],
        option(
            "--signing-key",
            "[=FILE]",
            "Sign new objects with this private key (PIC_SIGNING_KEY; the key of pic store sign).",
            ACCESS,
        ),
    ],
}


def make_app(help: str = "") -> typer.Typer:
    """An app for one command, or for a group of them, which has a help text."""
    return typer.Typer(
        rich_markup_mode=None,  # plain help, in half the time
        add_completion=False, help=help or None, no_args_is_help=bool(help),
    )  # fmt: skip


def command(app: typer.Typer, name: str, *settings: str, without: Sequence[str] = ()) -> Callable[[F], F]:
    """Add a function to an app as a command. The function itself stays as it is, for other callers.

    A parameter whose type is a dataclass stands for one option per field, and one of type `Settings` receives the
    settings. All other parameters are typer's.

    Args:
        settings: those that an option of this command overrides.
        without: fields that stand for no option here, and keep their defaults.
    """

    def register(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        hints.pop("return")

        @functools.wraps(function)
        @reports_errors
        def run(**values: Any) -> None:
            overrides = {name: values.pop(name) for name in settings}
            for parameter, kind in hints.items():
                if kind is Settings:
                    values[parameter] = read_settings().override(**overrides)
                    values[parameter].check_strange_file()
                    if "salt" in settings and is_weak(values[parameter].salt):
                        note(f"the salt is weak: anyone who guesses it finds every object compiled with it; {MAKE_ONE}")
                elif is_dataclass(kind):
                    names = [field.name for field in fields(kind) if field.name not in without]
                    values[parameter] = kind(**{name: values.pop(name) for name in names})  # type: ignore[operator]
            function(**values)

        parameters = [
            *_parameters(function, hints, without),
            *(_keyword(name, None, SETTINGS[name]) for name in settings),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        app.command(name, cls=_Command)(run)
        return function

    return register


def _parameters(
    function: Callable[..., None], hints: dict[str, Any], without: Sequence[str]
) -> Iterator[inspect.Parameter]:
    """The parameters of a command's function as typer is to see them."""
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        if is_dataclass(kind) and kind is not Settings:
            types = get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                if field.name not in without:
                    yield _keyword(field.name, _default(field), types[field.name])
        elif kind is not Settings:
            yield _keyword(name, parameter.default, kind)


def _is_address(following: list[str]) -> bool:
    """Whether what follows `--ray` is its address: auto, local, HOST:PORT or a ray:// URL; no name of a file."""
    return any(_ADDRESS.fullmatch(text) for text in following)


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


class _Command(TyperCommand):
    """A command whose help has a section for every heading, without what rich costs to load.

    A value whose metavar is in brackets is optional on the command line: without it the option is `WITHOUT_VALUE`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        optional = {
            name for parameter in options if (parameter.metavar or "").startswith("[") for name in parameter.opts
        }
        filled = list[str]()
        for index, text in enumerate(args):
            filled.append(text)
            if text == "--":
                filled += args[index + 1 :]
                break
            if text in optional and not _is_address(args[index + 1 : index + 2]):
                filled.append(WITHOUT_VALUE)
        try:
            return super().parse_args(ctx, filled)
        except PicError as error:  # of an option's type
            fail(str(error), UsageError.exit_code)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _HEADINGS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "argument":
                sections["Arguments"].append((parameter.metavar or "", record[1]))
            elif record is not None:
                sections[getattr(parameter, "rich_help_panel", None) or OPTIONS].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

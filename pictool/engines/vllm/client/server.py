"""vLLM's OpenAI server in this process, with PicConnector and the plugins of pictool; or its engine alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, NoReturn

from pictool.engines.vllm import plugin
from pictool.engines.vllm.client.offline import CONNECTOR
from pictool.engines.vllm.client.serving import Serving
from pictool.engines.vllm.client.setup import parse_settings
from pictool.engines.vllm.versions import require_version
from pictool.errors import InputError, PicError
from pictool.urls import without_credentials

_OURS = ("model", "served_model_name", "dtype", "kv_transfer_config")  # options of an engine that are set here
_SERVERS = ("data_parallel", "nnodes", "node_rank", "master_")  # beginnings of options of several engines or machines
_LAYOUT = ("chat_template", "chat_template_content_format", "default_chat_template_kwargs")  # of prompts
_CPU_KV_BYTES = 4 << 30  # of an engine on CPUs, where nobody says it: vLLM would take most of the machine's memory


@dataclass(frozen=True)
class EngineOptions:
    """What vLLM's engine is started with.

    Fields:
        model: directory of the model. name: what the API calls it.
        extra: fields of `kv_connector_extra_config`.
        more: options of `vllm serve`, as on its command line; they come after ours, so that they win.
    """

    model: str
    name: str
    dtype: str
    extra: Mapping[str, Any]
    more: Sequence[str] = ()

    @property
    def arguments(self) -> list[str]:
        """The command line of `vllm serve`, without `more`."""
        transfer = {
            "kv_connector": "PicConnector", "kv_connector_module_path": CONNECTOR, "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": dict(self.extra),
        }  # fmt: skip
        return [
            "--model", self.model, "--served-model-name", self.name, "--dtype", self.dtype,
            "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip


@dataclass(frozen=True)
class ServerOptions:
    """What vLLM's server is started with: its engine, and where it listens."""

    engine: EngineOptions
    host: str
    port: int

    @property
    def arguments(self) -> list[str]:
        """The command line of `vllm serve`."""
        return [
            *self.engine.arguments, "--host", self.host, "--port", str(self.port), "--uvicorn-log-level", "warning",
            "--disable-uvicorn-access-log", *self.engine.more,
        ]  # fmt: skip


def require_plugins() -> None:
    """Refuse an installation without the entry points. Raises InputError."""
    if not plugin.are_installed():
        raise InputError(
            "--engine vllm: this installation of pictool has no plugins for vLLM; install it again (pip install .)"
        )


def _why(error: BaseException) -> str:
    return without_credentials(" ".join(str(error).split()))[:500]


def serve(options: ServerOptions) -> None:
    """Run the server until an interrupt or SIGTERM comes.

    Works where the command `vllm` does not start, as on the CPU build.

    Raises:
        InputError: another version of vLLM, fields that do not fit, or vLLM does not start.
        PicError: the engine ended, and nobody had asked for it.
    """
    require_version()
    require_plugins()
    parse_settings(options.engine.extra)
    os.environ["VLLM_PLUGINS"] = plugin.allowed_plugins(os.environ.get("VLLM_PLUGINS"))
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    plugin.hide_credentials()  # before vLLM loads the plugin it has logged its options
    parser = make_arg_parser(FlexibleArgumentParser())
    _changed(parser, options.engine.more, (*_OURS, "host", "port"))
    arguments = parser.parse_args(options.arguments)
    try:
        validate_parsed_serve_args(arguments)
        with _noting_deaths() as are_dead:
            uvloop.run(run_server(arguments))
    except (RuntimeError, ValueError, TypeError) as error:  # of vLLM's: it has logged more
        raise InputError(f"vLLM does not start: {_why(error)}") from error
    if any(are_dead[:1]):  # vLLM then ends its server as if it had been asked to
        raise PicError("vLLM's engine ended, and its server with it; the log above says why, or the system's: memory")


@contextmanager
def _noting_deaths() -> Iterator[list[bool]]:
    """At each time that an engine of vLLM's is shut down: whether it had ended before."""
    from vllm.v1.engine.async_llm import AsyncLLM

    shutdown, are_dead = AsyncLLM.shutdown, list[bool]()

    def note(engine: Any, *args: Any, **options: Any) -> None:
        are_dead.append(engine.errored)
        shutdown(engine, *args, **options)

    AsyncLLM.shutdown = note
    try:
        yield are_dead
    finally:
        AsyncLLM.shutdown = shutdown


def _changed(parser: Any, more: Sequence[str], ours: Sequence[str]) -> list[str]:
    """The options that a command line changes. Raises InputError for one that is set here."""
    plain, given = (vars(parser.parse_args([*listed])) for listed in ((), more))
    changed = [name for name, value in given.items() if value != plain[name]]
    for name in changed:
        if name in ours:
            raise InputError(f"{_option(name)}: pic serve sets it; give it before -- (pic serve --help)")
    return changed


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


async def start_engine(options: EngineOptions) -> Serving:
    """vLLM's engine and the objects behind its routes, in the running event loop, with no route and no port.

    `Serving.close` ends it. Its processes end with this one, however that ends.

    Raises:
        InputError: another version of vLLM, options that an engine without a server has not, or vLLM does not start.
    """
    require_version()
    require_plugins()
    parse_settings(options.extra)
    plugin.end_with_this_process()
    if "VLLM_PLUGINS" in os.environ:
        os.environ["VLLM_PLUGINS"] = plugin.allowed_plugins(os.environ["VLLM_PLUGINS"])
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    client = None
    try:
        arguments = _engine_arguments(options)
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
        client = AsyncLLM.from_vllm_config(config, usage_context=UsageContext.OPENAI_API_SERVER)
        state = SimpleNamespace()
        await init_app_state(client, state, arguments, await client.get_supported_tasks())
        return Serving(client, state)
    except BaseException as error:
        if client is not None:
            client.shutdown(0)
        if isinstance(error, RuntimeError | ValueError | TypeError):  # of vLLM's: it has logged more
            raise InputError(f"vLLM does not start: {_why(error)}") from error
        raise


def _engine_arguments(options: EngineOptions) -> Any:
    """The parsed options of an engine without a server.

    Raises:
        InputError: one that vLLM does not know, that is set here already, or that is of a server.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise InputError(f"vLLM: {message}")

    parser = make_arg_parser(Parser())
    known = {field.name for field in fields(AsyncEngineArgs)} | set(_LAYOUT)
    for name in _changed(parser, options.more, _OURS):
        if name not in known or name.startswith(_SERVERS):
            raise InputError(
                f"{_option(name)}: cannot be used with --ray; a replica is one engine on one machine, without a server"
            )
    parsed = parser.parse_args([*options.arguments, *options.more])
    validate_parsed_serve_args(parsed)
    if parsed.distributed_executor_backend == "ray":
        raise InputError("--distributed-executor-backend ray: cannot be used with --ray; a replica is on one machine")
    if parsed.distributed_executor_backend is None and parsed.tensor_parallel_size > 1:
        parsed.distributed_executor_backend = "mp"  # within a replica's process, not as actors of Ray's
    is_said = parsed.kv_cache_memory_bytes is not None or "VLLM_CPU_KVCACHE_SPACE" in os.environ
    if current_platform.is_cpu() and not is_said:
        parsed.kv_cache_memory_bytes = _CPU_KV_BYTES
    return parsed

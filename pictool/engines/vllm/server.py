"""vLLM's OpenAI server in this process, with PicConnector and the plugins of pictool."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pictool.engines.vllm import plugin
from pictool.engines.vllm.offline import CONNECTOR
from pictool.engines.vllm.setup import parse_settings, require_version
from pictool.errors import InputError


@dataclass(frozen=True)
class ServerOptions:
    """What vLLM's server is started with.

    Fields:
        model: directory of the model. name: what the API calls it.
        extra: fields of `kv_connector_extra_config`.
        more: options of `vllm serve`, as on its command line; they come after ours, so that they win.
    """

    model: str
    name: str
    dtype: str
    host: str
    port: int
    extra: Mapping[str, Any]
    more: Sequence[str] = ()

    @property
    def arguments(self) -> list[str]:
        """The command line of `vllm serve`."""
        transfer = {
            "kv_connector": "PicConnector", "kv_connector_module_path": CONNECTOR, "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": dict(self.extra),
        }  # fmt: skip
        return [
            "--model", self.model, "--served-model-name", self.name, "--dtype", self.dtype, "--host", self.host,
            "--port", str(self.port), "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
            "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", *self.more,
        ]  # fmt: skip


def require_plugins() -> None:
    """Refuse an installation without the entry points. Raises InputError."""
    if not plugin.are_installed():
        raise InputError(
            "--engine vllm: this installation of pictool has no plugins for vLLM; install it again (pip install .)"
        )


def serve(options: ServerOptions) -> None:
    """Run the server until an interrupt or SIGTERM comes.

    Works where the command `vllm` does not start, as on the CPU build.

    Raises:
        InputError: another version of vLLM, fields that do not fit, or vLLM does not start.
    """
    require_version()
    require_plugins()
    parse_settings(options.extra)
    os.environ["VLLM_PLUGINS"] = plugin.allowed_plugins(os.environ.get("VLLM_PLUGINS"))
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(options.arguments)
    try:
        validate_parsed_serve_args(arguments)
        uvloop.run(run_server(arguments))
    except (RuntimeError, ValueError, TypeError) as error:  # of vLLM's: it has logged more
        raise InputError(f"vLLM does not start: {' '.join(str(error).split())[:500]}") from error

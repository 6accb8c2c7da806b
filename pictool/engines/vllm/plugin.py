"""What vLLM loads by entry points: the general plugin `pictool`, and which other plugins its name must not switch off.

The router inside vLLM's server writes objects for its clients; others who reach the engine may not. So the two have a
secret: the general plugin, which vLLM loads in the server's first process, puts it into the environment, and the
processes of the engine inherit it.

vLLM's engine does not notice that the process which started it was killed. Where that process asked for it, the plugin
ends the engine's processes then.
"""

from __future__ import annotations

import hmac
import logging
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Iterable
from importlib.metadata import entry_points

from pictool.urls import without_credentials

NAME = "pictool"  # of both plugins, in VLLM_PLUGINS
ENDPOINTS = "vllm.endpoint_plugins"
_GENERAL = "vllm.general_plugins"
_GROUPS = (_GENERAL, "vllm.io_processor_plugins", "vllm.platform_plugins", "vllm.stat_logger_plugins")
_SECRET = "PIC_ROUTER_SECRET"
_ENDS = "PIC_ENGINE_ENDS_WITH_PARENT"


def register() -> None:
    """The general plugin. It is called in every process of vLLM's; the first one makes the secret."""
    hide_credentials()
    os.environ.setdefault(_SECRET, secrets.token_hex(32))
    if os.environ.get(_ENDS) and multiprocessing.parent_process() is not None:
        threading.Thread(target=_end_with_parent, name="pic-parent", daemon=True).start()


def hide_credentials() -> None:
    """Have vLLM log no password of a URL: it logs its options, the remote of PicConnector among them."""
    for handler in logging.getLogger("vllm").handlers:
        if _hide_credentials not in handler.filters:
            handler.addFilter(_hide_credentials)


def _hide_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_credentials(record.getMessage()), ()
    return True


def end_with_this_process() -> None:
    """Have the processes of engines that this one starts end when it ends, also if it is killed."""
    os.environ[_ENDS] = "1"


def _end_with_parent() -> None:
    """Wait until the process that started this one has ended, and end at once: nobody waits for an answer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def router_secret() -> str:
    """The secret of this server's router; empty where the general plugin was not loaded."""
    return os.environ.get(_SECRET, "")


def is_router(secret: str) -> bool:
    """Whether a request has the secret of this server's router."""
    own = router_secret()
    return bool(own) and hmac.compare_digest(secret.encode(errors="replace"), own.encode())


def are_installed() -> bool:
    """Whether the installed package has both entry points (an older installation has not)."""
    return all(NAME in _names(group) for group in (ENDPOINTS, _GENERAL))


def allowed_plugins(allowed: str | None) -> str:
    """VLLM_PLUGINS with ours in it. Where it was not set, vLLM loads all plugins but endpoints: they stay named.

    Args:
        allowed: what it is.
    """
    names = allowed.split(",") if allowed is not None else [name for group in _GROUPS for name in _names(group)]
    return ",".join(dict.fromkeys([*filter(None, names), NAME]))


def _names(group: str) -> Iterable[str]:
    return [entry.name for entry in entry_points(group=group)]

"""What vLLM loads by an entry point in each of its processes: the general plugin `pictool`.

vLLM logs its options, with the password of a remote's URL among them; the plugin hides it. And vLLM's engine does not
notice that the process which started it was killed: where that is a server of this package's, the plugin ends it then.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

from pictool.urls import without_credentials

NAME = "pictool"  # in VLLM_PLUGINS
ENDS = "PIC_ENGINE_ENDS_WITH_PARENT"


def register() -> None:
    """The general plugin. It is called in every process of vLLM's."""
    hide_credentials()
    if os.environ.get(ENDS) and multiprocessing.parent_process() is not None:
        threading.Thread(target=_end_with_parent, name="pic-parent", daemon=True).start()


def hide_credentials() -> None:
    """Have vLLM log no password of a URL: it logs its options, the remote of PicConnector among them."""
    for handler in logging.getLogger("vllm").handlers:
        if _hide_credentials not in handler.filters:
            handler.addFilter(_hide_credentials)


def _hide_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_credentials(record.getMessage()), ()
    return True


def _end_with_parent() -> None:
    """Wait until the process that started this one has ended, and end at once: nobody waits for an answer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)

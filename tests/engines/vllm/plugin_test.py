"""What the general plugin does in a process of vLLM's, without vLLM."""

from __future__ import annotations

import io
import logging

from pictool.engines.vllm.plugin import hide_credentials

OPTIONS = {"kv_connector_extra_config": {"remote": "s3://user:secret@bucket/pic?token=secret", "store": "st"}}


def test_vllm_logs_no_password_of_a_remote() -> None:
    root, shown = logging.getLogger("vllm"), io.StringIO()
    handler = logging.StreamHandler(shown)
    root.addHandler(handler)
    try:
        hide_credentials()
        hide_credentials()  # in the server, and again as the plugin
        logging.getLogger("vllm.entrypoints").warning("non-default args: %s", OPTIONS)
    finally:
        root.removeHandler(handler)
    assert "s3://bucket/pic?…" in shown.getvalue() and "secret" not in shown.getvalue()
    assert len(handler.filters) == 1

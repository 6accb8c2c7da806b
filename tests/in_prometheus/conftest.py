"""These tests need `prometheus` and `promtool` (`make test-prometheus`); elsewhere they are not collected."""

from __future__ import annotations

import shutil

from serve.conftest import live, model  # noqa: F401

collect_ignore_glob = [] if shutil.which("prometheus") and shutil.which("promtool") else ["*_test.py"]

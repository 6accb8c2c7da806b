"""This test needs Open WebUI (`make test-open-webui`); elsewhere it is not collected."""

from benchmarks.open_webui import WEBUI

collect_ignore_glob = [] if WEBUI.exists() else ["*_test.py"]

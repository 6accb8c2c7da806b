"""The dashboard and the alert rules in a real Prometheus that scrapes a server."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from serve.live import DOCS, QUESTION, Live

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
ALERTS, DASHBOARD = MONITORING / "alerts.yml", MONITORING / "dashboard.json"
_LIMIT_S = 60.0
_VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}


def until(url: str, ready: Any) -> Any:
    """The JSON at a URL once it is ready."""
    end = time.monotonic() + _LIMIT_S
    while True:
        try:
            found = httpx.get(url, timeout=_LIMIT_S).json()
        except (httpx.TransportError, ValueError):
            found = None
        if found is not None and ready(found):
            return found
        assert time.monotonic() < end, f"{url}: {found}"
        time.sleep(0.2)


@pytest.fixture
def prometheus(live: Live, tmp_path: Path) -> Iterator[str]:
    """A running Prometheus that has read the server's metrics twice, with requests of every kind between."""
    target = live.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "pic", "static_configs": [{"targets": [target]}]}],
    }  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
               f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}/api/v1"
            count = f"{url}/query?query=count_over_time(pic_requests_total%5B1m%5D)"
            live.chat(QUESTION, cache_ids=[live.cache(DOCS[0])])
            until(count, lambda found: len(found["data"]["result"]))
            live.chat(DOCS[1] + QUESTION)
            until(count, lambda found: max(int(row["value"][1]) for row in found["data"]["result"]) >= 3)
            yield url
        finally:
            process.terminate()


def test_every_panel_has_data(prometheus: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in _VARIABLES.items():
                expression = expression.replace(name, value)
            found = httpx.get(f"{prometheus}/query", params={"query": expression}, timeout=_LIMIT_S).json()
            assert found["status"] == "success", (panel["title"], found)
            has_data = found["data"]["result"] or panel["title"].startswith("KL")  # no check
            assert has_data, (panel["title"], expression)


def test_every_alert_is_evaluated_without_an_error(prometheus: str) -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr

    def evaluated(found: Any) -> bool:
        return all(rule["health"] != "unknown" for group in found["data"]["groups"] for rule in group["rules"])

    groups = until(f"{prometheus}/rules", evaluated)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == ALERTS.read_text().count("- alert:") and all(rule["health"] == "ok" for rule in rules)
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]

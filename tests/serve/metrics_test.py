"""The metrics of a server as Prometheus' own parser reads them, and the list of them in the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from serve.live import QUESTION, Live

ROOT = Path(__file__).parents[2]


@pytest.fixture
def families(live: Live) -> Iterator[list[Metric]]:
    live.chat(QUESTION)
    yield list(text_string_to_metric_families(live.client.get("/metrics").text))


def test_names_are_as_prometheus_asks(families: list[Metric]) -> None:
    assert families
    for family in families:
        assert family.name.startswith("pic_") and family.documentation, family
        assert family.type in ("counter", "gauge", "histogram"), family
        names = {sample.name for sample in family.samples}
        assert not any(name.endswith("_created") for name in names)
        if family.type == "counter":
            assert names <= {f"{family.name}_total"}
        else:
            assert not family.name.endswith("_total")
        assert not re.search(r"_(ms|s|mib|kb|millis)$", family.name)


def test_the_docs_list_all_of_them(families: list[Metric]) -> None:
    text = (ROOT / "docs" / "reference" / "serving.md").read_text(encoding="utf-8")
    section = text.partition("## Metrics\n")[2].partition("\n## ")[0]
    shown = {family.name + "_total" * (family.type == "counter") for family in families}
    assert set(re.findall(r"`(pic_\w+)`", section)) == shown


def test_those_inside_vllm_are_listed_too() -> None:
    source = (ROOT / "pictool" / "engines" / "vllm" / "metrics.py").read_text(encoding="utf-8")
    counters, histograms = (part.partition("\n}\n")[0] for part in source.split(" = {")[1:3])
    docs = (ROOT / "docs" / "reference" / "vllm.md").read_text(encoding="utf-8")
    named = {f"{name}_total" for name in re.findall(r"vllm:pic_\w+", counters)}
    named |= set(re.findall(r"vllm:pic_\w+", histograms))
    assert len(named) == 7 and named == set(re.findall(r"`(vllm:pic_\w+)`", docs.partition("## Counters")[2]))


def test_the_dashboard_shows_all_of_them_and_the_alerts_name_some(
    families: list[Metric],
) -> None:
    known = {family.name + "_total" * (family.type == "counter") for family in families}
    dashboard = json.loads((ROOT / "examples" / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert set(re.findall(r"pic_\w+", expressions.replace("_seconds_bucket", "_seconds"))) == known
    alerts = (ROOT / "examples" / "monitoring" / "alerts.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"pic_\w+", alerts)) <= known

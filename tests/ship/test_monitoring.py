"""Alerts, dashboard and what scrapes: they speak of metrics that exist, and every alert has its page."""

import json
import re

import pytest
import yaml
from tarn.db import worker_heartbeats

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.ship.chart import CHART, CLUSTER, FULL, release
from tests.ship.dockerfile import ROOT

ALERTS = CHART / "alerts" / "tarn.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RUNBOOK = ROOT / "docs" / "runbook.md"
PAGE = ROOT / "docs" / "observability.md"

METRIC = re.compile(r"\b(?:tarn|process)_[a-z_]+\b")
TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
PARTS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def rules() -> list[dict]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return group["rules"]


def queries(dashboard: dict) -> list[str]:
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return shown + [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]


@pytest.fixture
def types(api: InProcessApi) -> dict[str, str]:
    """Every metric that an API tells, and so every one of a worker, which are among them."""
    with api.services.database.write() as connection:
        worker_heartbeats.register(connection, "w1")
    return dict(TYPE.findall(api.anonymous.get("/metrics").text))


def names(types: dict[str, str]) -> set[str]:
    return {name + part for name, kind in types.items() for part in PARTS.get(kind, ("",))}


@ONE_DATABASE
def test_alerts_and_dashboards_ask_for_metrics_that_exist(types):
    asked = [rule["expr"] for rule in rules()]
    for dashboard in DASHBOARDS:
        asked += queries(json.loads(dashboard.read_text()))
    used = {name for each in asked for name in METRIC.findall(each)}
    assert used - names(types) == set()
    assert {"tarn_journal_rows", "tarn_flush_lag_seconds_bucket", "tarn_export_stale_seconds"} <= used
    assert not {"tarn_nothing"} <= names(types)


@ONE_DATABASE
def test_every_metric_of_ours_is_explained_and_shown(types):
    ours = {name for name in types if name.startswith("tarn_") and not name.endswith("_created")}
    explained = set(METRIC.findall(PAGE.read_text()))
    shown = {
        name for each in DASHBOARDS for query in queries(json.loads(each.read_text())) for name in METRIC.findall(query)
    }
    assert ours - explained == set()
    assert {name for name in explained if name.startswith("tarn_")} - ours == set()
    unshown = {name for name in ours if not any(each.startswith(name) for each in shown)}
    assert unshown <= {"tarn_journal_characters", "tarn_journal_datasets"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_is_wrong_how_bad_and_where_its_page_is(rule):
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert all(rule["expr"].count(opening) == rule["expr"].count(closing) for opening, closing in ("()", "[]", "{}"))
    page = RUNBOOK.read_text().partition(f"\n## {rule['alert']}\n")[2].partition("\n## ")[0]
    assert [part for part in ("**Means.**", "**Look.**", "**Do.**") if part not in page] == []


def test_every_page_of_the_runbook_is_of_an_alert_and_links_lead_somewhere():
    text = RUNBOOK.read_text()
    pages = re.findall(r"^## (\S+)$", text, re.MULTILINE)
    assert sorted(pages) == sorted(rule["alert"] for rule in rules())
    assert set(re.findall(r"\(#(\w+)\)", text)) <= {page.lower() for page in pages}


def test_the_dashboards_panels_do_not_lie_on_each_other():
    for path in DASHBOARDS:
        cells = [
            (x, y)
            for panel in json.loads(path.read_text())["panels"]
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24


# In the chart


def test_the_chart_ships_the_rules_with_links_that_lead_to_the_docs():
    (shipped,) = release(FULL).of("PrometheusRule")
    assert shipped["metadata"]["labels"]["release"] == "prometheus"
    (group,) = shipped["spec"]["groups"]
    base = "https://docs.example.com/runbook.md#"
    assert [rule["annotations"].pop("runbook_url") for rule in group["rules"]] == [
        base + rule["alert"].lower() for rule in rules()
    ]
    assert [rule["expr"] for rule in group["rules"]] == [rule["expr"] for rule in rules()]
    assert "{{ $value" in group["rules"][1]["annotations"]["summary"], "what is Prometheus' own is left to it"


def test_the_chart_ships_the_dashboards_as_they_are():
    (config,) = (each for each in release(CLUSTER).of("ConfigMap") if "tarn.json" in each["data"])
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["data"] == {path.name: path.read_text() for path in DASHBOARDS}


def test_what_scrapes_finds_the_port_of_every_pod_that_has_metrics():
    cluster = release(CLUSTER)
    (monitor,) = cluster.of("ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (each for each in cluster.of("Service") if wanted <= each["metadata"]["labels"].items())
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [each["name"] for each in service["spec"]["ports"]]
    assert set(endpoint) == {"port", "path", "interval"}
    for role in ("api", "worker"):
        pod = cluster.as_pod(role)
        assert service["spec"]["selector"].items() <= pod.labels.items()
        assert service["spec"]["ports"][0]["targetPort"] in pod.ports


def test_nothing_of_an_operator_is_asked_for_unless_it_is_there():
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert release(CHART / "ci" / "minimal-values.yaml").of(kind) == []

"""Alerts, dashboards and service monitors: they use existing metrics, and every alert has a page in the runbook."""

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
    """Return the type of every metric of an API, which include all of a worker."""
    with api.services.database.write() as connection:
        worker_heartbeats.register(connection, "w1")
    return dict(TYPE.findall(api.anonymous.get("/metrics").text))


def names(types: dict[str, str]) -> set[str]:
    return {name + part for name, kind in types.items() for part in PARTS.get(kind, ("",))}


@ONE_DATABASE
def test_alerts_and_dashboards_use_only_existing_metrics(types):
    expressions = [rule["expr"] for rule in rules()]
    for dashboard in DASHBOARDS:
        expressions += queries(json.loads(dashboard.read_text()))
    used = {name for each in expressions for name in METRIC.findall(each)}
    assert used - names(types) == set()
    assert {"tarn_journal_rows", "tarn_flush_lag_seconds_bucket", "tarn_export_stale_seconds"} <= used
    assert not {"tarn_nothing"} <= names(types)


@ONE_DATABASE
def test_every_metric_of_tarn_is_documented_and_on_a_dashboard(types):
    metrics = {name for name in types if name.startswith("tarn_") and not name.endswith("_created")}
    documented = set(METRIC.findall(PAGE.read_text()))
    shown = {
        name for each in DASHBOARDS for query in queries(json.loads(each.read_text())) for name in METRIC.findall(query)
    }
    assert metrics - documented == set()
    assert {name for name in documented if name.startswith("tarn_")} - metrics == set()
    unshown = {name for name in metrics if not any(each.startswith(name) for each in shown)}
    assert unshown <= {"tarn_journal_characters", "tarn_journal_datasets"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_has_a_summary_a_severity_and_a_page_in_the_runbook(rule):
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert all(rule["expr"].count(opening) == rule["expr"].count(closing) for opening, closing in ("()", "[]", "{}"))
    page = RUNBOOK.read_text().partition(f"\n## {rule['alert']}\n")[2].partition("\n## ")[0]
    assert [part for part in ("**Means.**", "**Look.**", "**Do.**") if part not in page] == []


def test_every_page_of_the_runbook_belongs_to_an_alert_and_links_are_valid():
    text = RUNBOOK.read_text()
    pages = re.findall(r"^## (\S+)$", text, re.MULTILINE)
    assert sorted(pages) == sorted(rule["alert"] for rule in rules())
    assert set(re.findall(r"\(#(\w+)\)", text)) <= {page.lower() for page in pages}


def test_panels_of_dashboards_do_not_overlap():
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


def test_chart_contains_the_alerts_with_links_to_the_docs():
    (shipped,) = release(FULL).of("PrometheusRule")
    assert shipped["metadata"]["labels"]["release"] == "prometheus"
    (group,) = shipped["spec"]["groups"]
    base = "https://docs.example.com/runbook.md#"
    assert [rule["annotations"].pop("runbook_url") for rule in group["rules"]] == [
        base + rule["alert"].lower() for rule in rules()
    ]
    assert [rule["expr"] for rule in group["rules"]] == [rule["expr"] for rule in rules()]
    assert "{{ $value" in group["rules"][1]["annotations"]["summary"], "Helm must keep the templates of Prometheus"


def test_chart_contains_the_dashboards_unchanged():
    (config,) = (each for each in release(CLUSTER).of("ConfigMap") if "tarn.json" in each["data"])
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["data"] == {path.name: path.read_text() for path in DASHBOARDS}


def test_service_monitor_selects_the_metrics_port_of_apis_and_workers():
    cluster = release(CLUSTER)
    (monitor,) = cluster.of("ServiceMonitor")
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (each for each in cluster.of("Service") if labels <= each["metadata"]["labels"].items())
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [each["name"] for each in service["spec"]["ports"]]
    assert set(endpoint) == {"port", "path", "interval"}
    for role in ("api", "worker"):
        pod = cluster.as_pod(role)
        assert service["spec"]["selector"].items() <= pod.labels.items()
        assert service["spec"]["ports"][0]["targetPort"] in pod.ports


def test_minimal_values_render_no_object_of_the_prometheus_operator():
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert release(CHART / "ci" / "minimal-values.yaml").of(kind) == []

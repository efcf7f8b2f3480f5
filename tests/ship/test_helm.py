"""The chart, rendered by Helm for every value set in `ci/`, and the properties of the rendered objects."""

import json
import os
import re
import shutil
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tarn.settings import PREFIX, Settings, load_settings

from tests.ship.chart import (
    CHART,
    CLUSTER,
    COMPONENTS,
    FULL,
    MINIMAL,
    NEWEST,
    OLDEST,
    VALUE_SETS,
    Release,
    helm,
    lint,
    render,
)
from tests.ship.chart import release as rendered
from tests.ship.chart_settings import SECRET, offered
from tests.ship.connection_budget import max_connections
from tests.ship.dockerfile import ROOT, final_stage, image_environment

OPERATOR = "monitoring.coreos.com/v1"
"""The API version of objects whose kinds are not part of Kubernetes."""


# The chart


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("values", VALUE_SETS, ids=lambda path: path.stem)
def test_helm_lint_passes_for_every_value_set(values, version):
    done = lint("--values", values, version=version)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("values", VALUE_SETS, ids=lambda path: path.stem)
def test_every_object_is_valid_in_the_oldest_and_newest_kubernetes(values, version):
    objects = render(values, version=version)
    own = [each for each in objects if each["apiVersion"] != OPERATOR]
    assert {"Deployment", "Service", "Job", "NetworkPolicy", "PodDisruptionBudget"} <= {each["kind"] for each in own}
    for each in own:
        kubernetes_validate.validate(each, version, strict=True)


def test_oldest_tested_kubernetes_is_the_oldest_that_the_chart_accepts():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}-0"


def test_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]


def test_full_value_set_sets_every_value():
    def paths(values: dict[str, Any], above: str = "") -> set[str]:
        nested = [paths(value, f"{above}{key}.") for key, value in values.items() if isinstance(value, dict) and value]
        return {f"{above}{key}" for key in values}.union(*nested)

    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    full = yaml.safe_load((FULL).read_text())
    assert paths(defaults) - paths(full) == set()


def test_notes_have_the_secret_of_the_key_the_address_of_the_api_and_the_connection_limit(tmp_path):
    """Helm prints notes only at an install, so the test renders them with an additional template."""
    chart = tmp_path / "tarn"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "carrier.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: carrier}\n"
        'data: {notes: {{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}}\n'
    )
    notes = [
        next(each["data"]["notes"] for each in render(values, chart=chart) if each["metadata"]["name"] == "carrier")
        for values in (MINIMAL, FULL, CLUSTER)
    ]
    assert "lake-tarn.default:80" in notes[0]
    assert "secret tarn-admin, under admin-key" in notes[0]
    assert "https://lake.example.com" in notes[1]
    assert ["component=executor" in each for each in notes] == [False, False, True]
    # Includes the additional pods during an upgrade: one API, and one worker for every four.
    sums = [
        max_connections(10, apis=2 + 1, workers=1 + 1, tasks=2),
        max_connections(20, apis=5 + 1, workers=3 + 1, tasks=0),
        max_connections(10, apis=12 + 1, workers=1 + 1, tasks=8 * 2),
    ]
    assert [re.findall(r"must allow (\d+) connections", each) for each in notes] == [[str(each)] for each in sums]
    assert ["4 for each core that Spark has" in each for each in notes] == [False, True, False]


# Invalid values


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("database.existingSecret=null", "/database"),
        ("database.existingSecret=", "/database/existingSecret"),
        ("database.url=postgresql://user:password@host/tarn", "/database"),
        ("adminKey.existingSecret=null", "/adminKey"),
        ("adminKey.value=0123456789abcdef", "/adminKey"),
        ("lake.uri=null", "/lake"),
        ("lake.uri=/data/lake", "/lake/uri"),
        ("apis.replicas=2", "apis"),
        ("api.replicas=two", "/api/replicas"),
        ("api.scratch=lots", "/api/scratch"),
        ("worker.tmp=0Gi", "/worker/tmp"),
        ("spark.memory=2GB", "/spark/memory"),
        ("spark.master=yarn", "/spark/master"),
        ("spark.executors.max=0", "/spark/executors/max"),
        ("spark.executors.scratch=", "/spark/executors/scratch"),
        ("api.autoscaling.cpu=0", "/api/autoscaling/cpu"),
        ("networkPolicy.monitoring=null", "/networkPolicy"),
        ("networkPolicy.clients[0].everybody=true", "/networkPolicy/clients/0"),
        ("networkPolicy.egress.closed[0]=everything", "/networkPolicy/egress/closed/0"),
        ("monitoring.serviceMonitor.interval=often", "/monitoring/serviceMonitor/interval"),
        ("service.port=9000", "/service/port"),
        ("backup.enabled=true", "/backup/place"),
        ("backup.place=/backups", "/backup/place"),
        ("backup.schedule=nightly", "/backup/schedule"),
        ("ingress.enabled=true", "/ingress/hosts"),
        ("fullnameOverride=No_Such_Name", "/fullnameOverride"),
        ("settings.TARN_LOG_LEVLE=debug", "TARN_LOG_LEVLE"),
        ("settings.TARN_LOG_LEVEL=loud", "/settings/TARN_LOG_LEVEL"),
        ("settings.TARN_DATABASE_POOL=0", "/settings/TARN_DATABASE_POOL"),
        ("settings.TARN_ADMIN_KEY=0123456789abcdef", "TARN_ADMIN_KEY"),
        ("extraEnv[0].name=TARN_LAKE_URI,extraEnv[0].value=s3://other", "/extraEnv/0/name"),
        ("extraEnv[0].name=AWS_SECRET_ACCESS_KEY,extraEnv[0].value=shown", "/extraEnv/0"),
    ],
)
def test_invalid_value_fails_lint_with_its_path(setting, path):
    done = lint("--values", MINIMAL, "--set", setting)
    assert done.returncode == 1
    assert "[ERROR] values.yaml" in done.stdout
    assert path in done.stdout


def test_lint_without_values_lists_all_required_values():
    output = lint().stdout
    assert all(place in output for place in ("/lake/uri", "/database/existingSecret", "/adminKey/existingSecret"))


def test_schema_has_every_setting_that_the_chart_does_not_set_with_the_same_limits():
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["settings"]["properties"] == offered(), "run `make docs`"


# Pods


def test_selectors_match_the_labels_of_their_own_pods_only(release):
    labels = {each: release.pod(each)["metadata"]["labels"].items() for each in COMPONENTS}
    selectors = {each: release.workload(each)["spec"]["selector"]["matchLabels"].items() for each in ("api", "worker")}
    services = {each["metadata"]["name"].split("-")[-1]: each["spec"] for each in release.of("Service")}
    api = next(spec for name, spec in services.items() if name != "metrics")

    def selected(selector) -> list[str]:
        return [each for each in COMPONENTS if selector <= labels[each]]

    assert selected(selectors["api"]) == ["api"]
    assert selected(selectors["worker"]) == ["worker"]
    assert selected(api["selector"].items()) == ["api"]
    assert selected(services["metrics"]["selector"].items()) == ["api", "worker", "migrate"]
    for budget in release.of("PodDisruptionBudget"):
        assert len(selected(budget["spec"]["selector"]["matchLabels"].items())) == 1


def test_each_workload_runs_its_command_of_the_image(release, component):
    container = release.container(component)
    assert container["args"] == [component]
    assert "command" not in container
    tag = release.values["image"]["tag"] or yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container["image"] == f"{release.values['image']['repository']}:{tag}"


def test_pods_have_restricted_security_contexts(release, component):
    pod, container = release.pod(component)["spec"], release.container(component)
    user, group = final_stage("USER")[0].text.split(":")
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": int(user),
        "runAsGroup": int(group),
        "fsGroup": int(group),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    creates_pods = component == "worker" and release.on_kubernetes
    assert pod["automountServiceAccountToken"] is creates_pods


def test_pods_have_no_service_links_as_tarn_would_refuse_them_as_unknown_settings(release, component):
    assert release.pod(component)["spec"]["enableServiceLinks"] is False


def test_volumes_of_the_image_are_mounted_with_a_size_limit(release, component):
    volumes = {each["name"]: each.get("emptyDir") for each in release.pod(component)["spec"]["volumes"]}
    writable = [each for each in release.container(component)["volumeMounts"] if not each.get("readOnly")]
    mounts = {each["mountPath"]: volumes[each["name"]] for each in writable}
    assert set(mounts) == set(final_stage("VOLUME")[0].parts)
    assert all(volume["sizeLimit"] for volume in mounts.values())


@pytest.mark.parametrize("role", ["api", "worker"])
def test_scratch_has_the_size_of_the_values(release, role):
    volumes = {
        each["name"]: each["emptyDir"]["sizeLimit"]
        for each in release.pod(role)["spec"]["volumes"]
        if "emptyDir" in each
    }
    assert volumes == {name: release.values[role][name] for name in ("scratch", "tmp")}


def test_every_container_has_requests_and_a_memory_limit(release, component):
    resources = release.container(component)["resources"]
    assert resources["requests"]["memory"]
    assert resources["requests"]["cpu"]
    assert resources["limits"]["memory"]


def test_termination_grace_period_is_longer_than_that_of_tarn(release):
    for role in ("api", "worker"):
        grace = int(release.environment(role)["TARN_SHUTDOWN_GRACE"]["value"])
        pause = (
            release.container(role).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1]
        )
        assert release.pod(role)["spec"]["terminationGracePeriodSeconds"] >= grace + int(pause) + 10


def test_probes_of_the_api_use_its_health_routes(release):
    container = release.container("api")
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes == {
        "startupProbe": {"path": "/healthz", "port": "http"},
        "livenessProbe": {"path": "/healthz", "port": "http"},
        "readinessProbe": {"path": "/readyz", "port": "http"},
    }


def test_container_ports_are_those_that_tarn_listens_on(release):
    api, worker = release.environment("api"), release.environment("worker")
    ports = {role: release.as_pod(role).ports for role in ("api", "worker")}
    assert ports["api"] == {"http": int(api["TARN_PORT"]["value"]), "metrics": int(api["TARN_METRICS_PORT"]["value"])}
    assert ports["worker"]["metrics"] == int(worker["TARN_WORKER_METRICS_PORT"]["value"])
    for service in release.of("Service"):
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= set(ports["api"])


# Settings and secrets


def test_secrets_are_references_and_none_is_created(release, component):
    environment = release.environment(component)
    by_reference = {name for name, each in environment.items() if "secretKeyRef" in each.get("valueFrom", {})}
    assert {"TARN_DATABASE_URL", "TARN_ADMIN_KEY"} <= by_reference
    assert SECRET & set(environment) <= by_reference
    assert release.of("Secret") == []


def test_storage_options_are_a_reference_if_configured_and_absent_otherwise(release):
    secret = release.values["lake"]["storageOptions"]["existingSecret"] or None
    variable = release.environment("worker").get(
        "TARN_STORAGE_OPTIONS", {"valueFrom": {"secretKeyRef": {"name": None}}}
    )
    assert variable["valueFrom"]["secretKeyRef"]["name"] == secret


def test_backup_job_exists_only_if_enabled_and_has_the_security_context_of_other_pods(release):
    jobs = release.of("CronJob")
    assert len(jobs) == release.values["backup"]["enabled"]
    for job in jobs:
        pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert job["spec"]["concurrencyPolicy"] == "Forbid"
        assert container["args"] == ["backup", release.values["backup"]["place"], "--keep", "28"]
        assert pod["securityContext"] == release.pod("api")["spec"]["securityContext"]
        assert container["securityContext"] == release.container("api")["securityContext"]
        assert (pod["enableServiceLinks"], pod["automountServiceAccountToken"]) == (False, False)
        variables = {each["name"]: each for each in container["env"]}
        assert variables.keys() == release.environment("migrate").keys() | {"TARN_BACKUP_OPTIONS"}
        assert all("secretKeyRef" in variables[name]["valueFrom"] for name in SECRET & variables.keys())


def test_fetch_stores_are_a_reference_if_configured_and_absent_otherwise(release):
    secret = release.values["fetch"]["stores"]["existingSecret"] or None
    variable = release.environment("api").get("TARN_FETCH_STORES", {"valueFrom": {"secretKeyRef": {"name": None}}})
    assert variable["valueFrom"]["secretKeyRef"]["name"] == secret


def test_spark_secret_is_a_reference_if_configured_and_for_workers_only(release):
    secret = release.values["spark"]["secret"]["existingSecret"] or None
    variable = release.environment("worker").get("TARN_SPARK_SECRET", {"valueFrom": {"secretKeyRef": {"name": None}}})
    assert variable["valueFrom"]["secretKeyRef"]["name"] == secret
    assert "TARN_SPARK_SECRET" not in release.environment("api")


def test_tarn_accepts_the_settings_of_every_pod(release, component, monkeypatch):
    secret_values = {
        "TARN_DATABASE_URL": "postgresql://tarn@database/tarn",
        "TARN_STORAGE_OPTIONS": "{}",
        "TARN_FETCH_STORES": "{}",
        "TARN_ADMIN_KEY": "0123456789abcdef",
        "TARN_SPARK_SECRET": "0123456789abcdef",
    }
    variables = {
        name: each.get("value", secret_values.get(name, "")) for name, each in release.environment(component).items()
    }
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in (image_environment() | variables).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert {name for name in variables if name.startswith(PREFIX)} <= {
        PREFIX + name.upper() for name in Settings.model_fields
    }
    assert settings.host == "0.0.0.0"
    assert settings.lake_uri == release.values["lake"]["uri"]
    configured = {name: value for name, value in release.values["settings"].items() if name != "TARN_CORS_ORIGINS"}
    assert {name: getattr(settings, name.removeprefix(PREFIX).lower()) for name in configured} == configured


# Other objects


def test_migration_is_a_hook_before_the_release_and_uses_none_of_its_objects(release):
    job = release.workload("migrate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert "before-hook-creation" in job["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    accounts = {each["metadata"]["name"] for each in release.of("ServiceAccount")}
    assert release.pod("migrate")["spec"].get("serviceAccountName") not in accounts
    assert release.pod("migrate")["spec"]["restartPolicy"] == "Never"


def test_pods_use_the_service_account_with_the_configured_annotations(release):
    (account,) = release.of("ServiceAccount")
    annotations = release.values["serviceAccount"].get("annotations", {})
    assert account["metadata"].get("annotations", {}) == annotations
    for role in ("api", "worker"):
        assert release.pod(role)["spec"]["serviceAccountName"] == account["metadata"]["name"]


def test_existing_service_account_is_used_by_every_pod():
    release = Release({}, render(MINIMAL, "--set", "serviceAccount.create=false,serviceAccount.name=ours"))
    assert release.of("ServiceAccount") == []
    assert {release.pod(each)["spec"]["serviceAccountName"] for each in COMPONENTS} == {"ours"}


def test_metrics_are_not_exposed_by_a_load_balancer():
    api, metrics = Release({}, render(MINIMAL, "--set", "service.type=LoadBalancer")).of("Service")
    assert [each["name"] for each in api["spec"]["ports"]] == ["http"]
    assert (metrics["spec"]["clusterIP"], metrics["spec"].get("type", "ClusterIP")) == ("None", "ClusterIP")


def test_ingress_routes_to_the_api_port_of_the_service():
    release = Release({}, render(FULL))
    (ingress,) = release.of("Ingress")
    service, _metrics = release.of("Service")
    backends = [path["backend"]["service"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
    assert backends == [{"name": service["metadata"]["name"], "port": {"name": "http"}}] * 2
    assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"] for rule in ingress["spec"]["rules"]]


def test_long_release_name_gives_valid_object_names():
    done = helm("template", "r" * 53, CHART, "--kube-version", OLDEST, "--values", CLUSTER)
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(done.stdout)]
    kinds = [(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(done.stdout)]
    assert len(kinds) == len(set(kinds))
    assert max(len(name) for name in names) <= 63


# Replicas


def test_deployment_of_the_api_has_no_replicas_if_autoscaling_is_enabled():
    cluster, minimal = rendered(CLUSTER), rendered(MINIMAL)
    (scaler,) = cluster.of("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == cluster.workload("api")["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 12)
    assert "replicas" not in cluster.workload("api")["spec"]
    assert cluster.container("api")["resources"]["requests"]["cpu"], "autoscaling by CPU needs a request"
    assert minimal.of("HorizontalPodAutoscaler") == []
    assert minimal.workload("api")["spec"]["replicas"] == 2


def test_disruption_budgets_allow_one_unavailable_pod_per_component(release):
    budgets = {each["metadata"]["name"]: each["spec"]["maxUnavailable"] for each in release.of("PodDisruptionBudget")}
    assert budgets == {release.workload(role)["metadata"]["name"]: 1 for role in ("api", "worker")}

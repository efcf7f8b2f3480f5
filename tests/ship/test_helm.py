"""The chart, rendered by Helm for every value set in `ci/` and judged by what Kubernetes would be told."""

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from app.settings import PREFIX, Settings, load_settings
from tests.ship.chart_settings import SECRET, offered
from tests.ship.dockerfile import ROOT, final_stage, image_environment

CHART = ROOT / "helm" / "tarn"
HELM = ROOT / ".tools" / "bin" / "helm"
VALUE_SETS = sorted((CHART / "ci").glob("*-values.yaml"))
MINIMAL = CHART / "ci" / "minimal-values.yaml"
OLDEST, NEWEST = all_versions()[0], all_versions()[-1]

COMPONENTS = ("api", "worker", "migrate")


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm, or skip the test where it is not built."""
    if not HELM.exists():
        pytest.skip("Helm is not in .tools/bin: `make tools` builds it where Go is installed")
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=False)


def lint(*arguments: str | Path, version: str = OLDEST) -> subprocess.CompletedProcess[str]:
    return helm("lint", "--strict", "--kube-version", version, CHART, *arguments)


def render(values: Path, *arguments: str, chart: Path = CHART, version: str = OLDEST) -> list[dict[str, Any]]:
    done = helm("template", "lake", chart, "--kube-version", version, "--values", values, *arguments)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


class Release(NamedTuple):
    """The objects of one value set."""

    values: dict[str, Any]
    objects: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    def workload(self, component: str) -> dict[str, Any]:
        (found,) = (
            each
            for each in self.objects
            if each["kind"] in ("Deployment", "Job")
            and each["metadata"]["labels"]["app.kubernetes.io/component"] == component
        )
        return found

    def pod(self, component: str) -> Any:
        return self.workload(component)["spec"]["template"]

    def container(self, component: str) -> Any:
        (only,) = self.pod(component)["spec"]["containers"]
        return only

    def environment(self, component: str) -> dict[str, dict[str, Any]]:
        variables = self.container(component)["env"]
        names = [each["name"] for each in variables]
        assert len(names) == len(set(names)), "a variable is given twice"
        return {each["name"]: each for each in variables}


@pytest.fixture(scope="module", params=VALUE_SETS, ids=lambda path: path.stem)
def release(request) -> Release:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    values = yaml.safe_load(request.param.read_text())
    return Release({**defaults, **values}, render(request.param))


@pytest.fixture(params=COMPONENTS)
def component(request):
    return request.param


# The chart as a whole


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("values", VALUE_SETS, ids=lambda path: path.stem)
def test_helm_lint_is_content_with_every_value_set(values, version):
    done = lint("--values", values, version=version)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("values", VALUE_SETS, ids=lambda path: path.stem)
def test_every_object_is_valid_in_the_oldest_and_newest_kubernetes(values, version):
    objects = render(values, version=version)
    assert {"Deployment", "Service", "Job"} <= {each["kind"] for each in objects}
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def test_the_oldest_kubernetes_checked_is_the_oldest_the_chart_accepts():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}-0"


def test_the_chart_ships_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]


def test_the_full_value_set_names_every_value():
    def paths(values: dict[str, Any], above: str = "") -> set[str]:
        nested = [paths(value, f"{above}{key}.") for key, value in values.items() if isinstance(value, dict) and value]
        return {f"{above}{key}" for key in values}.union(*nested)

    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    full = yaml.safe_load((CHART / "ci" / "full-values.yaml").read_text())
    assert paths(defaults) - paths(full) == set()


def test_the_notes_name_the_secret_of_the_key_and_where_the_api_answers(tmp_path):
    """Helm shows notes only at an install, so a template of the test's own carries them out."""
    chart = tmp_path / "tarn"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "carrier.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: carrier}\n"
        'data: {notes: {{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}}\n'
    )
    notes = [
        Release({}, render(values, chart=chart)).of("ConfigMap")[0]["data"]["notes"]
        for values in (MINIMAL, CHART / "ci" / "full-values.yaml")
    ]
    assert "lake-tarn.default:80" in notes[0]
    assert "secret tarn-admin, under admin-key" in notes[0]
    assert "https://lake.example.com" in notes[1]


# Wrong values


@pytest.mark.parametrize(
    ("setting", "place"),
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
        ("service.port=9000", "/service/port"),
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
def test_a_wrong_value_fails_lint_and_is_named(setting, place):
    done = lint("--values", MINIMAL, "--set", setting)
    assert done.returncode == 1
    assert "[ERROR] values.yaml" in done.stdout
    assert place in done.stdout


def test_without_any_values_lint_names_everything_that_is_needed():
    said = lint().stdout
    assert all(place in said for place in ("/lake/uri", "/database/existingSecret", "/adminKey/existingSecret"))


def test_the_schema_offers_every_setting_that_the_chart_does_not_set_with_the_same_limits():
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["settings"]["properties"] == offered(), "run `make docs`"


# Pods


def test_selectors_match_the_labels_of_their_own_pods_only(release):
    labels = {each: release.pod(each)["metadata"]["labels"].items() for each in COMPONENTS}
    selectors = {each: release.workload(each)["spec"]["selector"]["matchLabels"].items() for each in ("api", "worker")}
    (service,) = release.of("Service")

    def selected(selector) -> list[str]:
        return [each for each in COMPONENTS if selector <= labels[each]]

    assert selected(selectors["api"]) == ["api"]
    assert selected(selectors["worker"]) == ["worker"]
    assert selected(service["spec"]["selector"].items()) == ["api"]


def test_each_workload_runs_its_command_of_the_image(release, component):
    container = release.container(component)
    assert container["args"] == [component]
    assert "command" not in container
    tag = release.values["image"]["tag"] or yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container["image"] == f"{release.values['image']['repository']}:{tag}"


def test_pods_are_locked_down(release, component):
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
    assert pod["automountServiceAccountToken"] is False


def test_pods_get_no_service_links_which_tarn_would_refuse_as_unknown_settings(release, component):
    assert release.pod(component)["spec"]["enableServiceLinks"] is False


def test_what_the_image_writes_to_is_a_sized_volume(release, component):
    volumes = {each["name"]: each["emptyDir"] for each in release.pod(component)["spec"]["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in release.container(component)["volumeMounts"]}
    assert set(mounts) == set(final_stage("VOLUME")[0].parts)
    assert all(volume["sizeLimit"] for volume in mounts.values())


@pytest.mark.parametrize("role", ["api", "worker"])
def test_scratch_has_the_size_of_the_values(release, role):
    volumes = {each["name"]: each["emptyDir"]["sizeLimit"] for each in release.pod(role)["spec"]["volumes"]}
    assert volumes == {name: release.values[role][name] for name in ("scratch", "tmp")}


def test_every_container_asks_for_and_is_limited_in_memory(release, component):
    resources = release.container(component)["resources"]
    assert resources["requests"]["memory"]
    assert resources["requests"]["cpu"]
    assert resources["limits"]["memory"]


def test_kubernetes_waits_longer_for_a_pod_than_tarn_for_its_requests(release):
    for role in ("api", "worker"):
        grace = int(release.environment(role)["TARN_SHUTDOWN_GRACE"]["value"])
        pause = (
            release.container(role).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1]
        )
        assert release.pod(role)["spec"]["terminationGracePeriodSeconds"] >= grace + int(pause) + 10


def test_the_api_is_probed_where_it_answers(release):
    container = release.container("api")
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes == {
        "startupProbe": {"path": "/healthz", "port": "http"},
        "livenessProbe": {"path": "/healthz", "port": "http"},
        "readinessProbe": {"path": "/readyz", "port": "http"},
    }


def test_ports_are_the_ones_tarn_listens_on(release):
    environment = release.environment("api")
    ports = {each["name"]: str(each["containerPort"]) for each in release.container("api")["ports"]}
    assert ports == {"http": environment["TARN_PORT"]["value"], "metrics": environment["TARN_METRICS_PORT"]["value"]}
    (service,) = release.of("Service")
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= set(ports)


# Settings and secrets


def test_secrets_are_references_and_none_is_made(release, component):
    environment = release.environment(component)
    by_reference = {name for name, each in environment.items() if "secretKeyRef" in each.get("valueFrom", {})}
    assert {"TARN_DATABASE_URL", "TARN_ADMIN_KEY"} <= by_reference
    assert SECRET & set(environment) <= by_reference
    assert release.of("Secret") == []


def test_storage_options_are_a_reference_where_one_is_given_and_absent_where_the_pods_own_identity_is_used(release):
    secret = release.values["lake"].get("storageOptions", {}).get("existingSecret")
    given = release.environment("worker").get("TARN_STORAGE_OPTIONS", {"valueFrom": {"secretKeyRef": {"name": None}}})
    assert given["valueFrom"]["secretKeyRef"]["name"] == secret


def test_stores_to_fetch_from_are_a_reference_where_one_is_given_and_absent_elsewhere(release):
    secret = release.values["fetch"]["stores"]["existingSecret"] or None
    given = release.environment("api").get("TARN_FETCH_STORES", {"valueFrom": {"secretKeyRef": {"name": None}}})
    assert given["valueFrom"]["secretKeyRef"]["name"] == secret


def test_tarn_accepts_the_settings_of_every_pod(release, component, monkeypatch):
    stand_ins = {
        "TARN_DATABASE_URL": "postgresql://tarn@database/tarn",
        "TARN_STORAGE_OPTIONS": "{}",
        "TARN_FETCH_STORES": "{}",
        "TARN_ADMIN_KEY": "0123456789abcdef",
    }
    given = {name: each.get("value", stand_ins.get(name, "")) for name, each in release.environment(component).items()}
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in (image_environment() | given).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert {name for name in given if name.startswith(PREFIX)} <= {
        PREFIX + name.upper() for name in Settings.model_fields
    }
    assert settings.host == "0.0.0.0"
    assert settings.lake_uri == release.values["lake"]["uri"]
    asked = {name: value for name, value in release.values["settings"].items() if name != "TARN_CORS_ORIGINS"}
    assert {name: getattr(settings, name.removeprefix(PREFIX).lower()) for name in asked} == asked


# Around the pods


def test_the_migration_runs_before_anything_else_and_needs_nothing_of_the_release(release):
    job = release.workload("migrate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert "before-hook-creation" in job["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    made = {each["metadata"]["name"] for each in release.of("ServiceAccount")}
    assert release.pod("migrate")["spec"].get("serviceAccountName") not in made
    assert release.pod("migrate")["spec"]["restartPolicy"] == "Never"


def test_pods_act_as_the_service_account_that_carries_the_identity(release):
    (account,) = release.of("ServiceAccount")
    annotations = release.values["serviceAccount"].get("annotations", {})
    assert account["metadata"].get("annotations", {}) == annotations
    for role in ("api", "worker"):
        assert release.pod(role)["spec"]["serviceAccountName"] == account["metadata"]["name"]


def test_a_service_account_made_elsewhere_is_used_by_every_pod():
    release = Release({}, render(MINIMAL, "--set", "serviceAccount.create=false,serviceAccount.name=ours"))
    assert release.of("ServiceAccount") == []
    assert {release.pod(each)["spec"]["serviceAccountName"] for each in COMPONENTS} == {"ours"}


def test_metrics_are_not_offered_outside_the_cluster():
    (service,) = Release({}, render(MINIMAL, "--set", "service.type=LoadBalancer")).of("Service")
    assert [each["name"] for each in service["spec"]["ports"]] == ["http"]


def test_the_ingress_leads_to_the_api_port_of_the_service():
    release = Release({}, render(CHART / "ci" / "full-values.yaml"))
    (ingress,) = release.of("Ingress")
    (service,) = release.of("Service")
    backends = [path["backend"]["service"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
    assert backends == [{"name": service["metadata"]["name"], "port": {"name": "http"}}] * 2
    assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"] for rule in ingress["spec"]["rules"]]


def test_a_long_release_name_still_makes_valid_names():
    done = helm("template", "r" * 53, CHART, "--kube-version", OLDEST, "--values", MINIMAL)
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(done.stdout)]
    assert len(names) == len(set(names)) + 1  # the service and its account share theirs
    assert max(len(name) for name in names) <= 63

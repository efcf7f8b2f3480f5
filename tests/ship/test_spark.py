"""Spark on Kubernetes: the configuration that the chart renders, and a run of it against a minimal API server."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tarn.errors import StartRefused
from tarn.pipeline.executor import ARGUMENTS, executor_command
from tarn.pipeline.session import Sessions
from tarn.settings import load_settings
from tarn.storage.connection import Connection

from tests.s3 import moto_server
from tests.ship.chart import CLUSTER, FULL, MINIMAL, NEWEST, Release, release
from tests.ship.cluster import ADDRESS, cluster
from tests.ship.dockerfile import final_stage
from tests.storage.test_connection import READ_BY_ALL, read, write

SPARK = {name: f"{name}-value" for name in ARGUMENTS.values()} | {"SPARK_EXECUTOR_MEMORY": "1g"}


@pytest.fixture
def chart() -> Release:
    return release(CLUSTER)


def submitted(chart: Release) -> dict[str, str]:
    """Return the properties that a worker's pod passes to Spark."""
    arguments = chart.environment("worker")["PYSPARK_SUBMIT_ARGS"]["value"]
    *words, last = shlex.split(arguments)
    assert last == "pyspark-shell"
    assert set(words[::2]) == {"--conf"}
    return dict(word.split("=", 1) for word in words[1::2])


# Rendered objects


def test_executor_template_is_a_valid_pod_with_the_security_context_of_a_worker(chart):
    pod = chart.executor()
    (container,) = pod["spec"]["containers"]
    placed = pod | {"spec": pod["spec"] | {"containers": [container | {"image": "tarn"}]}}
    kubernetes_validate.validate(placed | {"metadata": pod["metadata"] | {"name": "x"}}, NEWEST, strict=True)
    assert pod["spec"]["securityContext"] == chart.pod("worker")["spec"]["securityContext"]
    assert container["securityContext"] == chart.container("worker")["securityContext"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["enableServiceLinks"] is False
    assert container["name"] == chart.spark()["spark.kubernetes.executor.podTemplateContainerName"]


def test_executors_have_the_image_and_identity_of_the_worker(chart):
    spark = chart.spark()
    (account,) = chart.of("ServiceAccount")
    assert spark["spark.kubernetes.container.image"] == chart.container("worker")["image"]
    assert spark["spark.kubernetes.authenticate.executor.serviceAccountName"] == account["metadata"]["name"]
    assert account["metadata"]["annotations"]
    assert chart.executor()["spec"]["containers"][0]["env"] == chart.values["extraEnv"]
    assert [each["name"] for each in chart.executor()["spec"]["imagePullSecrets"]] == ["pull", "other"]


def test_executor_writes_only_to_volumes_with_a_size_limit(chart):
    spark, prefix = chart.spark(), "spark.kubernetes.executor.volumes.emptyDir.spark-local-dir-1"
    mounts = {each["mountPath"] for each in chart.executor()["spec"]["containers"][0]["volumeMounts"]}
    assert mounts | {spark[f"{prefix}.mount.path"]} == set(final_stage("VOLUME")[0].parts)
    assert spark[f"{prefix}.options.sizeLimit"] == "40Gi"
    assert [each["emptyDir"]["sizeLimit"] for each in chart.executor()["spec"]["volumes"]] == ["2Gi"]


def test_driver_uses_the_ports_that_the_network_policy_allows(chart):
    spark, ports = chart.spark(), chart.as_pod("worker").ports
    assert ports["driver"] == int(spark["spark.driver.port"])
    assert ports["blocks"] == int(spark["spark.driver.blockManager.port"]) == int(spark["spark.blockManager.port"])
    assert submitted(chart) == {
        "spark.kubernetes.driver.pod.name": "$(POD_NAME)",
        "spark.driver.host": "$(POD_IP)",
    }
    names = [*chart.environment("worker")]
    assert max(map(names.index, ("POD_NAME", "POD_IP"))) < names.index("PYSPARK_SUBMIT_ARGS"), (
        "Kubernetes substitutes only variables that are defined before"
    )


def test_changed_spark_defaults_restart_the_worker(chart):
    other = release(CLUSTER, "--set", "spark.executors.max=9")
    annotations = [each.pod("worker")["metadata"]["annotations"] for each in (chart, other)]
    assert annotations[0] != annotations[1]


@pytest.mark.parametrize("values", [MINIMAL, FULL], ids=["local", "standalone"])
def test_worker_has_no_role_unless_spark_runs_on_kubernetes(values):
    without = release(values)
    assert without.of("Role") == without.of("RoleBinding") == []
    assert "PYSPARK_SUBMIT_ARGS" not in without.environment("worker")


def test_role_is_bound_to_the_workers_account_and_has_no_wildcards(chart):
    (role,), (binding,) = chart.of("Role"), chart.of("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == chart.pod("worker")["spec"]["serviceAccountName"]
    assert chart.of("ClusterRole") == []
    assert not any("*" in rule[part] for rule in role["rules"] for part in ("verbs", "resources", "apiGroups"))
    assert "secrets" not in [each for rule in role["rules"] for each in rule["resources"]]


# The executor's command


def test_executor_command_has_the_arguments_of_spark_in_order():
    variables = SPARK | {"SPARK_JAVA_OPT_10": "-Dlast", "SPARK_JAVA_OPT_2": "-Dfirst", "JAVA_HOME": "/java"}
    command = executor_command(variables)
    assert command[0] == "/java/bin/java"
    assert command.index("-Dfirst") < command.index("-Dlast") < command.index("-Xmx1g")
    assert command[-2:] == ["--resourceProfileId", "SPARK_RESOURCE_PROFILE_ID-value"]
    assert command[command.index("--hostname") + 1] == "SPARK_EXECUTOR_POD_IP-value"


def test_executor_without_an_argument_of_spark_is_refused():
    with pytest.raises(StartRefused, match="SPARK_DRIVER_URL"):
        executor_command({name: value for name, value in SPARK.items() if name != "SPARK_DRIVER_URL"})


# A run on the minimal cluster


def reads_as(connection: Connection) -> tuple[str, Any, str]:
    """Run in an executor: return its id, what each library reads from the lake, and the access key."""
    keys = connection.keys()
    assert keys is not None
    return os.environ["SPARK_EXECUTOR_ID"], read(connection), keys.access_key_id


@pytest.mark.long
@pytest.mark.xdist_group("spark")
def test_worker_gets_executors_that_read_the_lake_with_their_own_identity_and_releases_them(
    chart: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Spark uses the rendered defaults and pod template, its pods run `tarn executor`, the role allows every request,
    and the keys of the pods come only from the variables that a webhook adds.
    """
    (tmp_path / "token").write_text("a-token-of-the-cluster")
    with moto_server() as s3:
        webhook = {
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/tarn",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
            "AWS_ENDPOINT_URL_STS": s3.endpoint,
        }
        with cluster(tmp_path, **webhook) as kubernetes:
            kubernetes.add_driver("worker-0")
            for name, value in (webhook | {"AWS_ENDPOINT_URL": s3.endpoint}).items():
                monkeypatch.setenv(name, value)
            connection = Connection.from_settings(s3.settings(storage_options={}))
            write(connection)
            sessions = Sessions(_worker_settings(chart, kubernetes.url, tmp_path, monkeypatch))
            try:
                context = sessions.current().sparkContext
                results = context.parallelize(range(2), 2).map(lambda _: reads_as(connection)).collect()
            finally:
                sessions.close()
            requests, pods = set(kubernetes.requests), kubernetes.created_pods
            remaining = {kind for kind, _ in kubernetes.objects}
            exit_codes = [process.wait(60) for process in kubernetes.processes.values()]

    assert [(seen, keys[:4]) for _, seen, keys in results] == [(READ_BY_ALL, "ASIA")] * 2
    assert {executor for executor, _, _ in results} <= {str(number) for number in range(1, len(pods) + 1)}
    assert _allowed(chart) >= {(each.verb, each.resource) for each in requests}
    assert ("create", "pods") in requests
    assert (remaining, len(kubernetes.objects), len(exit_codes)) == ({"pods"}, 1, len(pods)), "only the driver is left"
    _check_pod(chart, pods[0])


def _worker_settings(chart: Release, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Set the environment of the chart's worker with local paths, and return its settings."""
    spark = chart.spark()
    template = folder / "executor.yaml"
    template.write_text(yaml.safe_dump(chart.executor()))
    local_settings = {
        "spark.kubernetes.executor.podTemplateFile": str(template),
        # Concurrent runs of this test must not use the same port.
        "spark.driver.port": "0",
        "spark.driver.blockManager.port": "0",
        "spark.blockManager.port": "0",
        "spark.kubernetes.executor.apiPollingInterval": "1s",
        "spark.kubernetes.allocation.batch.delay": "200ms",
    }
    assert local_settings.keys() - spark.keys() == {
        "spark.kubernetes.executor.apiPollingInterval",
        "spark.kubernetes.allocation.batch.delay",
    }
    lines = (f"{name} {value}" for name, value in (spark | local_settings).items())
    (folder / "spark-defaults.conf").write_text("\n".join(lines))
    known = {"POD_NAME": "worker-0", "POD_IP": ADDRESS}
    arguments = chart.environment("worker")["PYSPARK_SUBMIT_ARGS"]["value"]
    monkeypatch.setenv("SPARK_CONF_DIR", str(folder))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], arguments))
    assert chart.environment("worker")["SPARK_CONF_DIR"]["value"] == str(
        Path(spark["spark.kubernetes.executor.podTemplateFile"]).parent
    )
    return load_settings(
        spark_master=f"k8s://{url}", spark_memory="512m", database_url="postgresql://tarn@database/tarn"
    )


def _allowed(chart: Release) -> set[tuple[str, str]]:
    (role,) = chart.of("Role")
    return {(verb, what) for rule in role["rules"] for verb in rule["verbs"] for what in rule["resources"]}


def _check_pod(chart: Release, pod: dict) -> None:
    """Assert that the pod that Spark created from the template keeps the properties of the template."""
    kubernetes_validate.validate(pod, NEWEST, strict=True)
    (container,) = pod["spec"]["containers"]
    template = chart.executor()
    assert template["metadata"]["labels"].items() <= pod["metadata"]["labels"].items()
    assert container["image"] == chart.container("worker")["image"]
    assert container["args"] == ["executor"]
    assert container["securityContext"] == template["spec"]["containers"][0]["securityContext"]
    assert pod["spec"]["securityContext"] == template["spec"]["securityContext"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["serviceAccountName"] == chart.pod("worker")["spec"]["serviceAccountName"]
    assert pod["metadata"]["ownerReferences"][0]["name"] == "worker-0"
    sizes = {each["name"]: each["emptyDir"].get("sizeLimit") for each in pod["spec"]["volumes"]}
    mounts = {each["mountPath"]: sizes[each["name"]] for each in container["volumeMounts"]}
    assert mounts == {"/scratch": "40Gi", "/tmp": "2Gi"}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["SPARK_LOCAL_DIRS"] == "/scratch"
    assert variables["AWS_REGION"] == "eu-central-1"
    assert sys.executable not in variables.values()
    assert container["resources"]["limits"]["cpu"] == "2"
    assert container["resources"]["limits"]["memory"] == "2012Mi"

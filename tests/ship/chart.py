"""The chart as Helm renders it, and accessors for the rendered objects."""

import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from kubernetes_validate.utils import all_versions

from tests.ship.dockerfile import ROOT
from tests.ship.network import Pod

CHART = ROOT / "helm" / "tarn"
HELM = ROOT / ".tools" / "bin" / "helm"
VALUE_SETS = sorted((CHART / "ci").glob("*-values.yaml"))
MINIMAL, FULL, CLUSTER = (CHART / "ci" / f"{name}-values.yaml" for name in ("minimal", "full", "kubernetes"))
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
    """The objects rendered from one value set."""

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

    @property
    def on_kubernetes(self) -> bool:
        """Whether Spark runs its executors as pods."""
        return self.values["spark"]["master"].startswith("k8s://")

    def spark(self) -> dict[str, str]:
        """Return Spark's default configuration in a worker."""
        (config,) = (each["data"] for each in self.of("ConfigMap") if "spark-defaults.conf" in each["data"])
        return dict(line.split(maxsplit=1) for line in config["spark-defaults.conf"].splitlines())

    def executor(self) -> dict[str, Any]:
        """Return the pod template of an executor."""
        (config,) = (each["data"] for each in self.of("ConfigMap") if "executor.yaml" in each["data"])
        return yaml.safe_load(config["executor.yaml"])

    def as_pod(self, component: str) -> Pod:
        """Return the labels and ports of a component's pod, for network policies."""
        template = self.executor() if component == "executor" else self.pod(component)
        (container,) = template["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
        return Pod(template["metadata"]["labels"], ports=ports)

    def environment(self, component: str) -> dict[str, dict[str, Any]]:
        variables = self.container(component)["env"]
        names = [each["name"] for each in variables]
        assert len(names) == len(set(names)), "a variable is set twice"
        return {each["name"]: each for each in variables}


@cache
def release(values: Path, *arguments: str, version: str = OLDEST) -> Release:
    """Render the chart with these values, merged over its defaults."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    return Release(_merge(defaults, yaml.safe_load(values.read_text())), render(values, *arguments, version=version))


def _merge(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    nested = {
        key: _merge(defaults[key], values[key]) for key in defaults.keys() & values if isinstance(values[key], dict)
    }
    return defaults | values | nested

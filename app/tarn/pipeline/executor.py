"""Command line of a Spark executor on Kubernetes.

Executors run in the same image as the worker. Spark starts the container with the argument `executor` and passes
everything else in environment variables.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tarn.errors import StartRefused

BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
LOGGING = Path(__file__).with_name("log4j2.properties")
OPTION = "SPARK_JAVA_OPT_"

ARGUMENTS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
}


def executor_command(environment: Mapping[str, str]) -> list[str]:
    """Return the command that Spark's own image would run. Raises StartRefused outside of a pod that Spark created."""
    missing = sorted({*ARGUMENTS.values(), "SPARK_EXECUTOR_MEMORY"} - set(environment))
    if missing:
        raise StartRefused(
            f"the environment variable {missing[0]} is not set: only Spark on Kubernetes can start an executor"
        )
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    home = environment.get("JAVA_HOME")
    return [
        f"{home}/bin/java" if home else "java",
        f"-Dlog4j2.configurationFile={LOGGING.as_uri()}",
        *_java_options(environment),
        f"-Xms{memory}",
        f"-Xmx{memory}",
        "-cp",
        os.pathsep.join([*filter(None, [environment.get("SPARK_CONF_DIR")]), f"{_spark()}/jars/*"]),
        BACKEND,
        *(word for option, variable in ARGUMENTS.items() for word in (option, environment[variable])),
    ]


def _java_options(environment: Mapping[str, str]) -> list[str]:
    numbers = sorted(int(name.removeprefix(OPTION)) for name in environment if name.startswith(OPTION))
    return [environment[f"{OPTION}{number}"] for number in numbers]


def _spark() -> str:
    """Return the folder in which pip installed Spark."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(iter(spec.submodule_search_locations))

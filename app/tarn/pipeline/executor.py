"""An executor of Spark on Kubernetes, in the image that the worker runs in: Spark asks for `executor` and says the rest
in the environment."""

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
    """What Spark's own image would run. Raises StartRefused outside of a pod that Spark made."""
    missing = sorted({*ARGUMENTS.values(), "SPARK_EXECUTOR_MEMORY"} - set(environment))
    if missing:
        raise StartRefused(f"an executor is started by Spark on Kubernetes, which sets {missing[0]}")
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
    """Where pip put Spark."""
    found = find_spec("pyspark")
    assert found is not None
    assert found.submodule_search_locations is not None
    return next(iter(found.submodule_search_locations))

"""Secrets configured by the operator of a Spark cluster. A process has one Spark session at a time, so none is
shared here.
"""

from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from tarn.errors import Unavailable
from tarn.pipeline.session import Sessions
from tarn.settings import Settings, load_settings

from tests.pipeline.unauthenticated_client import ask_without_secret, jvm_process

pytestmark = pytest.mark.xdist_group("spark")


@pytest.mark.long
def test_configured_secret_is_used_and_is_on_no_command_line():
    secret = "a-secret-that-an-operator-chose"
    sessions = Sessions(load_settings(spark_master="local-cluster[1,1,512]", spark_memory="512m", spark_secret=secret))
    sessions._end()
    try:
        context = sessions.current().sparkContext
        result = context.parallelize([1], 1).map(lambda number: number + 1).collect()
        with pytest.raises(Py4JJavaError):
            ask_without_secret(context, int(context.getConf().get("spark.driver.port", "")))
        process = jvm_process(context)
        commands = [each.cmdline() for each in (process, *process.children(recursive=True))]
        configured = context.getConf().get("spark.authenticate.secret")
    finally:
        sessions.close()

    assert (result, configured) == ([2], secret)
    assert any("CoarseGrainedExecutorBackend" in word for command in commands for word in command)
    assert not [command for command in commands if any(secret in word for word in command)]


def test_standalone_master_without_a_secret_is_refused_with_the_setting_to_set(
    settings: Settings, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    remote = settings.model_copy(update={"spark_master": "spark://127.0.0.1:1", "spark_memory": "512m"})
    sessions = Sessions(remote)
    sessions._end()
    try:
        with pytest.raises(Unavailable, match="TARN_SPARK_SECRET"):
            sessions.current()
    finally:
        sessions.close()

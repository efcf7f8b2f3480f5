"""The Spark session of a worker."""

import os
import secrets
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock, local

import structlog
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

import tarn
from tarn.errors import Unavailable
from tarn.settings import Settings

log = structlog.get_logger(__name__)


SECRET = "spark.authenticate.secret"  # noqa: S105 - the name of an option
LOGGING = Path(__file__).with_name("log4j2.properties")


class Sessions:
    """The session that holds now: started when it is first needed, and again if its JVM died.

    Threads share it. One that finds it broken discards it, unless another thread has started a new one by then.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: SparkSession | None = None
        self._lock = Lock()
        self._used = local()
        """The session that a thread was given last."""

    def current(self) -> SparkSession:
        """Raises Unavailable if none can be had."""
        with self._lock:
            if self._session is not None and not _is_alive(self._session):
                log.warning("Spark is gone, and is started again")
                self._end()
            if self._session is None:
                self._session = start_session(self._settings)
            self._used.session = self._session
            return self._session

    def begin(self) -> None:
        """Say that this thread begins something else: what it was given before does not matter any more."""
        self._used.session = None

    def is_stale(self) -> bool:
        """Whether the session that this thread was given has ended since."""
        used = getattr(self._used, "session", None)
        return used is not None and used is not self._session

    def discard(self) -> None:
        """End the session that this thread was given, unless it has ended already: the next is somebody else's."""
        with self._lock:
            if getattr(self._used, "session", None) is self._session:
                self._end()

    def cancel(self) -> None:
        """End what runs on Spark now: whoever waits for it gets an error. Another thread may be amid a start."""
        session = self._session
        if session is not None:
            with suppress(Exception):
                session.sparkContext.cancelAllJobs()

    def close(self) -> None:
        """Stop Spark, end its JVM, and forget every trace of it that PySpark keeps. It may be half dead in any way."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                session.stop()
        gateway = SparkContext._gateway
        if gateway is not None:
            with suppress(Exception):
                gateway.shutdown()
            _end(getattr(gateway, "proc", None))
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None


def start_session(settings: Settings) -> SparkSession:
    """A session on the configured master, quiet and without a UI. Raises Unavailable.

    Whoever talks to the driver or to an executor must know a secret, and what passes between them is encrypted. On a
    local master and on Kubernetes Spark makes the secret itself. A standalone master has one that its operator chose:
    `TARN_SPARK_SECRET`, or `spark.authenticate.secret` in spark-defaults.conf. It is handed to the JVM through Py4J's
    socket: what is known when the JVM is launched stands on its command line, which every user of the machine can read.

    Executors run under the Python of this process: another one might lack the packages, or pickle differently. Those on
    other machines get this package as it is here.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    is_here = settings.spark_master.startswith("local")
    if is_here:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    is_this_process = is_here and not settings.spark_master.startswith("local-cluster")
    options = {
        "spark.driver.memory": settings.spark_memory,
        "spark.executor.memory": settings.spark_memory,
        **({"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"} if is_here else {}),
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        # The first version derives its keys in a way that is known to be weak.
        "spark.network.crypto.authEngineVersion": "2",
        "spark.network.crypto.saslFallback": "false",
        # Of a standalone cluster, the first driver would have every core for as long as it lives.
        **({} if settings.spark_cores is None else {"spark.cores.max": str(settings.spark_cores)}),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.retainedJobs": "10",
        "spark.ui.retainedStages": "10",
        "spark.ui.retainedTasks": "100",
        "spark.ui.retainedDeadExecutors": "10",
        "spark.sql.ui.retainedExecutions": "10",
        # A flush need not wait until all of a compaction's tasks have had their turn. This holds between pools only:
        # every thread that runs jobs has one (`tarn.pipeline.spark_runner`).
        "spark.scheduler.mode": "FAIR",
        # Between the JVM and Python: over TCP every exchange waits for 40 ms of delayed acknowledgements.
        "spark.python.unix.domain.socket.enabled": "true",
        # After which the Python process of a cancelled task is killed.
        "spark.python.task.killTimeout": "500ms",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "8",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOGGING.as_uri()}",
    }
    launched = SparkConf(loadDefaults=False).setMaster(settings.spark_master).setAppName("tarn")
    for name, value in options.items():
        launched.set(name, value)
    try:
        SparkContext._ensure_initialized(conf=launched)
        session = _builder(launched, _secret(settings)).getOrCreate()
        if not is_this_process:
            session.sparkContext.addPyFile(_package(session.sparkContext))
    except (Py4JError, RuntimeError, OSError) as error:
        raise Unavailable("Spark cannot be started", retry_after=5) from error
    return session


def _builder(conf: SparkConf, secret: str | None) -> SparkSession.Builder:
    builder = SparkSession.Builder().config(conf=conf)
    return builder if secret is None else builder.config(SECRET, secret)


def _secret(settings: Settings) -> str | None:
    """The secret to hand to a JVM that is launched; None: Spark makes one itself, or has one in its own configuration.

    Raises Unavailable where somebody must have chosen one, and nobody has.
    """
    if settings.spark_secret is not None:
        return settings.spark_secret.get_secret_value()
    master = settings.spark_master
    if master.startswith("local-cluster"):
        return secrets.token_hex(32)
    if master.startswith(("local", "k8s")) or SparkConf().contains(SECRET):
        return None
    raise Unavailable(
        f"the Spark master {master} needs a secret: set TARN_SPARK_SECRET, or {SECRET} in spark-defaults.conf, to the "
        "one that the master was started with",
        retry_after=60,
    )


def _package(context: SparkContext) -> str:
    """This package as a file that executors can import from. Spark deletes it when it ends, however the worker does."""
    folder = Path(tarn.__file__).parent
    return shutil.make_archive(f"{context._temp_dir}/tarn", "zip", folder.parent, folder.name)


def _end(process: "subprocess.Popen[bytes] | None") -> None:
    """End a JVM that was started here, and let go of the pipe to it."""
    if process is not None:
        process.kill()
        process.wait()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()


def _is_alive(session: SparkSession) -> bool:
    try:
        return not session.sparkContext._jsc.sc().isStopped()
    except (Py4JError, OSError, AttributeError):
        return False

"""Spark session of a worker: start, restart, cancel and close."""

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
CLOSE_SECONDS = 5.0
"""Seconds to wait for a session that is being started before the worker ends without stopping it."""

LOGGING = Path(__file__).with_name("log4j2.properties")


class Sessions:
    """The current Spark session: started on first use, and restarted if its JVM died.

    Threads share it. A thread that finds it broken discards it, unless another thread has already started a new one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: SparkSession | None = None
        self._lock = Lock()
        self._is_closed = False
        self._used = local()
        """Per thread: the session that `current` returned last."""

    def current(self) -> SparkSession:
        """Return the session, starting it if necessary. Raises Unavailable if Spark cannot be started."""
        with self._lock:
            if self._is_closed:
                raise Unavailable("the worker is stopping", retry_after=5)
            if self._session is not None and not _is_alive(self._session):
                log.warning("the Spark session has ended and is restarted")
                self._end()
            if self._session is None:
                self._session = start_session(self._settings)
            self._used.session = self._session
            return self._session

    def begin(self) -> None:
        """Forget which session this thread used: it begins a new piece of work."""
        self._used.session = None

    def is_stale(self) -> bool:
        """Return whether the session that this thread uses has ended since it was returned."""
        used = getattr(self._used, "session", None)
        return used is not None and used is not self._session

    def discard(self) -> None:
        """End the session that this thread uses. Does nothing if it was already replaced: other threads use the new
        one."""
        with self._lock:
            if getattr(self._used, "session", None) is self._session:
                self._end()

    def cancel(self) -> None:
        """Cancel all running Spark jobs; the threads that wait for them get an error. Takes no lock, as another thread
        may be starting the session."""
        session = self._session
        if session is not None:
            with suppress(Exception):
                session.sparkContext.cancelAllJobs()

    def close(self) -> None:
        """Stop Spark, end its JVM, and reset every reference that PySpark keeps to it. Spark may be partly dead.

        No session can be started afterwards. One that is being started is not waited for longer than `CLOSE_SECONDS`:
        its JVM ends with this process, which holds its standard input.
        """
        self._is_closed = True
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            log.info("Spark is still starting; its JVM ends with this process")
            return
        try:
            self._end()
        finally:
            self._lock.release()

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
    """Start a session on the configured master, without a UI and with little logging. Raises Unavailable.

    Connections to the driver and to executors are authenticated with a secret and encrypted. On a local master and on
    Kubernetes, Spark generates the secret itself. A standalone master has one that its operator chose:
    `TARN_SPARK_SECRET`, or `spark.authenticate.secret` in spark-defaults.conf. The secret is passed to the JVM through
    Py4J's socket: options that are set when the JVM is launched appear on its command line, which every user of the
    machine can read.

    Executors run under the Python of this process: another one might lack the packages, or pickle differently.
    Executors on other machines receive a copy of this package.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    is_local = settings.spark_master.startswith("local")
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    is_this_process = is_local and not settings.spark_master.startswith("local-cluster")
    options = {
        "spark.driver.memory": settings.spark_memory,
        "spark.executor.memory": settings.spark_memory,
        **({"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"} if is_local else {}),
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        # Version 1 has a known weakness in its key derivation.
        "spark.network.crypto.authEngineVersion": "2",
        "spark.network.crypto.saslFallback": "false",
        # On a standalone cluster, the first driver would otherwise hold every core for as long as it runs.
        **({} if settings.spark_cores is None else {"spark.cores.max": str(settings.spark_cores)}),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.retainedJobs": "10",
        "spark.ui.retainedStages": "10",
        "spark.ui.retainedTasks": "100",
        "spark.ui.retainedDeadExecutors": "10",
        "spark.sql.ui.retainedExecutions": "10",
        # A flush does not have to wait until all tasks of a compaction are finished. FAIR scheduling works between
        # pools only, so every thread that runs jobs has its own pool (`tarn.pipeline.spark_runner`).
        "spark.scheduler.mode": "FAIR",
        # Between the JVM and Python: over TCP, delayed acknowledgements add 40 ms to every exchange.
        "spark.python.unix.domain.socket.enabled": "true",
        # Time until the Python process of a cancelled task is killed.
        "spark.python.task.killTimeout": "500ms",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "8",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOGGING.as_uri()}",
    }
    conf = SparkConf(loadDefaults=False).setMaster(settings.spark_master).setAppName("tarn")
    for name, value in options.items():
        conf.set(name, value)
    try:
        SparkContext._ensure_initialized(conf=conf)
        session = _builder(conf, _secret(settings)).getOrCreate()
        if not is_this_process:
            session.sparkContext.addPyFile(_package(session.sparkContext))
    except (Py4JError, RuntimeError, OSError) as error:
        raise Unavailable("Spark cannot be started", retry_after=5) from error
    return session


def _builder(conf: SparkConf, secret: str | None) -> SparkSession.Builder:
    builder = SparkSession.Builder().config(conf=conf)
    return builder if secret is None else builder.config(SECRET, secret)


def _secret(settings: Settings) -> str | None:
    """Return the secret to pass to the JVM, or None if Spark generates one or has one in its own configuration.

    Raises Unavailable if the master needs a secret and none is configured.
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
    """Return a zip of this package for executors. Spark deletes it when it ends, even if the worker is killed."""
    folder = Path(tarn.__file__).parent
    return shutil.make_archive(f"{context._temp_dir}/tarn", "zip", folder.parent, folder.name)


def _end(process: "subprocess.Popen[bytes] | None") -> None:
    """Kill a JVM that this process started, and close the pipe to it."""
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

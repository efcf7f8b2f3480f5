"""Test cluster on the loopback interface with real processes: Spark master, two Spark workers, two Tarn APIs, two Tarn
workers.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from tests.s3 import S3Server, free_port
from tests.server import Server, clean_environment, running

ADMIN_KEY = "the-clusters-administrator"
BACKEND = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
SPARK = {"SPARK_LOCAL_IP": "127.0.0.1", "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""JVM options for short-lived processes: nine JVMs run for a minute each, so start-up time matters and JIT does not."""
SPARK_SECRET = "a-secret-of-the-cluster"
SECURED = f"""
spark.authenticate true
spark.authenticate.secret {SPARK_SECRET}
spark.network.crypto.enabled true
spark.network.crypto.authEngineVersion 2
"""
TIMEOUT = 600
"""Seconds after which a test fails instead of hanging."""

Result = TypeVar("Result")


def wait_for(function: Callable[[], Result | None], condition: str, pause: float = 0.05) -> Result:
    """Poll a function until it returns a true value, and return that value. `condition` is for the error message."""
    deadline = time.monotonic() + TIMEOUT
    while not (result := function()):
        assert time.monotonic() < deadline, f"timed out waiting until {condition}"
        time.sleep(pause)
    return result


@dataclass(frozen=True)
class Executor:
    """A JVM that a Spark worker started for a driver, with the Python processes below it."""

    process: psutil.Process
    folder: Path
    driver_port: int

    @property
    def log(self) -> str:
        return (self.folder / "stderr").read_text()

    def tasks(self) -> list[psutil.Process]:
        """Return the Python processes that run tasks, with the daemon that forks them."""
        return self.process.children(recursive=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend all processes of the executor during the block, and resume those that are left afterwards."""
        processes = [self.process, *self.tasks()]
        try:
            for process in processes:
                with suppress(psutil.NoSuchProcess):  # idle Python processes exit on their own
                    process.suspend()
            yield
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()


@dataclass(frozen=True)
class SparkWorker:
    """A Spark worker, as it would run on one machine of a cluster."""

    process: subprocess.Popen[bytes]
    folder: Path

    def executors(self) -> list[Executor]:
        """Return the executors that are running now."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            words: list[str] = []
            with suppress(psutil.Error):  # the process has ended
                words = child.cmdline()
            if BACKEND in words:
                options = dict(pairwise(words))
                folder = self.folder / options["--app-id"] / options["--executor-id"]
                found.append(Executor(child, folder, int(options["--driver-url"].rsplit(":", 1)[1])))
        return found


@dataclass(frozen=True)
class Spark:
    """A standalone cluster: a master and two workers of two cores each, so that two drivers can have a core of each."""

    url: str
    site: str
    """URL of the master's status in JSON."""
    workers: list[SparkWorker]

    def executors(self) -> list[Executor]:
        return [executor for worker in self.workers for executor in worker.executors()]

    def is_complete(self) -> bool:
        try:
            state = httpx.get(self.site).raise_for_status().json()
        except httpx.TransportError:
            return False
        return bool(state["aliveworkers"] == len(self.workers))


@dataclass(frozen=True)
class TarnWorker:
    """A `tarn worker` process, which is a Spark driver on a port of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    driver_port: int

    def events(self) -> list[dict[str, Any]]:
        """Return the complete JSON lines of its log; Spark's own lines are not JSON."""
        complete, _, _ = self.log.read_text().rpartition("\n")
        return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]

    def has_started(self, job: str) -> bool:
        return any(job in (event.get("job"), *event.get("jobs", ())) for event in self.events())


@dataclass(frozen=True)
class Cluster:
    """All running processes, and which executor belongs to which worker."""

    lake_uri: str
    spark: Spark
    apis: list[Server]
    workers: list[TarnWorker]

    def wait_for_worker_of(self, job: str) -> TarnWorker:
        """Wait until a worker has started the job, and return that worker."""
        return wait_for(
            lambda: next((each for each in self.workers if each.has_started(job)), None), "the job is started"
        )

    def executors_of(self, worker: TarnWorker) -> list[Executor]:
        return [each for each in self.spark.executors() if each.driver_port == worker.driver_port]


@contextmanager
def cluster(folder: Path, database_url: str, s3: S3Server) -> Iterator[Cluster]:
    """Start two of every process on a new lake on this S3 server and database."""
    settings = s3.settings()
    shared = {
        "TARN_DATABASE_URL": database_url,
        "TARN_LAKE_URI": settings.lake_uri,
        "TARN_STORAGE_OPTIONS": json.dumps(s3.options),
        "TARN_ADMIN_KEY": ADMIN_KEY,
        "TARN_FLUSH_AGE": "86400",
        "TARN_MAINTENANCE_INTERVAL": "86400",
        # Two cores run all of this, so a live process may send no heartbeat for a while.
        "TARN_WORKER_HEARTBEAT": "1",
        "TARN_WORKER_SILENT_AFTER": "10",
        "TARN_LEASE_SECONDS": "5",
    }
    with ExitStack() as stack:
        spark = stack.enter_context(_standalone(folder))
        apis = [stack.enter_context(running(_create(folder / f"api-{n}"), "api", **shared)) for n in (1, 2)]
        workers = [stack.enter_context(_worker(_create(folder / f"worker-{n}"), spark, shared)) for n in (1, 2)]
        wait_for(spark.is_complete, "both Spark workers are registered with the master")
        yield Cluster(settings.lake_uri, spark, apis, workers)


@contextmanager
def _standalone(folder: Path) -> Iterator[Spark]:
    port, site = free_port(), free_port()
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:

        def start(name: str, *command: str) -> SparkWorker:
            worker_folder = _create(folder / name)
            return SparkWorker(stack.enter_context(_daemon(worker_folder, *command)), worker_folder)

        start("spark-master", "master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(site))
        offer = ["--host", "127.0.0.1", "--webui-port", "0", "--cores", "2", "--memory", "1g", "--work-dir", ".", url]
        workers = [start(f"spark-worker-{number}", "worker.Worker", *offer) for number in (1, 2)]
        yield Spark(url, f"http://127.0.0.1:{site}/json/", workers)


@contextmanager
def _daemon(folder: Path, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a Spark process from the wheel that pip installed, without Tarn's code on its path."""
    kind, *rest = command
    (folder / "spark-defaults.conf").write_text(SECURED)
    environment = clean_environment(**SPARK, SPARK_DAEMON_MEMORY="128m", SPARK_CONF_DIR=str(folder))
    environment.pop("PYTHONPATH", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "spark-class", f"org.apache.spark.deploy.{kind}", *rest],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(TIMEOUT)


@contextmanager
def _worker(folder: Path, spark: Spark, shared: dict[str, str]) -> Iterator[TarnWorker]:
    port = free_port()
    environment = {
        "TARN_SPARK_MASTER": spark.url,
        "TARN_SPARK_MEMORY": "512m",
        "TARN_SPARK_CORES": "2",
        "TARN_SPARK_SECRET": SPARK_SECRET,
        "TARN_LOG_FORMAT": "json",
        "TARN_SHUTDOWN_GRACE": "2",
        "PYSPARK_SUBMIT_ARGS": f"--conf spark.driver.port={port} pyspark-shell",
    } | SPARK
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tarn.cli", "worker"],
            cwd=folder,
            env=clean_environment(**shared, **environment),
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=subprocess.STDOUT,
        )
    try:
        yield TarnWorker(process, log, port)
    finally:
        process.terminate()
        process.wait(TIMEOUT)


def _create(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder

"""A minimal Kubernetes: an API server for pods and config maps, which runs an executor's pod as a local process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tests.ship.dockerfile import ROOT

VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update"}
ADDRESS = "127.0.0.1"


class ApiRequest(NamedTuple):
    """One request to the API server, in the terms of a role's rules."""

    verb: str
    resource: str


@dataclass
class Cluster:
    """The requests that the API server received, and its objects and processes."""

    url: str
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that a webhook adds to the environment of every pod."""
    requests: list[ApiRequest] = field(default_factory=list)
    created_pods: list[dict[str, Any]] = field(default_factory=list)
    """Every pod as it was sent to the API server."""
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
    closing: Event = field(default_factory=Event)

    def add(self, resource: str, manifest: dict[str, Any]) -> dict[str, Any]:
        name = manifest["metadata"]["name"]
        uid = f"uid-{len(self.objects)}"
        stored = manifest | {
            "metadata": manifest["metadata"] | {"uid": uid, "resourceVersion": str(len(self.requests))}
        }
        with self.lock:
            self.objects[resource, name] = stored
        return stored

    def add_driver(self, name: str) -> None:
        """Add the pod in which Spark's driver is configured to run."""
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.add("pods", {"metadata": {"name": name}, "status": ready})

    def run(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Start a pod's only container: `tarn` with its arguments, as the image does."""
        self.created_pods.append(manifest)
        name = manifest["metadata"]["name"]
        (container,) = manifest["spec"]["containers"]
        environment = {each["name"]: self._value(each, name) for each in container.get("env", [])}
        kept = {key: value for key, value in os.environ.items() if key in ("PATH", "JAVA_HOME")}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tarn.cli", *container["args"]],
                # Executors import functions of the tests.
                env=kept | {"PYTHONPATH": str(ROOT)} | environment | self.variables,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.add("pods", manifest | {"status": {"phase": "Running", "podIP": ADDRESS}})

    def remove(self, resource: str, name: str) -> None:
        with self.lock:
            self.objects.pop((resource, name), None)
        process = self.processes.get(name)
        if resource == "pods" and process is not None:
            process.terminate()

    def close(self) -> None:
        self.closing.set()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _value(self, variable: dict[str, Any], pod: str) -> str:
        source = variable.get("valueFrom", {})
        known = {"status.podIP": ADDRESS, "metadata.name": pod}
        value: str = known[source["fieldRef"]["fieldPath"]] if source else variable.get("value", "")
        return value.replace("/scratch", str(self.folder))


class _Api(BaseHTTPRequestHandler):
    """The routes that Spark uses. Watches return no events, as Spark also polls lists."""

    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        _, _, version, _, _, resource, *rest = url.path.split("/")
        assert version == "v1", self.path
        name = rest[0] if rest else None
        self.cluster.requests.append(ApiRequest(self._verb(name, "watch" in query), resource))
        if "watch" in query:
            self._watch()
        elif self.command == "POST":
            manifest = json.loads(body)
            self._answer(
                201, self.cluster.run(manifest) if resource == "pods" else self.cluster.add(resource, manifest)
            )
        elif name is None:
            labels = dict(each.split("=") for part in query.get("labelSelector", []) for each in part.split(","))
            self._answer(
                200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": self._list(resource, labels)}
            )
        elif (resource, name) not in self.cluster.objects:
            self._answer(404, {"kind": "Status", "code": 404})
        else:
            found = self.cluster.objects[resource, name]
            if self.command == "DELETE":
                self.cluster.remove(resource, name)
            self._answer(200, found)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle

    def _watch(self) -> None:
        """Refuse a web socket with an empty response; answer the plain request that follows with an endless one."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if "Upgrade" in self.headers:
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.close_connection = True
            self.end_headers()
            self.cluster.closing.wait()

    def _list(self, resource: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        with self.cluster.lock:
            found = [
                each
                for (kind, _), each in self.cluster.objects.items()
                if kind == resource and labels.items() <= each["metadata"].get("labels", {}).items()
            ]
        for each in found if self.command == "DELETE" else []:
            self.cluster.remove(resource, each["metadata"]["name"])
        return found

    def _verb(self, name: str | None, watches: bool) -> str:
        if self.command == "GET":
            return "watch" if watches else "list" if name is None else "get"
        if self.command == "DELETE":
            return "deletecollection" if name is None else "delete"
        return VERBS[self.command]

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def cluster(folder: Path, **variables: str) -> Iterator[Cluster]:
    """Run a cluster on the loopback interface, whose pods get these variables and write below `folder`."""
    running = Cluster("", folder, variables)
    with ThreadingHTTPServer((ADDRESS, 0), type("Api", (_Api,), {"cluster": running})) as server:
        running.url = f"http://{ADDRESS}:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.close()
            server.shutdown()
            thread.join()

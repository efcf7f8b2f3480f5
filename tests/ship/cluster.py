"""Kubernetes in miniature: an API server that knows pods and config maps, and a kubelet that runs an executor's pod as
a process of this machine."""

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


class Asked(NamedTuple):
    """One request, in the words of a role."""

    verb: str
    resource: str


@dataclass
class Cluster:
    """What it was asked, and the pods that there are or were."""

    url: str
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    """What a webhook adds to every pod's environment."""
    asked: list[Asked] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    """Every pod that was asked for, as it was asked for."""
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
    closing: Event = field(default_factory=Event)

    def add(self, resource: str, given: dict[str, Any]) -> dict[str, Any]:
        name = given["metadata"]["name"]
        uid = f"uid-{len(self.objects)}"
        made = given | {"metadata": given["metadata"] | {"uid": uid, "resourceVersion": str(len(self.asked))}}
        with self.lock:
            self.objects[resource, name] = made
        return made

    def add_driver(self, name: str) -> None:
        """The pod that Spark's driver says it is in."""
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.add("pods", {"metadata": {"name": name}, "status": ready})

    def run(self, given: dict[str, Any]) -> dict[str, Any]:
        """Start a pod's only container: `tarn` with its arguments, as the image does."""
        self.made.append(given)
        name = given["metadata"]["name"]
        (container,) = given["spec"]["containers"]
        environment = {each["name"]: self._value(each, name) for each in container.get("env", [])}
        kept = {key: value for key, value in os.environ.items() if key in ("PATH", "JAVA_HOME")}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tarn.cli", *container["args"]],
                # A test's own functions are run there, too.
                env=kept | {"PYTHONPATH": str(ROOT)} | environment | self.variables,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.add("pods", given | {"status": {"phase": "Running", "podIP": ADDRESS}})

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
    """The few paths that Spark asks for. Nothing is seen by watching: it lists again and again as well."""

    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        _, _, version, _, _, resource, *rest = url.path.split("/")
        assert version == "v1", self.path
        name = rest[0] if rest else None
        self.cluster.asked.append(Asked(self._verb(name, "watch" in query), resource))
        if "watch" in query:
            self._watch()
        elif self.command == "POST":
            given = json.loads(body)
            self._answer(201, self.cluster.run(given) if resource == "pods" else self.cluster.add(resource, given))
        elif name is None:
            wanted = dict(each.split("=") for part in query.get("labelSelector", []) for each in part.split(","))
            self._answer(
                200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": self._some(resource, wanted)}
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
        """An answer without an end: first an empty one, as a web socket is not to be had here, and then silence."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if "Upgrade" in self.headers:
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.close_connection = True
            self.end_headers()
            self.cluster.closing.wait()

    def _some(self, resource: str, wanted: dict[str, str]) -> list[dict[str, Any]]:
        with self.cluster.lock:
            found = [
                each
                for (kind, _), each in self.cluster.objects.items()
                if kind == resource and wanted.items() <= each["metadata"].get("labels", {}).items()
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
        """Say nothing."""


@contextmanager
def cluster(folder: Path, **variables: str) -> Iterator[Cluster]:
    """A cluster on the loopback whose pods get these variables and write below `folder`."""
    here = Cluster("", folder, variables)
    with ThreadingHTTPServer((ADDRESS, 0), type("Api", (_Api,), {"cluster": here})) as server:
        here.url = f"http://{ADDRESS}:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield here
        finally:
            here.close()
            server.shutdown()
            thread.join()

"""Record the CPU seconds of every phase and fixture, children included: `CPU_COSTS=folder pytest -p tests.cpu_costs …`.

Each test process appends JSON lines to a file of its own in that folder, and `python -m tests.cpu_costs folder` sums
them up.
CPU seconds can be compared between runs on a busy machine, wall time cannot.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

TICK = os.sysconf("SC_CLK_TCK")


class CpuCosts:
    """Writes one line for each phase of each case and for each fixture that is set up."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines
        self._nested = [0.0]
        """CPU seconds of fixtures that were set up within another, to be subtracted from its cost."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "setup")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "call")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "teardown")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        result = yield
        self._write(phase="collection", case="", cpu=tree_seconds(), wall=0.0)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        before = tree_seconds()
        self._nested.append(0.0)
        try:
            return (yield)
        finally:
            spent = tree_seconds() - before
            own = spent - self._nested.pop()
            self._nested[-1] += spent
            self._write(phase="fixture", case=f"{fixturedef.argname} [{fixturedef.scope}]", cpu=own, wall=0.0)

    def _phase(self, item: pytest.Item, phase: str) -> Iterator[None]:
        before, began = tree_seconds(), time.monotonic()
        try:
            return (yield)
        finally:
            self._write(phase=phase, case=item.nodeid, cpu=tree_seconds() - before, wall=time.monotonic() - began)

    def _write(self, **values: Any) -> None:
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ["CPU_COSTS"])
    folder.mkdir(parents=True, exist_ok=True)
    config.pluginmanager.register(CpuCosts((folder / f"{os.getpid()}.jsonl").open("a")), "cpu-costs")


def tree_seconds() -> float:
    """Return the CPU seconds of this process, its descendants, and those that were waited for."""
    return time.process_time() + _waited() + sum(_process_seconds(pid) for pid in _descendants(os.getpid()))


def _waited() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _process_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


def _descendants(pid: int) -> Iterator[int]:
    try:
        tasks = list(os.scandir(f"/proc/{pid}/task"))
    except OSError:
        return
    for task in tasks:
        try:
            children = Path(task.path, "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def report(folder: Path, top: int = 40) -> None:
    """Print the totals of phases, test packages and modules, and the most expensive fixtures and cases."""
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    phases: dict[str, float] = defaultdict(float)
    packages: dict[str, float] = defaultdict(float)
    modules: dict[str, float] = defaultdict(float)
    cases: dict[str, float] = defaultdict(float)
    fixtures: dict[str, float] = defaultdict(float)
    times: dict[str, int] = defaultdict(int)
    for line in lines:
        phases[line["phase"]] += line["cpu"]
        if line["phase"] == "fixture":
            fixtures[line["case"]] += line["cpu"]
            times[line["case"]] += 1
        elif line["case"]:
            module = line["case"].partition("::")[0]
            packages["/".join(module.split("/")[:2])] += line["cpu"]
            modules[module] += line["cpu"]
            cases[line["case"]] += line["cpu"]
    print(f"{len(cases)} cases, {sum(phases.values()) - phases['fixture']:.0f} CPU seconds")
    for title, costs in (("phases", phases), ("packages", packages), ("modules", modules), ("cases", cases)):
        print(f"\n{title}")
        for name, cpu in sorted(costs.items(), key=lambda cost: -cost[1])[:top]:
            print(f"{cpu:9.1f}  {name}")
    print("\nfixtures")
    for name, cpu in sorted(fixtures.items(), key=lambda cost: -cost[1])[:top]:
        print(f"{cpu:9.1f}  {times[name]:6d} x  {name}")


if __name__ == "__main__":
    report(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40)

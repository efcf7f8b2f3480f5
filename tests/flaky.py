"""Run chosen tests many times and count what fails: `make flaky TESTS='tests/worker -k queue' N=20`.

Arguments are the number of runs and those of pytest. Exits with 1 if any case failed in any run.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def failed_cases(report: Path) -> list[str]:
    """Return the cases in a JUnit report that failed or could not be set up."""
    cases = ElementTree.parse(report).iter("testcase")  # the report is pytest's own
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def main(runs: int, arguments: list[str]) -> int:
    failures: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        for run in range(1, runs + 1):
            report.unlink(missing_ok=True)
            command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-o", "junit_family=xunit2", *arguments]
            code = subprocess.run(command, check=False).returncode
            failed = failed_cases(report) if report.exists() else []
            if code and not failed:
                failed = [f"pytest exited with {code}"]
            failures.update(failed)
            print(f"run {run} of {runs}: {len(failed)} failed", flush=True)
    for case, count in failures.most_common():
        print(f"{count:5} of {runs}  {case}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

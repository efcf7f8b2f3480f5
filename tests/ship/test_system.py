"""The script `.ci/system`, which installs a JVM and the packages that build PyICU."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "system"

APT = """#!/bin/sh
case "$*" in *{missing}*) exit 100 ;; esac
case "$*" in *-jre-headless*)
    printf '#!/bin/sh\\necho openjdk version \\\\"{version}.0.1\\\\" >&2\\n' > {folder}/java
    chmod +x {folder}/java ;;
esac
"""


@pytest.mark.parametrize(("missing", "version"), [("nothing", 17), ("openjdk-17", 21)])
def test_newer_java_is_accepted_where_openjdk_17_is_missing(tmp_path: Path, missing: str, version: int):
    result = _run(tmp_path, missing, version)

    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("missing", "version"), [("-jre-headless", 17), ("nothing", 11)])
def test_missing_java_17_is_reported_in_one_sentence(tmp_path: Path, missing: str, version: int):
    result = _run(tmp_path, missing, version)

    assert result.returncode == 1
    assert result.stderr.startswith("Tarn needs Java 17 or newer")
    assert result.stderr.count("\n") == 1


def _run(folder: Path, missing: str, version: int) -> subprocess.CompletedProcess[str]:
    """Run the script as root, with only these commands on the path and an apt that lacks a package."""
    commands = {"id": "#!/bin/sh\necho 0\n", "c++": "#!/bin/sh\n", "pkg-config": "#!/bin/sh\n"}
    commands["apt-get"] = APT.format(missing=missing, version=version, folder=folder)
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in ("sed", "head", "chmod"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return subprocess.run(["/bin/sh", SCRIPT], env={"PATH": str(folder)}, capture_output=True, text=True, check=False)

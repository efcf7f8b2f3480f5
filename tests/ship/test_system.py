"""What `make` installs where it may: a JVM and what builds PyICU."""

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
def test_any_java_from_17_on_does_where_debian_has_it_under_another_name(tmp_path: Path, missing: str, version: int):
    result = _run(tmp_path, missing, version)

    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("missing", "version"), [("-jre-headless", 17), ("nothing", 11)])
def test_without_a_java_from_17_on_it_says_so_in_one_sentence(tmp_path: Path, missing: str, version: int):
    result = _run(tmp_path, missing, version)

    assert result.returncode == 1
    assert result.stderr.startswith("Tarn needs Java 17 or newer")
    assert result.stderr.count("\n") == 1


def _run(folder: Path, missing: str, version: int) -> subprocess.CompletedProcess[str]:
    """The script as root on a machine with only these commands, whose apt lacks a package."""
    commands = {"id": "#!/bin/sh\necho 0\n", "c++": "#!/bin/sh\n", "pkg-config": "#!/bin/sh\n"}
    commands["apt-get"] = APT.format(missing=missing, version=version, folder=folder)
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in ("sed", "head", "chmod"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return subprocess.run(["/bin/sh", SCRIPT], env={"PATH": str(folder)}, capture_output=True, text=True, check=False)

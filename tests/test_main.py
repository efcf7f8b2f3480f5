"""Start-up: what is loaded before the first request."""

import subprocess
import sys

WARMED = """
import sys
from tarn.main import warm_up
from tarn.model.ftm.entity import Exploder
warm_up(Exploder())
loaded = set(sys.modules)
properties = {"name": "Ada", "phone": "+49 30 7654321", "country": "de", "email": "ada@example.org"}
Exploder().explode("d", {"id": "a", "schema": "Person", "properties": properties})
Exploder().explode("d", {"id": "b", "schema": "Document", "properties": {"mimeType": "text/csv"}})
print(sorted(set(sys.modules) - loaded))
"""


def test_first_entity_imports_nothing_after_warm_up():
    result = subprocess.run([sys.executable, "-c", WARMED], capture_output=True, text=True, check=True)

    assert result.stdout == "[]\n"

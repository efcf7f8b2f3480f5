"""Tests against programs of others, installed from the package index: `make interop`, and not a part of `make test`."""

import os

collect_ignore_glob = [] if os.environ.get("INTEROP") else ["test_*.py"]

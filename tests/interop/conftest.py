"""Tests with third-party programs, installed from the package index: part of `make interop`, not of `make test`."""

import os

collect_ignore_glob = [] if os.environ.get("INTEROP") else ["test_*.py"]

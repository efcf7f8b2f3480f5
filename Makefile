# make run       start a server on 127.0.0.1:8000 with SQLite and ./data
# make test      set up, lint and run the tests, as CI does: 12 minutes on two idle cores
# make check     the same without building the test tools
# make lint      format, lint, types, import contract: 1 minute
# make test-all  every case on both databases, the long ones and fault cases: about an hour
# make faults    the fault cases and the simulation with many seeds: 2 hours
# make fuzz      fuzz the OpenAPI document as each role, and the parsers, with many examples: hours
# make soak      concurrent writers, readers and maintenance, final state verified: 15 minutes
# make interop   load a Tarn server with yente, installed from the package index: 3 CPU minutes
# make flaky     run tests many times: make flaky TESTS=tests/worker N=20
# make bench     run the benchmarks
# make openapi   regenerate clients/openapi.json; make api-release: make it the released version
#
# docs/tests.md describes what each test target covers.

PYTHON  ?= $(shell command -v python3.11 || command -v python3)
VENV    := .venv
BIN     := $(VENV)/bin
TOOLS   := .tools
PYTEST  := $(BIN)/python -m pytest

# Spark's executors must run under the driver's Python.
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(PYSPARK_PYTHON)

# About a hundred cases start a server process, and each would compile all modules again without cached bytecode.
export PYTHONDONTWRITEBYTECODE :=

# Test processes: one more than cores, because some case is always waiting for another process. See docs/tests.md.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: run test test-all check cases lint flaky bench faults fuzz soak interop setup system tools docs openapi api-release lock clean

run: system $(VENV)/.run
	$(BIN)/tarn serve

# Building the test tools needs no packages, and lint waits for no test: each pair runs concurrently.
test:
	$(MAKE) --jobs 2 setup tools
	$(MAKE) --jobs 2 lint cases

check: lint cases

# Without fault cases, which kill a worker for each case (make faults), and without those marked `long`; ten seeds of the
# simulation.
cases: setup
	SIM_SEEDS=$${SIM_SEEDS:-10} $(PYTEST) -n $(WORKERS) --dist loadgroup -m "not long" --ignore=tests/faults

# Every case on both databases, once.
test-all: setup tools lint
	HISTORIES=8 FUZZ_PHASES=coverage,fuzzing,stateful FORMAT_CASES=200 $(PYTEST) -n $(WORKERS) --dist loadgroup

# The chosen tests N times, and how often each case failed. TESTS takes any arguments of pytest.
N ?= 20
flaky: setup
	$(BIN)/python -m tests.flaky $(N) -n $(WORKERS) --dist loadgroup $(or $(TESTS),$(error set TESTS, for example TESTS=tests/worker))

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Every fault case with twenty seeds, ten thousand writes that are read back immediately, a database outage of thirty
# seconds, a thousand simulated histories, and more random histories for the pipeline. Takes two hours on two cores.
faults: setup tools
	FAULT_SEEDS=$${FAULT_SEEDS:-20} READ_TRIALS=$${READ_TRIALS:-10000} SIM_SEEDS=$${SIM_SEEDS:-1000} \
		HISTORIES=$${HISTORIES:-24} OUTAGE_SECONDS=$${OUTAGE_SECONDS:-30} $(PYTEST) tests/faults tests/simulation tests/pipeline tests/query/test_histories.py -n 2 --dist loadgroup

# Every phase of schemathesis with a hundred examples per route, for each role, and ten thousand bodies for the parsers, a
# thousand of each format and of random documents. Takes hours, the parsers alone (tests/fuzz/test_parsers.py) ten
# minutes. Set FUZZ_SEED to repeat a failed seed. SAMPLE_DATA names a folder of FtM files to mutate.
fuzz: setup
	FORMAT_CASES=$${FORMAT_CASES:-1000} FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-100} FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} FUZZ_PHASES=coverage,fuzzing,stateful \
		$(PYTEST) tests/fuzz

# SOAK_SECONDS (900) of writers, readers and constant maintenance, then compactions concurrent with writers.
soak: setup
	$(BIN)/python -m bench soak soak_compaction

# yente in a separate environment (.tools/yente-5.5.0, created once: some minutes, and 800 MB) loads catalog, datasets and
# deltas from a real server. Takes three processor minutes after that. Skipped with a message without a package index.
interop: setup
	INTEROP=1 $(PYTEST) -n 0 -rs tests/interop

bench: setup
	$(BIN)/python -m bench

setup: system $(VENV)/.done

# Running needs no development tools: `.run` marks an environment with the server's packages, `.done` one with all.
# Packages are installed with uv if it is available, and with pip otherwise; Python compiles the modules that are used
# when they are first imported, not all that are installed. Tarn and its client are given together, so that the client
# is not looked up in the package index.
UV      := $(shell command -v uv)
INSTALL  = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile) \
	--constraint constraints.txt --editable ./clients/python --editable
PACKAGES := pyproject.toml clients/python/pyproject.toml constraints.txt

$(VENV)/.done: $(PACKAGES) | $(VENV)/bin/python
	$(INSTALL) '.[dev]'
	@touch $(VENV)/.run $@

$(VENV)/.run: $(PACKAGES) | $(VENV)/bin/python
	$(INSTALL) .
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tarn needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

system:
	@sh .ci/system

# The S3 server and Helm for tests, built if Go is available, and the generator of the TypeScript client, if npm is.
# Tests that need a missing one are skipped with a message.
tools:
	@sh .ci/tools $(TOOLS)

docs: setup
	{ printf "# Settings\n\nEvery setting is an environment variable. This table is made from the code by \`make docs\`.\n\n"; \
	  $(BIN)/tarn settings; } > docs/settings.md
	$(BIN)/python -m tests.ship.chart_settings
	$(BIN)/python -m tests.docs.site

openapi: setup
	$(BIN)/python -m clients.document

# Record the current OpenAPI document as released: later versions must keep to it, or list breaks in
# clients/breaking.txt. Also record this commit: later versions must run side by side with it (docs/upgrades.md).
api-release: setup
	$(BIN)/python -m clients.document --release
	git rev-parse HEAD > migrations/released.txt

lock:
	rm -rf $(TOOLS)/lock && $(PYTHON) -m venv $(TOOLS)/lock
	$(TOOLS)/lock/bin/python -m pip install --quiet --editable ./clients/python --editable '.[dev]'
	{ echo "# Versions that setup installs and CI tests. Made by 'make lock'."; \
	  $(TOOLS)/lock/bin/python -m pip freeze --all --exclude-editable --exclude pip; } > constraints.txt

clean:
	rm -rf $(VENV) build app/*.egg-info clients/python/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

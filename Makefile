# The same few verbs on a laptop and in CI. `make demo` and `make test` set up all they need, once.
#
#   make demo                                 its own virtual environment in .venv
#   make demo VENV=system PYTHON=python3      the interpreter as it is (a machine with CUDA torch installed)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Tests start hundreds of interpreters: what one compiled the next must find.
unexport PYTHONDONTWRITEBYTECODE

VENV   ?= .venv
EXTRAS ?= torch,hub,redis,ms,dev,docs
# The distributions of this workspace; the first one is the core.
PACKAGES := penstock $(filter-out penstock,$(notdir $(wildcard packages/*)))
SOURCES  := $(PACKAGES:%=packages/%/src)
empty    :=
# Without what it depends on: its builds for two CUDAs, and any torch at all. 59 MB.
NIXL   ?= nixl==1.5.1 nixl-cu13==1.5.1
RAY    ?= ray==2.60.0
# Without Playwright, on which it depends: the file of axe is all that the tests need.
AXE    ?= axe-playwright-python==0.1.8
# Helm as a library, for the test of the chart.
HELM   ?= helm-python-sdk==0.2.2
# Its tests are run against penstock_hf.runai_streamer; without its native backends for object stores.
RUNAI  ?= runai-model-streamer==0.17.0 humanize==4.17.0
# The newest interpreter of 3.11 or later; PYTHON=/path/to/python chooses another.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

ifeq ($(VENV),system)
PY     := $(PYTHON)
# The packages are not installed, so their entry points are written to a directory of the path.
POINTS := .cache/entry-points
READY  := $(POINTS)/.ready
export PYTHONPATH := $(subst $(empty) $(empty),:,$(SOURCES:%=$(CURDIR)/%)):$(CURDIR)/$(POINTS)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
endif

INSTALL := $(PYTHON) scripts/install.py $(VENV)

ARGS   ?=
# Where `make wheel` writes.
DIST   ?= dist
# --required: fail where the vulnerability service is not reachable.
AUDIT  ?=
TESTS  ?= tests
FUZZ_S ?= 60

.PHONY: help setup storage-servers demo test test-quick test-benchmarks check docs wheel helm-chart bench size shape fuzz chaos soak test-engines test-gpu clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## ?/\1\t/' | expand -t 16

.cache/entry-points/.ready: $(wildcard packages/*/pyproject.toml)
	@$(PY) scripts/entry_points.py $(@D) && touch $@

setup: $(READY)  ## the virtual environment, with the package installed editable

$(VENV)/.ready: $(wildcard packages/*/pyproject.toml) constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "penstock needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 2; fi
	@echo "setting up $(VENV) with $$($(PYTHON) --version) (once)"
	@[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) -c constraints.txt -e 'packages/penstock[$(EXTRAS)]' $(patsubst %,-e packages/%,$(filter-out penstock,$(PACKAGES)))
	@$(INSTALL) --no-deps $(NIXL) \
		|| echo "NIXL does not install here: its tests are skipped" >&2
	@$(INSTALL) --no-deps $(AXE) \
		|| echo "axe does not install here: accessibility is not tested" >&2
	@$(INSTALL) --no-deps $(HELM) \
		|| echo "Helm does not install here: the chart is not tested" >&2
	@$(INSTALL) --no-deps $(RUNAI) \
		|| echo "Run:ai Model Streamer does not install here: its tests are skipped" >&2
	@$(INSTALL) -c constraints.txt $(RAY) \
		|| echo "Ray does not install here: its tests are skipped" >&2
	@touch $@

demo: $(READY)  ## a checkpoint of 2 GiB loaded, fetched by a fleet on this host, synced and converted; compares every bit
	@$(PY) scripts/demo.py $(ARGS)

# Real S3 servers for the object-store tests, and Redis for the hub's. Swift comes by pip and must work; radosgw and Redis
# only where apt can install them.
storage-servers:
	@if [ -x scripts/setup_swift.sh ]; then PYTHON=$(PYTHON) scripts/setup_swift.sh; fi
	@if [ -x scripts/setup_radosgw.sh ]; then \
		scripts/setup_radosgw.sh || echo "radosgw could not be set up here: its tests are skipped" >&2; fi
	@scripts/setup_chromium.sh || echo "chromium could not be set up here: tests of the fleet page are skipped" >&2
	@scripts/setup_redis.sh || echo "redis could not be set up here: its tests are skipped" >&2
	@PYTHON=$(PYTHON) scripts/setup_safetensors_tests.sh \
		|| echo "safetensors' tests could not be fetched here: they are not run" >&2
	@scripts/setup_prometheus.sh || echo "prometheus could not be set up here: its test is skipped" >&2

PYTEST = $(PY) -m pytest -m 'not engines' --ignore=tests/engines $(ARGS)
# A small form of TRL's example, and what is quick of verl's tests, in their own environments; DRILLS=all runs verl's trainer,
# make test-engines all of them.
SMALL := scripts/test_engines.sh -m small && scripts/test_verl.sh -m '$(if $(filter all,$(DRILLS)),small or slow,small)'

test:  ## everything that can run without a GPU (TESTS=path ARGS='-k name' for a part; DRILLS=all: every drill)
	@$(MAKE) --no-print-directory -j2 setup storage-servers
ifeq ($(TESTS)$(strip $(ARGS)),tests)
	@$(PY) -m scripts.run_tests --before "$(SMALL)"
else
	@$(PYTEST) $(TESTS)
endif

test-quick: $(READY)  ## unit, wire and conformance tests, in minutes: no servers, no engines
	@$(PY) -m scripts.run_tests --quick --groups 2

test-benchmarks: $(READY)  ## the tests that run benchmarks, small (make test runs them, too)
	@$(PY) -m scripts.run_tests tests/benchmarks

check: $(READY)  ## format, lint, types, layering, security (bandit, pip-audit), dead code (vulture), sizes
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m bandit -q -c pyproject.toml -r $(SOURCES)
	@$(PY) scripts/audit.py $(AUDIT)
	@$(PY) scripts/dead_code.py
	@mkdir -p .cache; $(PY) -m mypy > .cache/types.log 2>&1 & types=$$!; status=0; \
	$(PY) -m pytest -q -p no:cacheprovider tests/test_layering.py tests/test_exports.py tests/test_cli_frozen.py tests/api || status=$$?; \
	wait $$types || status=$$?; cat .cache/types.log; exit $$status
	@$(PY) -m scripts.shape --files
	@$(MAKE) --no-print-directory docs

docs: $(READY)  ## the documentation site, into .cache/site, strictly
	@$(PY) scripts/chart.py --check
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "documentation: $$(find .cache/site -name '*.html' | wc -l) pages in .cache/site"

# One build environment for all: pip's isolation would make one for each package.
wheel:  ## wheels of all packages, into dist (needs pip alone)
	@build=$$(mktemp -d); trap 'rm -rf $$build' EXIT; export PIP_DISABLE_PIP_VERSION_CHECK=1; \
	$(PYTHON) -m pip install --quiet --target $$build 'hatchling>=1.24'; \
	PYTHONPATH=$$build $(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) \
		$(PACKAGES:%=./packages/%)
	@ls $(DIST)/*.whl

helm-chart: $(READY)  ## the Helm chart, from the manifests, into dist/penstock-chart
	@$(PY) scripts/helm_chart.py dist/penstock-chart
	@echo dist/penstock-chart

bench: $(READY)  ## the load journey beside its peers on this machine (ARGS='--help' tells more)
	@$(PY) -m benchmarks.load $(ARGS)

chaos: $(READY)  ## rounds of faults over real processes (ARGS='--rounds 1000 --seed 7 --minutes 60 --only fetch,sync')
	@$(PY) -m tests.chaos $(ARGS)

soak: $(READY)  ## long-lived processes while others are born and killed: is memory flat? (ARGS='--minutes 30 --seed 1')
	@$(PY) -m tests.chaos.soak $(ARGS)

size: $(READY)  ## files, lines, longest functions; marks what is past the budget
	@$(PY) -m scripts.shape --files

shape: $(READY)  ## lines, names, attributes, parameters, pauses, constructors with I/O (ARGS=--list for the places)
	@$(PY) -m scripts.shape $(ARGS)

fuzz: $(READY)  ## coverage-guided fuzzing of the parsers, by atheris (FUZZ_S=600 for longer)
	@$(PY) -m pip install -qq --disable-pip-version-check atheris
	@mkdir -p .cache/fuzz
	@$(PY) tests/hostile/fuzz_header.py -max_total_time=$(FUZZ_S) -artifact_prefix=.cache/fuzz/ $(ARGS)

test-engines: $(READY)  ## vLLM, transformers, SGLang and verl in their own environments (gigabytes)
	@scripts/test_engines.sh $(ARGS)
	@scripts/test_sglang.sh $(ARGS)
	@scripts/test_verl.sh $(ARGS)

test-gpu: $(READY)  ## the tests that need CUDA
	@$(PY) -m pytest -m 'gpu or gpus' $(ARGS) $(TESTS)

clean:  ## removes what make and the tests built; the virtual environment stays
	@rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find packages tests scripts benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

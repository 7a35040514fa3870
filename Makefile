# One-command tasks; CI calls nothing else. `make` alone lists them.

PYTHON  ?= $(shell command -v python3.11 || command -v python3)
VENV    := .venv
BENCH   := .venv-bench
BIN     := $(VENV)/bin
PIP     := -m pip install --quiet --disable-pip-version-check
# One thread per worker, at most eight workers: small tensors gain nothing from more.
PYTEST  := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=agg $(BIN)/python -m pytest
WORKERS ?= auto

.DEFAULT_GOAL := help
.PHONY: help venv test test-peers check format demo bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.stamp  ## build .venv with the tested versions (again only when they change)

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -e '.[dev]' -c constraints.txt
	@touch $@

test: venv  ## run the tests and doctests (ARGS="-k laws" to choose)
	$(PYTEST) -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

test-peers: $(BENCH)/.stamp  ## compare kernels with neural-tangents, in the benchmarks' environment
	$(BENCH)/bin/python -m pytest -q -p no:cacheprovider tests/theory/test_neural_tangents.py $(ARGS)

check: venv  ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: venv  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: venv  ## compare ensembles on digits: a table and a picture
	$(BIN)/embens demo

bench: $(BENCH)/.stamp  ## compare with other libraries, in an environment of their own
	$(BENCH)/bin/python -m benchmarks $(ARGS)

$(BENCH)/.stamp: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(PIP) -e . -c constraints.txt
	$(BENCH)/bin/python $(PIP) --no-deps -r benchmarks/requirements.txt -c constraints.txt
	@touch $@

clean:  ## remove environments, caches and build products
	rm -rf $(VENV) $(BENCH) embens-demo build dist .pytest_cache .ruff_cache
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

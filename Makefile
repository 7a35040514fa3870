# One-command tasks; CI calls nothing else. `make` alone lists them.

PYTHON  ?= $(shell command -v python3.11 || command -v python3)
VENV    := .venv
BENCH   := .venv-bench
TABLES  := .venv-tables
OLDEST  := .venv-oldest
ZOO     := .venv-zoo
BIN     := $(VENV)/bin
PIP     := -m pip install --quiet --disable-pip-version-check
# One thread per worker, at most eight workers: small tensors gain nothing from more.
# Compiled files are kept: workers and subprocesses of tests import the same modules.
ONE     := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=agg PYTHONDONTWRITEBYTECODE=
WORKERS ?= auto
SPREAD  := -n $(WORKERS) --maxprocesses 8 --dist worksteal
# What needs the requirements alone, and a few libraries to compare with.
CORE    := $(addprefix tests/,laws graph ensemble test_checks.py test_embed.py test_families.py \
	test_metrics.py test_networks.py test_optim.py test_prediction.py test_sites.py test_trees.py)
# Parts of the long suites; tests/test_structure.py checks that they have all of them.
LONG_files := tests/files tests/test_malformed.py tests/training
LONG_networks := tests/test_agreement.py tests/test_generated.py tests/test_references.py \
	tests/test_unusual.py tests/finite tests/ensemble/test_saving.py tests/ensemble/test_subsets.py
LONG_export := tests/ensemble/test_export.py tests/ensemble/test_module.py
LONG_theory := tests/theory
LONG_experiments := tests/reproduction
PEERS   := pytest pytest-xdist jaxtyping beartype pandas scikit-learn torchmetrics

.DEFAULT_GOAL := help
.PHONY: help venv test test-long browser test-oldest test-peers test-zoo check format docs dist demo \
	bench bench-tables clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.stamp  ## build .venv with the tested versions (again only when they change)

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -e '.[dev]' -c constraints.txt
	@touch $@

test: venv browser  ## run the tests and doctests (ARGS="-k laws" to choose)
	$(ONE) $(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-long: venv  ## run the suites that take longer, or a part: PART=files, networks, export, theory, experiments
	$(ONE) $(BIN)/python -m pytest $(SPREAD) -m long $(if $(PART),$(LONG_$(PART)),) $(ARGS)

# The report is tested in a real browser; root on Debian gets one, others see those tests skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& echo "installing Chromium for the tests of the report" \
		&& { timeout 120 apt-get update -qq >/dev/null 2>&1; DEBIAN_FRONTEND=noninteractive \
		timeout 300 apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; }; } \
		|| echo "no Chromium could be installed: the tests of the report in a browser are skipped"

test-peers: $(BENCH)/.stamp  ## compare kernels with neural-tangents, in the benchmarks' environment
	$(BENCH)/bin/python -m pytest -q -p no:cacheprovider tests/theory/test_neural_tangents.py $(ARGS)

test-zoo: $(ZOO)/.stamp  ## embed networks of timm and transformers, in an environment of their own
	$(ONE) $(ZOO)/bin/python -m pytest $(SPREAD) -m 'zoo or not zoo' tests/zoo $(ARGS)

# timm asks for torchvision, of which the tests have a stand-in.
$(ZOO)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python $(PIP) -e . transformers pillow $(PEERS) -c constraints.txt
	$(ZOO)/bin/python $(PIP) --no-deps timm -c constraints.txt
	@touch $@

# The oldest torch that PyPI has for Linux is a CUDA build, which does not load without its CUDA
# packages (7 GB in all); PIP_EXTRA_INDEX_URL as in CONTRIBUTING.md finds one for CPUs.
test-oldest: $(OLDEST)/.stamp  ## run the core's tests with the oldest supported versions
	$(ONE) $(OLDEST)/bin/python -m pytest $(SPREAD) $(wildcard $(CORE)) $(ARGS)

$(OLDEST)/.stamp: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP) -e . $(PEERS) -c constraints-oldest.txt
	@touch $@

check: venv  ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: venv  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv  ## build the documentation: docs/_build/index.html; warnings are errors
	$(ONE) $(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build
	$(ONE) $(BIN)/python -m pytest -q -p no:cacheprovider -m site tests/test_site.py

dist: venv  ## build wheel and sdist, and try them with each extra alone in a clean environment
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(PYTHON) tests/dist.py dist

demo: venv  ## a table with intervals and the paper's two regimes, in two minutes, with one page
	$(ONE) $(BIN)/python -m reproduction demo

bench: $(BENCH)/.stamp  ## compare with other libraries, in an environment of their own
	$(BENCH)/bin/python -m benchmarks $(ARGS)

$(BENCH)/.stamp: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(PIP) -e . -c constraints.txt
	$(BENCH)/bin/python $(PIP) --no-deps -r benchmarks/requirements.txt -c constraints.txt
	@touch $@

bench-tables: $(TABLES)/.stamp  ## compare on real tables; resumes (ARGS="run --help" to choose)
	nice -n 10 $(TABLES)/bin/python -m benchmarks.tables $(or $(ARGS),run)

$(TABLES)/.stamp: pyproject.toml constraints.txt benchmarks/requirements-tables.txt
	$(PYTHON) -m venv $(TABLES)
	$(TABLES)/bin/python $(PIP) -e '.[tabular,reproduction,ray]' -c constraints.txt
	$(TABLES)/bin/python $(PIP) --no-deps -r benchmarks/requirements-tables.txt -c constraints.txt
	@touch $@

clean:  ## remove environments, caches and build products
	rm -rf $(VENV) $(BENCH) $(TABLES) $(OLDEST) embens-results build dist docs/_build docs/gallery \
		.pytest_cache .ruff_cache
	find src reproduction tests -type d -name __pycache__ -prune -exec rm -rf {} +

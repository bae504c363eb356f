# Set up, try, test. `make` alone lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions to install. constraints-lowest.txt has the lowest ones that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
# The name tells which versions .venv has.
STAMP := $(VENV)/.installed-$(notdir $(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help install lowest demo check test test-all lint faults mutations gpu board size docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## set up .venv from constraints.txt

# torch first and by its exact version: a looser request may bring gigabytes of CUDA libraries.
$(STAMP): $(CONSTRAINTS) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kdcli needs Python 3.11+")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) $$(grep '^torch==' $(CONSTRAINTS))
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e .[dev]
	rm -f $(VENV)/.installed*
	touch $(STAMP)

lowest: ## write constraints-lowest.txt with uv, after a change of pyproject.toml
	rm -f constraints-lowest.txt.new
	uv pip compile --quiet --resolution lowest-direct --python-version 3.11 --python-platform linux \
		--extra dev --no-annotate --no-header \
		--output-file constraints-lowest.txt.new pyproject.toml
	mv constraints-lowest.txt.new constraints-lowest.txt

demo: $(STAMP) ## compress the embedded classifier, without labels: one to two and a half minutes
	$(BIN)/kdcli compress demo-classifier --data demo --max-drop 1.0 -o runs/demo --overwrite

# One single-threaded process a core: the models of the tests are too small for more.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout 600 -n auto --dist worksteal
# `make check` runs the unit tests of every folder. A module of tests that take seconds is marked
# with `pytestmark = pytest.mark.slow`: exports, latency, the contract of every model type. So are
# commands: all of tests/verbs but for one module.
check: lint ## lint, types and the unit tests: about a minute
	$(PYTEST) -x -m "not slow and not long"

test: lint ## lint, types and every behaviour once: what continuous integration runs
	$(PYTEST) -x

test-all: lint ## also what is marked `long`: every export, torch.compile, long kills
	$(PYTEST) -m ""

lint: $(STAMP) ## ruff and the strict type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto

MINUTES ?= 10
faults: $(STAMP) ## search for faults for MINUTES=10: kills, full disks, bad files and words
	$(BIN)/python -m tools.faults --minutes $(MINUTES)

mutations: $(STAMP) ## change sixty formulas and values, one at a time; takes hours
	$(BIN)/python -m tools.faults.mutations

gpu: MINUTES = 9
gpu: $(STAMP) ## measure on a machine with a GPU, for MINUTES=9; continues the last call
	$(BIN)/python -m tools.gpu --minutes $(MINUTES)

board: $(STAMP) ## compress TEACHERS=DIR on TEXTS=SOURCE, score on MTEB's sets in DATA=DIR
	$(BIN)/python benchmarks/board.py $(TEACHERS) --data $(DATA) --texts $(TEXTS) -o runs/board

size: $(STAMP) ## tokens and lines by folder, next to the last release
	$(BIN)/python -m tools.size

docs: $(STAMP) ## build the documentation, warnings are errors
	$(BIN)/zensical build --clean --strict

clean: ## remove what the other targets made
	rm -rf $(VENV) site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Set up, try, test. `make` alone lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint docs clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## set up .venv from constraints.txt

# torch first and by its exact version: a looser request may bring gigabytes of CUDA libraries.
$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kdcli needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e .[dev]
	touch $(STAMP)

demo: $(STAMP) ## distil the embedded teacher into a 2x64 student: no network, no file
	$(BIN)/kdcli distill demo --to 2x64 -o runs/demo --overwrite

# A process a core, each computing in one thread: the models of the tests are too small for more. Neighbours share what
# their file sets up; a process without work takes the second half of another's.
test: lint ## lint, then the tests, fast ones first
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -x --timeout 600 -n auto --dist worksteal

lint: $(STAMP) ## ruff and the strict type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto

docs: $(STAMP) ## build the documentation, warnings are errors
	$(BIN)/mkdocs build --strict --site-dir site

clean: ## remove what the other targets made
	rm -rf $(VENV) site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make demo      set-up, then distill + train + bench + a sample chat on the embedded target (CPU, no network)
# make test      set-up, then the default tests
# make test-all  set-up, then the tests of the gate
# make docs      set-up, then the documentation site in build/docs/site
# make check     set-up, then lint, types and the tests of the gate; SINCE=main: those that changes
#                since then can reach
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# a file's tests run in one process, so that what they share is made once; conftest orders the files
SPREAD = -n auto --dist loadfile --no-loadscope-reorder --durations=50

.PHONY: demo test test-all docs check lint types clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/draftheads demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(SPREAD)

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest $(SPREAD) -m "not thorough" $(if $(SINCE),--since $(SINCE))

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python docs/site/gather.py build/docs
	$(BIN)/zensical build --strict --config-file build/docs/mkdocs.yml

check: lint types test-all

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist src/*.egg-info

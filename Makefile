# SPDX-License-Identifier: Apache-2.0
# `make build` and `make test` work from a fresh clone; PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: build test check

build: $(INSTALLED)
	$(VENV)/bin/fmha-gen build specs/

# Each worker, and hundreds of processes, import the package and the tests: without bytecode, that is
# compiled and its asserts are rewritten each time.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	$(VENV)/bin/pytest -n 2 --dist worksteal

check: $(INSTALLED)
	$(VENV)/bin/ruff check codegen tests
	$(VENV)/bin/black --check --quiet codegen tests
	$(VENV)/bin/mypy codegen
	$(VENV)/bin/fmha-gen build specs/ --check

$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) not found; try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Python 3.10 or newer is needed, $(PYTHON) is" \
	    "$$($(PYTHON) -V 2>&1); try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing fmha-gen and what it needs into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	@touch $@

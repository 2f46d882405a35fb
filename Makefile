# `make bench` and `make test` do all their set-up on a machine with nothing but Python 3.11 or newer.

VENV ?= .venv
PYTHON ?= python3
WORKERS ?= 2

BIN := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/.installed
GOLDEN := tests/data/golden
SMOKE := build/bench-smoke
SMOKE_NOTE := SMOKE RUN on a tiny made pair ($(GOLDEN), 6 layers, bytes for tokens): it shows that all works here; \
	its figures say nothing about any real drafter.

.PHONY: help venv bench test lint format clean

help:
	@echo "make venv    install specdoctor and its tools into $(VENV)"
	@echo "make bench   set up, then a smoke run of 'specdoctor bench' on the tiny pair of the tests"
	@echo "make test    set up, then the tests"
	@echo "make lint    set up, then ruff, mypy and import-linter"
	@echo "make format  let ruff put the sources in order"
	@echo "make clean   remove build/ and the tools' caches, not $(VENV)"
	@echo "VENV=FOLDER, PYTHON=python3.12 and WORKERS=4 (test processes) may be given with each."

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'specdoctor: Python 3.11 or newer is needed')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@

bench: venv
	@mkdir -p $(SMOKE)
	@echo '$(SMOKE_NOTE)'
	$(BIN)/specdoctor bench --target $(GOLDEN)/target --template bytes --dtype float32 \
		--draft $(GOLDEN)/deepspec-dspark-vanilla --draft $(GOLDEN)/deepspec-dflash \
		--max-prompts 6 --max-new-tokens 48 --json $(SMOKE)/bench.json --records $(SMOKE)/records.jsonl
	@echo '$(SMOKE_NOTE)'
	@echo 'Written: $(SMOKE)/bench.json, $(SMOKE)/records.jsonl. For a real pair see README.md, "bench".'

test: venv
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 10

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/link_tree.py
	cd build/tree && $(BIN)/mypy --cache-dir ../../.mypy_cache -p specdoctor
	cd build/tree && PYTHONPATH=. $(BIN)/lint-imports --no-logo --cache-dir ../../.import_linter_cache

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

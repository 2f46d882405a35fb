# `make bench` and `make test` do all their set-up on a machine with nothing but Python 3.11 or newer.

VENV ?= .venv
PYTHON ?= python3
WORKERS ?= 2

BIN := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/.installed
REPORT := build/bench

.PHONY: help venv bench test lint format clean

help:
	@echo "make venv    install specdoctor and its tools into $(VENV)"
	@echo "make bench   set up, then compare the drafters that come with specdoctor on SmolLM2-135M"
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
	@mkdir -p $(REPORT)
	$(BIN)/specdoctor bench --target smollm2-135m --dtype bfloat16 \
		--draft dflash-smollm2-135m --draft dspark-smollm2-135m --draft eagle3-smollm2-135m \
		--draft-vocabulary own \
		--max-prompts 9 --max-new-tokens 64 \
		--json $(REPORT)/bench.json --records $(REPORT)/records.jsonl --report $(REPORT)/report.html
	@echo 'Written: $(REPORT)/report.html, bench.json, records.jsonl.'

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

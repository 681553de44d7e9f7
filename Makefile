# make demo       installs into .venv and runs the demonstration
# make demo-full  the same with BSWA M0 to M12 and a million tokens; takes 20 minutes
# make demo-finetune  a pretrained model given a memory and finetuned with LoRA; 5 minutes
# make test       the tests; make test-slow: those that take minutes
# make tour       the README's five minutes at tiny sizes, where famjax is installed without extras
# make docs       the documentation site in site/; a broken link ends it
# make lint types what CI checks besides
# make clean      removes .venv, .venv-plain and caches; runs/ stays

# huge pages: a quarter of a training step on CPU is spared (famjax.core.runtime)
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

VENV := .venv
BIN := $(VENV)/bin
PLAIN := .venv-plain

.PHONY: demo demo-full demo-finetune test test-slow tour docs lint types clean

demo: $(VENV)/.installed
	$(BIN)/python -m famjax.demo

demo-full: $(VENV)/.installed
	$(BIN)/python -m famjax.demo --full

demo-finetune: $(VENV)/.installed
	$(BIN)/python -m famjax.demo_finetune

# two processes, a file to each: most of the time is compiling, on one core
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --slow -m slow --timeout 3600

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

# Stamps: installation runs again only when pyproject.toml changes.
$(VENV)/.installed $(PLAIN)/.installed: %/.installed: pyproject.toml | %/bin/python
	@echo "installing famjax into $*, once; this takes some minutes"
	$*/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need, once; this takes some minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,seqio]'
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

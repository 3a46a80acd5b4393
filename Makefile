# Everything runs in a virtual environment that the first command makes. VENV=/elsewhere puts its 7 GB elsewhere.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One environment per content of pyproject.toml: a new dependency always means a new install.
KEY    := $(shell $(PYTHON) -c "import hashlib;print(hashlib.sha256(open('pyproject.toml','rb').read()).hexdigest()[:16])")
STAMP  := $(VENV)/.installed-$(KEY)
# The demo needs less: where everything is not installed yet, it installs its own part into the same environment.
DEMO   := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.demo-$(KEY))

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# Tests start many processes, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-slow test-stress test-oldest lint docs examples bench zoo clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(STAMP)  ## Make the virtual environment and install wellcond with all extras

$(VENV)/.installed-$(KEY): EXTRA := dev
$(VENV)/.demo-$(KEY): EXTRA := demo
$(VENV)/.installed-$(KEY) $(VENV)/.demo-$(KEY):
	@$(PYTHON) -c "import sys; sys.exit('wellcond needs Python >= 3.11, found %s; run make PYTHON=python3.11' % sys.version.split()[0]) if sys.version_info < (3, 11) else None"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing wellcond[$(EXTRA)] into $(VENV) (torch with CUDA is large: a few minutes, 6 to 7 GB; docs/start.md says how to get the small one) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRA)]'
	@rm -f $(VENV)/.installed-* $(VENV)/.demo-*
	@touch $@

demo: $(DEMO)  ## Train a small ViT on digits with seven initialisations at tuned rates and three seeds, compare, and write an HTML report
	$(BIN)/wellcond demo

test: $(STAMP)  ## Run the default tests (a few minutes)
	PYTHONPATH=$(CURDIR)/src $(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: $(STAMP)  ## Run the slow tests as well
	PYTHONPATH=$(CURDIR)/src $(BIN)/python -m pytest --hypothesis-profile=thorough

test-stress: $(STAMP)  ## Repeat the tests of processes, signals and time: quiet, beside busy processes, on one core (ROUNDS=20)
	PYTHON=$(abspath $(BIN)/python) tests/stress.sh $(or $(ROUNDS),20)

test-oldest:  ## Run the default tests on the oldest versions that pyproject.toml allows (OLDEST=/elsewhere puts their 8 GB elsewhere)
	PYTHON=$(PYTHON) tests/oldest.sh

lint: $(STAMP)  ## Style, import order, docstrings, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## Build the documentation into site/, figures included (open site/index.html; strict, no network)
	PYTHONPATH=$(CURDIR)/src $(BIN)/python tools/site/build.py

examples: $(STAMP)  ## Run the five scripts of examples/, each under a minute on one core (its notebook: examples/tour.ipynb)
	@set -e; for script in examples/*.py; do echo "== $$script"; PYTHONPATH=$(CURDIR)/src $(BIN)/python $$script; done

bench: $(STAMP)  ## Times of training steps, initialisation and Jacobians, each against its baselines in one run
	$(BIN)/python benchmarks/acting.py
	$(BIN)/python benchmarks/corrections.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/init_methods.py
	$(BIN)/python benchmarks/language.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/lra_data.py
	$(BIN)/python benchmarks/monitor.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench]'
	$(BIN)/python benchmarks/jacobian.py

zoo: $(STAMP)  ## Walk every architecture of timm and transformers
	$(BIN)/wellcond inspect --zoo timm
	$(BIN)/wellcond inspect --zoo hf

clean:  ## Remove the virtual environment and caches
	rm -rf .venv .venv-oldest site .pytest_cache .mypy_cache .ruff_cache

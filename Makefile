# Everything runs in a virtual environment of its own, made on first use; only python3 with venv is needed.
# Variables:  make test PYTHON=python3.13 VENV=.venv-313          another interpreter
#             make test CONSTRAINTS=.ci/oldest.txt VENV=.venv-old  other versions
#             make test TESTS=tests/graph WORKERS=1                a part of the tests
#             make bench ROWS=1,4 QUICK=1                          a part of the benchmarks
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?=
TESTS ?=
WORKERS ?= 2
ROWS ?=
QUICK ?=
CLOCK ?= wall
OUT ?= benchmarks/out

BIN := $(VENV)/bin
# -qq: errors only.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input \
  --upgrade --upgrade-strategy eager $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

.PHONY: help test demo bench lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make test    run the tests on 8 host devices, warnings as errors"
	@echo "make demo    run examples/digits.py"
	@echo "make bench   measure against bare JAX and other libraries"
	@echo "make lint    formatting, lint rules and types"
	@echo "make format  format the code and apply the safe fixes"
	@echo "make clean   remove environments and caches"

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "anabranch needs Python 3.11 or newer, %s is %s" % (sys.executable, sys.version.split()[0]))'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# One stamp for each set of extras: a second run installs nothing until pyproject.toml changes.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) $(VENV)/.made
	@echo "installing anabranch[$*] into $(VENV)"
	@$(INSTALL) --editable '.[$*]'
	@touch $@

# tests/conftest.py asks for the devices; pyproject.toml turns warnings into errors.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/digits.py

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks --out $(OUT) --clock $(CLOCK) $(if $(ROWS),--rows $(ROWS)) $(if $(QUICK),--quick)

# The package is checked with the extras of the tests present, so that optional imports have types; pyright
# brings its own node.
lint: $(VENV)/.installed-test $(VENV)/.installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_GLOBAL_NODE=0 $(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

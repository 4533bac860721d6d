# `make train`: set up and run the main job. `make test`: set up and pass the tests that every change is run against.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2
ARGS ?=
# Where torch is taken from, such as https://download.pytorch.org/whl/cpu; empty: as pip is configured.
TORCH_INDEX ?=
# Containers often forbid it; without cached bytecode every process compiles smp anew, and pytest all tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup train finetune test test-all test-slow test-qlora test-floor gpu lint docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed, {sys.version.split()[0]} found: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	@echo 'Setting up $(VENV): four to six minutes, 2.3 GB with the CPU build of torch, 5.9 GB with the CUDA build.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --extra-index-url https://pypi.org/simple) torch==2.13.0
	@echo 'torch is installed; now smp and what it needs'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,plots,tensorboard]'
	@echo 'smp is installed; now what the tests of its integrations need'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[integrations]' || \
		echo 'DeepSpeed, Open MPI or a checker could not be installed: the tests that need them are skipped'
	@touch $@

JOB := $(BIN)/python -m smp.launch.local --nproc_per_node $(NPROC) -m smp.train

train: setup
	@$(JOB) --config configs/demo.yaml $(ARGS)

# After `make train`: adapters beside its model, trained on conversations, evaluated before and after, merged, and asked.
finetune: setup
	@test -e runs/demo/final || { echo 'make finetune: there is no runs/demo/final, which make train makes: run that first' >&2; exit 2; }
	@$(JOB) --config configs/lora.yaml --evaluate_only 1 --resume_from_checkpoint none
	@$(JOB) --config configs/lora.yaml $(ARGS)
	@$(JOB) --config configs/lora.yaml --evaluate_only 1
	@$(BIN)/smp export --merge runs/lora/checkpoints/latest runs/lora/merged
	@$(BIN)/python examples/ask.py runs/lora/merged 'Where is Lucas Lodge?'

# Four processes on two cores: tests wait for half of their time, for other processes and servers.
test: setup
	$(BIN)/python -m pytest -n 4 --dist loadfile -m "not slow and not full" tests

test-all: setup
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=100 -m "not slow" tests

test-slow: setup
	$(BIN)/python -m pytest -m slow tests

# torchao lies apart: transformers imports it into every process of an environment that has it.
test-qlora: .torchao
	PYTHONPATH=.torchao $(BIN)/python -m pytest -n 2 -m "not slow" -k "bits or qlora or fp8" \
		tests/parity/test_qlora.py tests/parity/test_plan_bytes.py tests/resume/test_lora_job.py tests/unit/test_flags_finetuning.py \
		tests/parity/test_adamw_8bit.py tests/parity/test_fp8.py tests/parity/test_fp8_experts.py tests/parity/test_fp8_gather.py \
		tests/cuda_path/test_fp8.py tests/unit/test_fp8.py tests/resume/test_fp8_job.py
	@$(JOB) --config configs/demo.yaml --output_dir runs/wide --max_steps 20 --model none --model_type llama_v2 --hidden_width 128 \
		--num_layers 4 --num_heads 4 --llama_intermediate_size 384 --vocab_size 2048 --max_context_width 128
	@PYTHONPATH=.torchao $(JOB) --config configs/qlora.yaml --max_steps 20 --output_dir runs/test_qlora

.torchao: | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ torchao==0.18.0

# Nothing is set up: the machine with the GPU has torch and transformers, and may have no network.
gpu:
	PYTHON=$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) bash benchmarks/gpu_first.sh $(ARGS)

# The oldest supported torch and transformers; the index has this torch for CUDA alone, which runs on CPUs, too.
FLOOR := .venv-floor/bin/python

test-floor: .venv-floor/.ready
	$(FLOOR) -m pytest -n 4 --dist loadfile -m "not slow" tests/unit tests/parity

.venv-floor/.ready: pyproject.toml constraints.txt
	@echo 'Setting up .venv-floor: 5.5 GB'
	$(PYTHON) -m venv .venv-floor
	grep -vE '^(torch|transformers|huggingface-hub)==' constraints.txt > .venv-floor/constraints.txt
	$(FLOOR) -m pip install --quiet --disable-pip-version-check --constraint .venv-floor/constraints.txt \
		torch==2.11.0 'transformers==5.17.*' --editable '.[dev,plots,tensorboard]'
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/python docs/make_tables.py
	$(BIN)/python docs/make_images.py

clean:
	rm -rf runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

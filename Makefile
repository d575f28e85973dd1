# make demo: set up, train on a GPU with a real model, else with a small one.   make test: set up, check the formatting, run the tests that are not slow.   Both build .venv once.
# make slow: the tests marked slow (more seeds and cases, runs of several processes), minutes in all.
PYTHON ?= python3
PIP := .venv/bin/python -m pip install --disable-pip-version-check --quiet --progress-bar=on
CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && echo yes)
REQUIREMENTS := requirements-$(if $(CUDA),gpu,cpu).txt
READY := .venv/$(REQUIREMENTS)
TORCH := torch==2.13.0+cpu
export GOMP_SPINCOUNT ?= 2000
export OMP_NUM_THREADS ?= $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)))")

.PHONY: demo test slow
demo: $(READY)
ifeq ($(CUDA),yes)
	.venv/bin/python -m tasks.pretrained qwen05
	.venv/bin/python train.py --config=configs/demo_gpu.toml --overwrite
else
	.venv/bin/python train.py --config=configs/demo.toml --overwrite
endif

test: $(READY)
	.venv/bin/ruff format --check --quiet .
	.venv/bin/ruff check --quiet .
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests

slow: $(READY)
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 -m slow tests

$(READY): $(REQUIREMENTS)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.11 ...')"
	$(PYTHON) -m venv --clear .venv
	@echo "installing $(REQUIREMENTS) into .venv (2.8 GB on CPU, some minutes)"
ifeq ($(CUDA),yes)
	$(PIP) -r $(REQUIREMENTS)
else
	$(PIP) --no-deps "$(TORCH)" 2>/dev/null || $(PIP) --no-deps --index-url https://download.pytorch.org/whl/cpu "$(TORCH)"
	$(PIP) --no-deps -r $(REQUIREMENTS)
endif
	touch $@

# make demo    sets everything up and runs the main job
# make test    sets everything up and passes the tests
# make check   formatter, linter, type checker
#
# TORCH=torch==2.13.0            another torch version
# TORCH_INDEX=URL                another package index for torch (the CPU build is enough)
# WORKERS=2                      processes that run tests at once, 1 to 2 GB each
# PYTHON=python3.11              the interpreter of .venv
# PYTHON_NEWEST=python3.13       the interpreter of .venv-newest: the newest JAX, JAX code only

SHELL := bash
PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3))
PYTHON_NEWEST ?= $(firstword $(shell command -v python3.13 >/dev/null && python3.13 -c 'import sys; print(sys.executable)' 2>/dev/null) \
                   $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python))
# Test files that need JAX but no torch.
JAX_TESTS := $(wildcard kernels/*/tests/test_*_config.py kernels/*/tests/test_*_interpreted.py kernels/*/tests/test_*_tpu.py) \
             $(addprefix tests/aot/test_aot_,traffic.py bundles.py surroundings.py)
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WORKERS ?= 2
# Tests of one file stay in one process, since they share what is expensive to make. More than one thread of torch in each
# process would only wait for the others.
PYTEST_OPTIONS := -n $(WORKERS) --dist loadfile

export JAX_PLATFORMS ?= cpu
# torch loads torch_tpu at import where it is installed, which looks for TPU hardware.
export TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0

.PHONY: help demo test test-torch test-newest-jax check format clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -9

demo: .venv/ready
	.venv/bin/pallas-hub demo

test: test-torch test-newest-jax

test-torch: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PYTEST_OPTIONS) $(TESTS)

# The JAX code of every kernel, interpreted and compiled with the newest JAX, which needs Python 3.12 or newer.
ifeq ($(PYTHON_NEWEST),)
test-newest-jax:
	@echo "not run: the tests with the newest JAX need Python 3.13 (set PYTHON_NEWEST)"
else
test-newest-jax: .venv-newest/ready
	.venv-newest/bin/python -m pytest $(PYTEST_OPTIONS) $(JAX_TESTS)
endif

check: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyrefly check
	.venv/bin/pallas-hub build --check

format: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

.venv/ready: pyproject.toml tests/constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "pallas-hub needs Python 3.11 or newer; set PYTHON")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	.venv/bin/python -m pip install --quiet -c tests/constraints.txt --group dev -e '.[jax,tpu,aot,transformers,diffusers,tokamax,serve,bench]' $(TORCH)
	touch $@

.venv-newest/ready: tests/constraints-newest.txt
	$(PYTHON_NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet -r tests/constraints-newest.txt
	touch $@

clean:
	rm -rf .venv .venv-newest build dist

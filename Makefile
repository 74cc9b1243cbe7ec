# Each target does its whole set-up: `make test` in a fresh clone needs Python >= 3.10, a C++20 compiler and make.
#
#   VENV=dir         environment to use; created when it does not exist (default .venv)
#   PYTHON=python3   interpreter a new environment is made from
#   CUDA=AUTO        AUTO: the CUDA kernels where nvcc is found; ON, OFF
#   CUDA_ARCHS=...   architectures of this build; default: the GPUs here, or without one a PTX for any GPU from sm_75 on
#   ARCHS="75 ..."   architectures of the gate
#   WHEEL_ARCHS=...  architectures of `make wheel` (default: all listed in CMakeLists.txt)
#   JOBS=n           parallel compile jobs (default: all cores)
#   VERBOSE=1        show everything pip, CMake and the compiler print
#   SANITIZE=1       `make fuzz` under AddressSanitizer and UndefinedBehaviorSanitizer
#   INTEGRATIONS=dir environment of `make test-integrations` (default .venv-integrations)
#   SECONDS=60       how long `make fuzz-files` runs
#   ARGS="..."       passed on to pytest, the demo, the benchmark or the fuzzer

VENV ?= .venv
PYTHON ?= python3
CUDA ?= AUTO
ifndef CUDA_ARCHS
CUDA_ARCHS := $(or $(shell $(PYTHON) scripts/cuda_archs.py),75-virtual)
endif
ARCHS ?= 75 80 86 89 90 100 120
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
WHEEL_ARCHS ?=
VERBOSE ?=
PTXRUN ?=
SANITIZE ?=
SECONDS ?= 60
ARGS ?=
INTEGRATIONS ?= .venv-integrations

TORCH := torch==2.13.0
PY := $(VENV)/bin/python
# Twice quiet: warnings about indexes stay out of sight, errors do not.
PIP := $(PY) -m pip --disable-pip-version-check $(if $(VERBOSE),,--quiet --quiet)
# Another environment has a build directory of its own: two in turn would compile everything anew each time.
BUILD_DIR := build/dev$(if $(filter-out .venv,$(VENV)),-$(patsubst .venv-%,%,$(notdir $(VENV))))-{wheel_tag}
PROGRESS := $(PY) scripts/progress.py $(if $(VERBOSE),--verbose)
STAMPS := $(VENV)/.samplex
NATIVE := CMakeLists.txt pyproject.toml $(shell find cmake csrc tests/simt -type f -not -name '*.md' -not -name '*.py')
CONFIG := CUDA=$(CUDA) CUDA_ARCHS=$(CUDA_ARCHS)

export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build demo test test-slow test-integrations test-settings test-emulated sweep-emulated sanitize fuzz fuzz-files bench gpu lint format cuda-gate docs wheel clean distclean FORCE

help: ## Show this list
	@echo "samplex-cuda"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24
	@sed -nE 's/^#   ([A-Z_]+=.*)/  \1/p' Makefile

build: $(STAMPS)/build ## Environment, torch, build tools, the extension (editable, with the test backends)

demo: $(STAMPS)/build ## Train with the full and the sampled softmax, and compare them in a table and a plot
	$(PY) -m samplex_cuda.demo $(ARGS)

test: $(STAMPS)/build ## Run the test suite on every backend of this machine, without slow tests
	$(PY) -m pytest -m "not slow and not integrations" $(ARGS)

test-slow: $(STAMPS)/build ## The slow studies: larger statistics, wheel in a clean environment
	$(PY) -m pytest -m "slow and not integrations" $(ARGS)

test-integrations: ## Test the adapters with their libraries, in the environment INTEGRATIONS
	@$(MAKE) VENV=$(INTEGRATIONS) $(INTEGRATIONS)/.samplex/integrations
	$(INTEGRATIONS)/bin/python -m pytest -m integrations $(or $(ARGS),tests/integrations)

test-settings: $(STAMPS)/build ## The suite as on other processors, file by file, continuing where it stopped; table in build/settings_sweep
	$(PY) scripts/settings_sweep.py $(ARGS)

sanitize: $(STAMPS)/build ## The op suite under AddressSanitizer and UndefinedBehaviorSanitizer
	$(PY) scripts/side_build.py sanitize $(ARGS)

test-emulated: $(STAMPS)/build ## The op suite on nvcc's code under an emulated CUDA runtime; needs PTXRUN=dir
	$(PY) scripts/side_build.py emulated --ptxrun "$(PTXRUN)" $(ARGS)

sweep-emulated: $(STAMPS)/build ## The same file by file for three seeds, continuing where it stopped; table in build/emulated_sweep
	$(PY) scripts/emulated_sweep.py --ptxrun "$(PTXRUN)" $(ARGS)

fuzz: $(STAMPS)/build ## Random calls of every op and public function; ARGS="--calls 1000000", SANITIZE=1 for the sanitizer build
	$(if $(SANITIZE),$(PY) scripts/side_build.py sanitize --run tests/fuzz,$(PY) tests/fuzz) $(ARGS)

fuzz-files: $(STAMPS)/build ## Altered files into every reader for SECONDS seconds (default 60); coverage-guided if atheris is installed
	$(PY) tests/fuzz/fuzz_files.py --seconds $(SECONDS) $(ARGS)

bench: $(STAMPS)/build ## All benchmarks; results in bench/results, docs/benchmarks.md and README.md, plots in docs/images
	@status=0; for script in bench/bench_*.py; do \
	  echo "== $$script"; $(PY) $$script $(ARGS) || status=1; \
	done; $(PY) bench/update_readme.py || status=1; exit $$status

gpu: $(STAMPS)/build $(STAMPS)/gate ## For the owner of a GPU: tests, gates, benchmarks, profile; gpu_report.md to send back
	$(PY) scripts/gpu_report.py $(ARGS)

lint: $(STAMPS)/lint $(STAMPS)/build ## ruff, clang-format and mypy; changes nothing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	find csrc tests/simt -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(STAMPS)/lint ## Rewrite the sources in the project's format
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	find csrc tests/simt -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format -i

cuda-gate: $(STAMPS)/gate ## Compile every kernel for every listed architecture; no spills; docs/cuda_resources.md
	$(PY) scripts/cuda_gate.py --archs $(ARCHS) --jobs $(JOBS)

docs: $(STAMPS)/docs $(STAMPS)/build ## The documentation site in build/docs; warnings and broken links are errors
	$(PY) -m sphinx -b html -W --keep-going -q -j $(JOBS) docs build/docs
	@echo "open build/docs/index.html"

wheel: $(STAMPS)/tools ## A wheel in dist/, checked in a clean environment; its last line says whether it has CUDA kernels
	@$(PY) scripts/make_wheel.py --cuda $(CUDA) --archs "$(WHEEL_ARCHS)" $(if $(VERBOSE),--verbose) $(ARGS)

clean: ## Remove what was built; keep the environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache $(STAMPS)/build
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Also remove the environment in .venv
	rm -rf .venv

# ------------------------------------------------------------------------------------------------ set-up
# Torch comes first and pinned: an open requirement would fetch whatever build is newest. An environment that has a
# torch >= 2.13 keeps it.
$(STAMPS)/torch:
	@test -x $(PY) || { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=python3.12 ...")' \
	  && echo "== environment $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@$(PY) scripts/has_torch.py || { echo "== $(TORCH), a large download"; $(PIP) install $(TORCH); }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/tools: $(STAMPS)/torch
	@echo "== build tools"
	@$(PIP) install "scikit-build-core>=0.11" "pybind11>=3.0" "cmake>=3.24" ninja numpy
	@touch $@

$(STAMPS)/lint: $(STAMPS)/torch pyproject.toml
	@echo "== lint tools"
	@$(PIP) install $$($(PY) scripts/extra.py lint)
	@touch $@

$(STAMPS)/gate: $(STAMPS)/tools pyproject.toml
	@$(PIP) install $$($(PY) scripts/extra.py gate)
	@touch $@

# With the torch that is there: a library would otherwise be free to fetch another one.
$(STAMPS)/integrations: $(STAMPS)/build pyproject.toml
	@echo "== libraries of the extra integrations, a large download"
	@$(PIP) install "torch==$$($(PY) -c 'from importlib.metadata import version; print(version("torch"))')" \
	  $$($(PY) scripts/extra.py integrations)
	@touch $@

$(STAMPS)/docs: $(STAMPS)/torch pyproject.toml
	@$(PIP) install $$($(PY) scripts/extra.py docs)
	@touch $@

# Rewritten only when a setting changed, so that another CUDA_ARCHS rebuilds and the same one does not.
$(STAMPS)/config: FORCE | $(STAMPS)/tools
	@echo '$(CONFIG)' | cmp -s - $@ || echo '$(CONFIG)' > $@

# A build directory of its own: a plain `pip install .` must never meet a cache with the test backends on.
$(STAMPS)/build: $(STAMPS)/tools $(STAMPS)/config $(NATIVE)
	@echo "== extension ($(CONFIG)), minutes the first time"
	@$(PROGRESS) $(PY) -m pip --disable-pip-version-check -v install --no-build-isolation -e ".[demo,bench,test]" \
	  --config-settings=build-dir="$(BUILD_DIR)" --config-settings=cmake.define.SAMPLEX_TEST_BACKENDS=ON \
	  --config-settings=cmake.define.SAMPLEX_CUDA=$(CUDA) "--config-settings=cmake.define.SAMPLEX_CUDA_ARCHS=$(CUDA_ARCHS)"
	@touch $@

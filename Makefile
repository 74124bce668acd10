# make demo, make test: everything from nothing. Needs python3 (3.11 to 3.14), a C++ compiler and make.
PYTHON ?= python3
VENV ?= .venv
# Any torch from 2.11 on; a plain "torch" also works and brings CUDA along.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# More than two cores have, because ranks that wait in tests leave cores idle.
JOBS ?= 4
# Of the mutants, the long tests, the parameter sets of each test and the kernels' element types,
# the fifth to run, 0 to 4, and which of the other versions of torch; all of them if it is empty.
# "make test" alone takes today's.
test: PART ?= $(shell expr $$(date +%s) / 86400 % 5)
# --once gives a test that fails no second try.
TESTS = OMP_NUM_THREADS=1 $(BIN)/python tests/run.py $(if $(PART),--part $(PART)) $(TRIES) -n $(JOBS) --maxschedchunk 4
# Compute capabilities for which the kernels are compiled and read.
ARCHITECTURES ?= 80 90 100

.PHONY: demo test test-slow nightly test-gpu test-emulated gpu bench-gpu convergence cuda-check lint format docs tsan asan bench clean
.PHONY: compile-commands torch-headers torch-check

$(BIN)/python:
	@echo "making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --upgrade pip

$(VENV)/.torch: | $(BIN)/python
	@echo "installing $(TORCH) and what builds need"
	@$(BIN)/pip install -q "$(TORCH)" numpy "setuptools>=77" "pybind11>=2.13" ninja wheel cmake
	@touch $@

# The build itself; again whenever a source changes.
$(VENV)/.built: $(VENV)/.torch setup.py pyproject.toml $(shell find csrc -type f)
	@echo "compiling the extension (about 2 minutes on 2 cores), and installing what tests need"
	@$(BIN)/pip install -q --no-build-isolation -e ".[bench,test]"
	@touch $@

demo: $(VENV)/.built
	@$(BIN)/python examples/demo.py

# Which of the Python tests it runs.
MARKED ?= not gpu and not slow
test: $(VENV)/.built cpp-test
	@$(TESTS) -m "$(MARKED)" tests

# The long tests, which "test" leaves out: torch's own tests of backends, the wheel, training, fuzz.
test-slow: $(VENV)/.built
	@$(TESTS) -m "slow and not gpu" tests

# The tests of training frameworks, with their newest releases, which take about 1 GB.
.PHONY: test-integrations
$(VENV)/.integrations: $(VENV)/.built
	$(BIN)/pip install -q --group integrations
	touch $@

test-integrations: $(VENV)/.integrations
	@$(TESTS) tests/integrations tests/tools/test_exporters.py

# All tests and checks that need no GPU, whole, and without second tries. Takes an hour or more.
nightly:
	.ci/run nightly

# Needs a CUDA device; see docs/how-to/cuda.md.
test-gpu: $(VENV)/.built
	$(BIN)/python -m pytest -q -m gpu tests

# The tests for a CUDA device without one: kernels run as fibers, tensors lie in host memory.
test-emulated: $(VENV)/.built emulator
	@PYTHONPATH=tests/emulator PYCOMM_EMULATOR=$(abspath build/cpp-test/emulator.so) \
	$(TESTS) -m "gpu and not hardware" tests/gpu

# All that needs a GPU, with the torch that is there, in three calls of at most 8 minutes, each useful
# alone: results come to out/gpu. A call that fails does not keep the next ones from running.
.PHONY: gpu-kernels gpu-communication gpu-tables
gpu-kernels gpu-communication gpu-tables:
	PYTHON=$(PYTHON) benchmarks/gpu.sh $(@:gpu-%=%) out/gpu/$(@:gpu-%=%)

gpu:
	@$(MAKE) --keep-going -j1 gpu-kernels gpu-communication gpu-tables

# Prints why where there is no CUDA device.
bench-gpu: $(VENV)/.built
	mkdir -p out
	$(BIN)/python -m pycomm.bench gpu -J out/gpu.json

# Trains in every mode, for minutes; the short form is among the tests.
convergence: $(VENV)/.built
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python -m convergence
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python -m convergence.states
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python -m convergence.shards
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python -m convergence.sparse

# What a change may have made slower, beside torch, in a minute or two; BENCH takes options of
# pytest-benchmark, such as --benchmark-compare.
bench: $(VENV)/.built
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q benchmarks \
	  --benchmark-columns=min,median,iqr,rounds --benchmark-sort=min --benchmark-name=short \
	  --benchmark-max-time=0.25 --benchmark-disable-gc \
	  --benchmark-storage=out/benchmarks --benchmark-autosave $(BENCH)

# The C++ tests, plain and under sanitizers. Ranks are threads, so that they see every rank.
# The mutants of the code that the checkers check, and the races of kernels, need g++. What needs no
# sanitizer tests the objects of the extension.
.PHONY: cpp-test mutants emulator racecheck
cpp-test mutants emulator: $(VENV)/.built
racecheck tsan asan: $(VENV)/.torch
cpp-test mutants emulator racecheck tsan asan:
	@PATH="$(abspath $(BIN)):$$PATH" sh tests/cpp/run.sh $@ $(PART)

# All results of CPUs again, on this commit: several runs of each command, in hours; go on after Ctrl-C.
.PHONY: results
RUNS ?= 5
results: $(VENV)/.built
	$(BIN)/python -m benchmarks.rerun out/results --runs $(RUNS)

# How each source is compiled, for clangd and the like; on x86-64 with the kernels, as C++.
compile-commands: $(VENV)/.torch
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/$@ -G Ninja -DPYCOMM_BUILD_TESTS=ON \
	  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DPYCOMM_PYTHON=python >/dev/null
	ln -sf build/$@/compile_commands.json .

# The extension with CUDA, in an environment of its own: about 5 GB, for the time of the build.
.PHONY: cuda-build
cuda-build:
	PYTHON=$(PYTHON) JOBS=$(JOBS) .ci/cuda-build

# The extension for aarch64, tried under qemu on x86-64.
.PHONY: aarch64
aarch64: $(VENV)/.torch
	VENV=$(VENV) .ci/aarch64

cuda-check: $(VENV)/.torch
	$(BIN)/python tests/cpp/cuda_check.py --for $(ARCHITECTURES) $(if $(PART),--part $(PART))

# The machine code of the kernels: rules, and limits per hot loop, which sass-limits writes anew, with
# the predictions in docs/lab/performance.md.
.PHONY: disassembler sass sass-limits
disassembler: $(VENV)/.torch
	PYTHONPATH=tests/cpp $(BIN)/python -m sass.disassembler build/disassembler

sass: cuda-check disassembler
	PYTHONPATH=tests/cpp $(BIN)/python -m sass --for $(ARCHITECTURES)

sass-limits: cuda-check disassembler
	PYTHONPATH=tests/cpp $(BIN)/python -m sass --write
	PYTHONPATH=tests/cpp $(BIN)/python -m sass.model

# The torch.distributed backend against the headers of the other versions of torch, about 10 MB each.
torch-headers: $(VENV)/.torch
	$(BIN)/python tests/cpp/torch_headers.py build/torch-headers $(PART)

torch-check: torch-headers
	$(BIN)/python tests/cpp/torch_check.py build/torch-headers $(PART)

# A wheel for users without a compiler: without CUDA, with the backend for every supported torch.
.PHONY: wheel try-wheel
$(VENV)/.wheel: $(VENV)/.torch
	$(BIN)/pip install -q --group wheel
	touch $@

wheel: torch-headers $(VENV)/.wheel
	rm -rf build/wheel
	PYCOMM_CUDA=0 PYCOMM_TORCH_HEADERS=build/torch-headers \
	  $(BIN)/pip wheel -q --no-build-isolation --no-deps -w build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --strip --exclude 'libtorch*' --exclude 'libc10*' \
	  -w dist build/wheel/*.whl
	$(BIN)/twine check --strict dist/*
	ls -sh dist

# FRAMEWORKS=1 also tries the examples of training frameworks, which take about 1 GB.
try-wheel:
	PYTHON=$(PYTHON) TORCH="$(TORCH)" FRAMEWORKS=$(FRAMEWORKS) .ci/try-wheel

$(VENV)/.lint: $(VENV)/.built
	$(BIN)/pip install -q --group lint
	touch $@

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest pycomm._C --mypy-config-file tests/project/stubtest.ini
	find csrc tests examples docs benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror

# The site: out/site/index.html.
$(VENV)/.docs: $(VENV)/.built
	$(BIN)/pip install -q --group docs
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site -d out/site-cache . out/site

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc tests examples docs benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build out dist *.egg-info pycomm/*.so $(VENV)

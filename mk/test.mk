# Tests: doctest programs of C++ and pytest over tests/, run by tests/run.py.

# Instruction sets that SIMDe emulates.
EMULATED   := int8_simde int8_wasm
SIMT_TESTS := simt_test simt_checks_test $(CUDA_PROGRAMS:%=%_test) $(CUDA_PROGRAMS:%=%_checked_test) awq_kernels_test backend_gpu_test
TEST_BINS  := build/engine_test $(EMULATED:%=build/%_test) $(PROGRAMS:%=build/%_test) $(PLAIN_PROGRAMS:%=build/plain/%_test) $(PLAIN_CUDA:%=build/plain/%_test) $(SIMT_TESTS:%=build/%)

# Said first, while packages are asked for.
.PHONY: test-says
test-says:
	@echo 'make test: 3 steps, about 20 minutes by make -j2 test: 1 compile, 2 $(words $(TEST_BINS)) C++ test programs, 3 pytest'
test: test-says
test: portable $(call BACKEND_PATH,emulated) $(call BACKEND_PATH,emulated64)
test: $(TEST_BINS) build/tokenize_tool build/limits build/in_turns build/ladder/runq $(ALL_PROGRAMS) \
      plain plain-asan $(VENV_READY) $(FIRST_MODELS) $(TEST_MODELS)
	@$(PY) tests/run.py $(TEST_BINS)

# What a change needs first: the C++ tests, which hold every program to the stored traces; of one program with P=runq.
# Model files are made only if they are not there.
P       ?=
CHECKED := $(if $(P),,build/engine_test) $(foreach p,$(or $(P),$(PROGRAMS)),build/$p_test $(if $(filter $p,$(PLAIN_PROGRAMS)),build/plain/$p_test))
check: $(CHECKED) $(if $(P),,$(foreach b,$(CPU_BACKENDS),$(call BACKEND_PATH,$b))) $(or $(P),$(PROGRAMS)) $(VENV_READY) $(filter-out $(wildcard $(TEST_MODELS) $(RANDOM_MODELS)),$(TEST_MODELS) $(RANDOM_MODELS))
	@$(PY) tests/run.py --no-pytest $(CHECKED)

# And what takes long besides: whole sweeps, static analysis, Arm, Windows, GPUs' compilers and all of PTX, hw/ with every
# mutant, transformers (PYTHON_HF), the page in both browsers, the book, fuzzing harnesses, releases, new Debian systems.
test-all: export FULL := 1
test-all: test
	$(MAKE) lint lint-systems test-arm cuda cuda-cublas test-ptx hip
	$(MAKE) portable CXX=aarch64-linux-gnu-g++ TOKENIZER=0
	$(PY) -m pytest -q tests/test_backends.py -k arm
	$(MAKE) test-windows test-dist
	$(MAKE) hw hw-mutants rtl-story chip-story
	$(MAKE) rtl-chip
	$(MAKE) test-web-node test-web
	$(MAKE) test-book
	$(MAKE) test-fuzz
	$(MAKE) test-hf
	$(MAKE) test-pages test-fresh

# Without a try block in each assertion tests compile in a sixth less time; an exception in one ends its test case, as a failure.
DOCTEST := -Itests -DDOCTEST_CONFIG_SUPER_FAST_ASSERTS

# Tests are compiled in half the time without most optimizations. What they call of LIBRARY has all.
CPU_TESTS := $(PROGRAMS) $(filter-out $(EMULATED) simt% awq% backend_gpu $(CUDA_PROGRAMS),$(patsubst tests/%_test.cpp,%,$(wildcard tests/*_test.cpp)))
$(CPU_TESTS:%=build/%_test.o): private CXXFLAGS_ALL := $(CXXFLAGS_ALL) -O1
build/%_test.o: tests/%_test.cpp build/flags build/packages-test
	$(CXX) $(CXXFLAGS_ALL) $(DEPS) $(DOCTEST) -c $< -o $@
build/main.o: tests/main.cpp build/flags build/packages-test
	$(CXX) $(CXXFLAGS_ALL) $(DEPS) -c $< -o $@

# What does not depend on the scheme is tested in one program; each program's own source in one of its own. The first two take
# longest to compile.
OWN_TESTS := $(PROGRAMS:%=tests/%_test.cpp) $(SIMT_TESTS:%=tests/%.cpp) $(EMULATED:%=tests/%_test.cpp)
build/engine_test: build/quant_matmul_test.o build/lowbit_matmul_test.o build/main.o $(patsubst tests/%.cpp,build/%.o,$(filter-out $(OWN_TESTS),$(wildcard tests/*_test.cpp)))
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
$(INT8_PROGRAMS:%=build/%_test): $(INT8_LIBRARY)
build/engine_test $(filter-out $(INT8_PROGRAMS:%=build/%_test),$(PROGRAMS:%=build/%_test)): $(LIBRARY_O)
$(PROGRAMS:%=build/%_test) $(EMULATED:%=build/%_test): %: build/main.o %.o
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
# Where VNNI or WebAssembly is emulated, whatever the machine has: see the sources. Programs of their own, as each defines
# the kernels again.
$(EMULATED:%=build/%_test.o): private CXXFLAGS_ALL := $(filter-out -march=% -O%,$(CXXFLAGS_ALL)) -O1

# CUDA, always through simt/ here. In the checked build the emulator looks at every load and store: simt/checks.cpp.
CHECKED_FLAGS := $(SIMT_FLAGS) -O1 -DCHECKED_BUILD -D_GLIBCXX_ASSERTIONS -fsanitize=thread,alignment,bounds $(if $(findstring clang,$(CXX)),,-Wno-tsan)
CHECKED_TESTS := simt_checks_test awq_kernels_test backend_gpu_test $(CUDA_PROGRAMS:%=%_checked_test)
PLAIN_TESTS   := $(filter-out $(CHECKED_TESTS),$(SIMT_TESTS))
$(PLAIN_TESTS:%=build/%.o): private CXXFLAGS_ALL := $(SIMT_FLAGS)
# With a stand-in for cuBLAS (simt/cublas.h), which the checked build of the same test is without.
build/runq_awq_test.o: private CXXFLAGS_ALL += -DSIMT_CUBLAS
# Of the emulator itself: it compiles longer than it runs.
build/simt_test.o: private CXXFLAGS_ALL := $(SIMT_FLAGS) -O1
build/simt_checks_test.o build/awq_kernels_test.o build/backend_gpu_test.o: build/%.o: tests/%.cpp build/flags build/packages-test
	$(CXX) $(CHECKED_FLAGS) $(if $(filter build/awq_kernels_test.o,$@),-DSIMT_CUBLAS) $(DEPS) $(DOCTEST) -c $< -o $@
$(CUDA_PROGRAMS:%=build/%_checked_test.o): build/%_checked_test.o: tests/%_test.cpp build/flags build/packages-test
	$(CXX) $(CHECKED_FLAGS) $(DEPS) $(DOCTEST) -c $< -o $@
build/checks.o: simt/checks.cpp build/flags build/packages
	$(CXX) $(SIMT_FLAGS) $(DEPS) -c $< -o $@
$(CUDA_PROGRAMS:%=build/%_test): $(LIBRARY_O)
$(PLAIN_TESTS:%=build/%): %: build/main.o %.o
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
$(CHECKED_TESTS:%=build/%): %: build/main.o build/checks.o %.o
	$(CXX) $(CXXFLAGS_ALL) $^ -Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset -o $@ $(LIBS)

build/tokenize_tool: tests/tokenize_tool.cpp build/flags build/packages
	$(call compiled,$(CXXFLAGS_ALL))
	$(CXX) $(CXXFLAGS_ALL) $@.o -o $@ $(LIBS)

# Compares the numpy reference with transformers itself, what --hf-out writes with the libraries that load it, and model
# files of what llmcompressor writes with the same libraries. Needs torch, transformers, compressed-tensors, ml_dtypes
# (and gptqmodel for AWQ, gptqmodel and optimum for GPTQ; llmcompressor, auto-round, bitsandbytes and nvidia-modelopt for
# what comes in) in the Python it is given:
#     python3 -m venv .venv-torch
#     .venv-torch/bin/pip install -r requirements.txt torch transformers compressed-tensors
#     make test-hf PYTHON_HF=.venv-torch/bin/python
PYTHON_HF ?= $(PYTHON)
test-hf: runq runq_w8a8 runq_gptq
	@$(PYTHON_HF) -m formats.interpreter numpy safetensors ml_dtypes jinja2 tokenizers torch transformers compressed_tensors accelerate
	$(PYTHON_HF) -m tests.hf_fixtures check
	$(PYTHON_HF) -m tests.hf_out_check
	$(PYTHON_HF) -m tests.hf_in_check
	$(PYTHON_HF) -m tests.hf_foreign_check

# The model files that tests and golden vectors take.
test-models: $(PY) $(TEST_MODELS)

# The commands of the pages in a fresh clone of what is committed, after `make`, but for those that need more than some
# minutes: docs/contributing.md. PAGES_HAVE=minutes,network: what there is; PAGES="README.md docs/q8.md": these alone.
PAGES      ?=
PAGES_HAVE ?= minutes
test-pages: $(PY)
	@$(PY) -m tests.pages --have $(PAGES_HAVE) $(PAGES)

# ---- new systems -----------------------------------------------------------------------------------------------------
# README's first commands on new, minimal Debian systems: tests/fresh.py. Needs root, debootstrap and a package mirror.
#     make test-fresh SUITES=bookworm
#     make test-fresh FULL=1             and make test
SUITES ?= bookworm trixie
.PHONY: test-fresh
test-fresh:
	@FULL='$(FULL)' '$(PYTHON)' tests/fresh.py $(SUITES)

# ---- lint ------------------------------------------------------------------------------------------------------------
# Formats, warnings as errors with two compilers, static analysis.
CPP_FILES := $(wildcard *.cpp *.cu engine/*/*.h engine/*/*.cuh engine/*/*.cpp engine/backend/*.cu docs/*.c simt/*.h simt/*.cpp tests/*.cpp tests/*.h tests/fuzz/*.cpp tests/fuzz/*.h hw/*/*.cpp hw/*/*.h bench/*.cpp bench/*.cu bench/*.cuh)

# opencl.cpp only where OpenCL's headers are.
BACKEND_FILES := $(filter-out $(if $(filter opencl,$(BACKENDS)),,%/opencl.cpp),$(wildcard engine/backend/*.cpp engine/backend/*.cu))

.PHONY: lint-format lint-g++ lint-clang++ lint-tidy
lint: lint-format lint-g++ lint-clang++ lint-tidy

build/packages-lint: build/packages-test
	@$(call install,$(PACKAGES_LINT))
	@touch $@

lint-format: $(VENV_READY) build/packages-lint
	clang-format --dry-run --Werror $(CPP_FILES)
	$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check --quiet .

# A file per core at a time.
each = printf '%s\n' $1 | xargs -P "$$(nproc)" -I{} sh -c 'echo "$2 {}"; $2 $3' || exit 1
COMPILED = $(wildcard *.cpp) $(LIBRARY) $(BACKEND_FILES) $(wildcard simt/*.cpp tests/*.cpp tests/fuzz/*.cpp bench/*.cpp *.cu bench/*.cu)
TIDY     = clang-tidy --quiet --warnings-as-errors=*
STRICT   = -x c++ -std=c++20 -fopenmp-simd -march=$(ARCH) $(ENGINE) -I. -Itests -DBACKEND=portable -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -fsyntax-only
lint-g++ lint-clang++: lint-%: build/packages-lint
	@$(call each,$(COMPILED),$*,$(STRICT) {})
	@$(call each,$(PLAIN_PROGRAMS:%=%.cpp),$*,$(filter-out $(ENGINE) -I%,$(STRICT)) {})

lint-tidy: build/packages-lint
	@$(call each,$(wildcard *.cpp *.cu) $(LIBRARY),$(TIDY),{} -- -x c++ -std=c++20 -fopenmp-simd $(ENGINE) -I. -Wno-unknown-pragmas)
	@$(call each,$(PLAIN_PROGRAMS:%=%.cpp),$(TIDY),{} -- -std=c++20 -fopenmp-simd -Wno-unknown-pragmas)

format: $(VENV_READY)
	clang-format -i $(CPP_FILES)
	$(PY) -m ruff format --quiet .
	$(PY) -m ruff check --quiet --fix .

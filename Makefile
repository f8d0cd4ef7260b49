# make            build the programs and export the bundled model for each
# make run        the same, and print a story
# make help       all targets

# ---- choices ---------------------------------------------------------------------------------------------------
CXX       ?= g++
ARCH      ?= native
TOKENIZER ?= 1
PYTHON    ?= python3
ifeq ($(origin CXX),default)
CXX := g++
endif

# g++ 12 sees overlaps in std::string's operator+ (GCC bug 105651) and uninitialized registers in the AVX-512 headers
# (105593) that are not there; passing vectors between functions concerns no ABI, as all of them are inlined.
WARNINGS := -Wall -Wextra -Wshadow -Wno-psabi $(if $(findstring clang,$(CXX)),,-Wno-restrict -Wno-maybe-uninitialized -Wno-uninitialized) $(if $(WERROR),-Werror)
# Rounding stays exactly as written; only errno and floating-point traps, which nothing here looks at, are given up.
CXXFLAGS_ALL := -std=c++20 -O3 -march=$(ARCH) -fopenmp -fno-math-errno -fno-trapping-math -I. $(WARNINGS) $(CXXFLAGS)
ifeq ($(TOKENIZER),0)
CXXFLAGS_ALL += -DNO_TOKENIZER
PACKAGES_BUILD := g++
else
LIBS := -lpcre2-8 -lutf8proc
PACKAGES_BUILD := g++ pkg-config libpcre2-dev libutf8proc-dev
endif
PACKAGES_TEST := doctest-dev nlohmann-json3-dev libsimde-dev
PACKAGES_ARM  := g++-aarch64-linux-gnu qemu-user
PACKAGES_LINT := clang clang-format clang-tidy libomp-dev

HEADERS   := $(wildcard common/*.h)
VENV      := .venv
PY        := $(VENV)/bin/python
EXPORTER  := $(wildcard export/*.py golden/*.py)
TINY      := tiny-llama tiny-qwen3
PROGRAMS  := runq runq_w8a8
TEST_BINS := build/common_test build/int8_simde_test $(PROGRAMS:%=build/%_test)
TEST_MODELS := $(foreach m,$(TINY),$(foreach s,q8 w8a8 w8a8-block32 w8a8-static,build/models/$m.$s.bin))
CPP_FILES := $(wildcard *.cpp common/*.h tests/*.cpp tests/*.h bench/*.cpp)

.PHONY: all run test test-arm test-cpp test-py test-hf golden single bench lint format help clean
.DELETE_ON_ERROR:

all: $(PROGRAMS) model.bin model_w8a8.bin

# ---- build -----------------------------------------------------------------------------------------------------
runq runq_w8a8: %: %.cpp $(HEADERS) build/flags build/packages
	$(CXX) $(CXXFLAGS_ALL) $< -o $@ $(LIBS)

# Another compiler or other flags than last time: build again.
build/flags: FORCE
	@mkdir -p build
	@echo '$(CXX) $(CXXFLAGS_ALL) $(LIBS)' | cmp -s - $@ || echo '$(CXX) $(CXXFLAGS_ALL) $(LIBS)' > $@
FORCE:

build/packages: tools/install.sh
	@mkdir -p build
	@CXX="$(CXX)" sh tools/install.sh $(PACKAGES_BUILD)
	@touch $@

build/packages-test: build/packages
	@sh tools/install.sh $(PACKAGES_TEST)
	@touch $@

$(PY): requirements.txt
	@sh tools/install.sh python3-venv
	@echo "setting up $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

model.bin: build/models/tiny-llama.q8.bin
	cp $< $@
model_w8a8.bin: build/models/tiny-llama.w8a8.bin
	cp $< $@

build/models/%.q8.bin: $(PY) $(EXPORTER) models/%/model.safetensors models/%/config.json models/%/tokenizer.json
	@mkdir -p $(@D)
	$(PY) -m export q8 models/$* $@ --quiet

# The same calibration as for the golden vectors.
W8A8_EXPORT = @mkdir -p $(@D) && $(PY) -m export w8a8 models/$* $@ --quiet --calib models/calibration.txt --seq-len 256
W8A8_SOURCE = $(PY) $(EXPORTER) models/calibration.txt models/%/model.safetensors models/%/config.json models/%/tokenizer.json
build/models/%.w8a8.bin: $(W8A8_SOURCE)
	$(W8A8_EXPORT)
build/models/%.w8a8-block32.bin: $(W8A8_SOURCE)
	$(W8A8_EXPORT) --block 32
build/models/%.w8a8-static.bin: $(W8A8_SOURCE)
	$(W8A8_EXPORT) --act static

# ---- run -------------------------------------------------------------------------------------------------------
run: runq model.bin
	./runq model.bin -i "Once upon a time"

single: $(PROGRAMS:%=build/single/%.cpp)
build/single/%.cpp: %.cpp $(HEADERS) tools/single.py
	@mkdir -p $(@D)
	$(PYTHON) tools/single.py $< > $@

# ---- test ------------------------------------------------------------------------------------------------------
test: $(TEST_BINS) build/tokenize_tool build/limits $(PROGRAMS:%=build/asan/%) $(PROGRAMS) single $(PY) \
      model.bin model_w8a8.bin $(TEST_MODELS)
	@$(PY) tests/run.py $(TEST_BINS)

build/%_test.o: tests/%_test.cpp $(HEADERS) $(wildcard *.cpp tests/*.h) build/flags build/packages-test
	$(CXX) $(CXXFLAGS_ALL) -Itests -c $< -o $@
build/main.o: tests/main.cpp build/flags build/packages-test
	$(CXX) $(CXXFLAGS_ALL) -c $< -o $@
build/common_test: build/main.o $(patsubst tests/%.cpp,build/%.o,$(filter-out $(PROGRAMS:%=tests/%_test.cpp) tests/int8_simde_test.cpp,$(wildcard tests/*_test.cpp)))
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
# Where VNNI is emulated, whatever the machine has: see the source. A program of its own, as it defines the kernels again.
build/int8_simde_test.o: CXXFLAGS_ALL := $(filter-out -march=%,$(CXXFLAGS_ALL))
build/int8_simde_test.o: tests/int8_matmul_test.cpp
build/int8_simde_test: build/main.o build/int8_simde_test.o
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
$(PROGRAMS:%=build/%_test): build/%_test: build/main.o build/%_test.o
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
build/tokenize_tool: tests/tokenize_tool.cpp $(HEADERS) build/flags build/packages
	$(CXX) $(CXXFLAGS_ALL) $< -o $@ $(LIBS)

# The same program under AddressSanitizer and UBSan, for the test that feeds it broken files.
build/asan/%: %.cpp $(HEADERS) build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_ALL) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all $< -o $@ $(LIBS)

# The kernels and the forward pass on Arm, once for each level of its instructions, emulated by qemu. On an Arm machine
# itself: make test-arm ARM_CXX=g++ ARM_RUN= ARM_ARCHS=native
#
# A program for another Arm machine, compiled here (runq_w8a8 in the same way):
#     Linux       make runq CXX=aarch64-linux-gnu-g++ ARCH=armv8.2-a+dotprod TOKENIZER=0 CXXFLAGS=-static
#     Android     make runq CXX=$NDK/toolchains/llvm/prebuilt/linux-x86_64/bin/aarch64-linux-android29-clang++ \
#                     ARCH=armv8.2-a+dotprod TOKENIZER=0 CXXFLAGS=-static-openmp
#                 adb push runq model.bin /data/local/tmp
# Without TOKENIZER=0, PCRE2 and utf8proc have to be there for that machine. Cores with i8mm (Armv8.6: Neoverse V1 and
# N2, Cortex-X2 and A710, and later) take ARCH=armv8.6-a, older ones without dotprod ARCH=armv8-a.
ARM_CXX   ?= aarch64-linux-gnu-g++
ARM_ARCHS ?= armv8-a armv8.2-a+dotprod armv8.6-a
ARM_RUN   ?= qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu
ARM_TESTS := $(foreach a,$(ARM_ARCHS),$(PROGRAMS:%=build/arm/$a/%_test))
# The test libraries are headers in /usr/include, which comes last: the target's own libc headers must win.
ARM_FLAGS := -std=c++20 -O2 -fopenmp -fno-math-errno -fno-trapping-math -DNO_TOKENIZER -I. -Itests \
             -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) -idirafter /usr/include
build/packages-arm: build/packages-test
	@sh tools/install.sh $(PACKAGES_ARM)
	@touch $@
ARM_KERNEL_TESTS := tests/int8_matmul_test.cpp tests/attention_test.cpp
ARM_SOURCES := $(HEADERS) $(wildcard *.cpp tests/*.h tests/*.cpp) build/packages-arm
define arm_rules
build/arm/$1/runq_test: $(ARM_SOURCES)
	@mkdir -p $$(@D)
	$(ARM_CXX) $(ARM_FLAGS) -march=$1 tests/main.cpp $(ARM_KERNEL_TESTS) tests/runq_test.cpp -o $$@
build/arm/$1/runq_w8a8_test: $(ARM_SOURCES)
	@mkdir -p $$(@D)
	$(ARM_CXX) $(ARM_FLAGS) -march=$1 tests/main.cpp tests/runq_w8a8_test.cpp -o $$@
endef
$(foreach a,$(ARM_ARCHS),$(eval $(call arm_rules,$a)))
test-arm: $(ARM_TESTS) $(TEST_MODELS)
	@for test in $(ARM_TESTS); do \
	    echo "--- $$test"; OMP_WAIT_POLICY=passive $(ARM_RUN) $$test --no-colors=1 || echo "exit code $$?"; \
	done | awk -v runs=$(words $(ARM_TESTS)) '{ print; fflush() } \
	    /^\[doctest\] test cases:/ { passed += $$6; failed += $$9; runs-- } \
	    END { failed += runs; print passed " passed, " failed " failed"; exit failed > 0 }'

# Compares the numpy reference with transformers itself; needs torch and transformers in the Python it is given:
#     make test-hf PYTHON_HF=/path/to/python
PYTHON_HF ?= $(PYTHON)
test-hf:
	$(PYTHON_HF) -m tests.hf_fixtures check

golden: $(PY)
	$(PY) -m golden make

# ---- bench -----------------------------------------------------------------------------------------------------
MODELS  ?= llama-3.2-1b qwen3-0.6b
RUNS    ?= 3
THREADS ?=
SCHEME  ?= q8
BENCH_PROGRAM := $(if $(filter q8,$(SCHEME)),runq,runq_$(SCHEME))
BENCH_OUT := build/bench/results.$(SCHEME)
bench: $(BENCH_PROGRAM) build/limits $(PY)
	$(PY) -m bench.run --scheme $(SCHEME) --program $(BENCH_PROGRAM) --models $(MODELS) --runs $(RUNS) \
	    $(if $(THREADS),--threads $(THREADS)) --json $(BENCH_OUT).json --svg $(BENCH_OUT).svg

build/limits: bench/limits.cpp common/machine.h common/int8_matmul.h build/flags build/packages
	$(CXX) $(CXXFLAGS_ALL) $< -o $@

# ---- lint ------------------------------------------------------------------------------------------------------
lint: $(PY) build/packages-test
	@sh tools/install.sh $(PACKAGES_LINT)
	clang-format --dry-run --Werror $(CPP_FILES)
	$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check --quiet .
	@for cxx in g++ clang++; do for f in *.cpp tests/*.cpp bench/*.cpp; do \
	    echo "$$cxx -Wall -Wextra -Wshadow -Werror $$f"; \
	    $$cxx -std=c++20 -fopenmp -march=$(ARCH) -I. -Itests -Wall -Wextra -Wshadow -Werror -fsyntax-only $$f || exit 1; \
	done; done
	clang-tidy --quiet --warnings-as-errors='*' $(wildcard *.cpp) -- -std=c++20 -fopenmp -I.

format: $(PY)
	clang-format -i $(CPP_FILES)
	$(PY) -m ruff format --quiet .
	$(PY) -m ruff check --quiet --fix .

# ---- the rest --------------------------------------------------------------------------------------------------
help:
	@echo 'make             build the programs, export the bundled model to model.bin and model_w8a8.bin'
	@echo 'make run         the same, and print a story'
	@echo 'make test        set up, build and run every test'
	@echo 'make test-arm    the Arm kernels and the forward pass, cross-compiled and run under qemu'
	@echo 'make lint        clang-format, clang-tidy, ruff, warnings as errors with g++ and clang++'
	@echo 'make format      put all sources into their format'
	@echo 'make golden      write golden/data anew from the numpy reference'
	@echo 'make test-hf     compare the reference with transformers (PYTHON_HF=python that has torch)'
	@echo 'make bench       speed against what this machine can do (SCHEME=q8 MODELS="llama-3.2-1b qwen3-0.6b" RUNS=3 THREADS=n)'
	@echo 'make single      build/single/: each program and its headers in one file'
	@echo 'make runq        only that program; make runq_w8a8 the other'
	@echo 'make clean       remove what was built'
	@echo 'Choices: CXX=clang++  ARCH=x86-64-v3  TOKENIZER=0 (without PCRE2 and utf8proc: ids only)  WERROR=1'

clean:
	rm -rf build $(PROGRAMS) model.bin model_w8a8.bin

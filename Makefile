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

HEADERS   := $(wildcard common/*.h common/*.cuh)
VENV      := .venv
PY        := $(VENV)/bin/python
EXPORTER  := $(wildcard export/*.py golden/*.py)
TINY      := tiny-llama tiny-qwen3
PROGRAMS  := runq runq_w8a8
SIMT      := $(wildcard simt/*.h)
SIMT_TESTS := simt_test simt_checks_test runq_awq_test runq_awq_checked_test awq_kernels_test
TEST_BINS := build/common_test build/int8_simde_test $(PROGRAMS:%=build/%_test) $(SIMT_TESTS:%=build/%)
TEST_MODELS := $(foreach m,$(TINY),$(foreach s,q8 w8a8 w8a8-block32 w8a8-static awq awq-g64,build/models/$m.$s.bin))
CPP_FILES := $(wildcard *.cpp *.cu common/*.h common/*.cuh simt/*.h simt/*.cpp tests/*.cpp tests/*.h bench/*.cpp bench/*.cu)

.PHONY: all run test test-arm test-hf cuda gpu-files gpu-check golden single bench lint format help clean
.DELETE_ON_ERROR:

all: $(PROGRAMS) runq_awq model.bin model_w8a8.bin model_awq.bin

# ---- build -----------------------------------------------------------------------------------------------------
runq runq_w8a8: %: %.cpp $(HEADERS) build/flags build/packages
	$(CXX) $(CXXFLAGS_ALL) $< -o $@ $(LIBS)

# runq_awq is for the GPU where there are nvcc and a GPU, and otherwise for the CPU, through simt/. CUDA=1 and CUDA=0 say
# which; CUDA_ARCH for which GPU. Where cuBLAS cannot be found it is built without.
NVCC      ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
CUDA      ?= $(shell command -v $(NVCC) >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo 1 || echo 0)
CUDA_ARCH ?= native
empty     :=
comma     := ,
spaced_to_commas = $(subst $(empty) $(empty),$(comma),$(strip $1))
NVCC_FLAGS := -std=c++20 -O3 -I. -Xcompiler $(call spaced_to_commas,-fopenmp -Wall -Wextra $(if $(WERROR),-Werror)) $(filter -D%,$(CXXFLAGS_ALL))
CUBLAS     = $(eval CUBLAS := $$(shell sh tools/cublas.sh $$(NVCC) $$(PYTHON)))$(CUBLAS)
# CUDA code looks at the same bytes as uint4 and as half.
SIMT_FLAGS := $(CXXFLAGS_ALL) -fno-strict-aliasing -Wno-unknown-pragmas
runq_awq: runq_awq.cu $(HEADERS) $(SIMT) build/flags build/packages
ifeq ($(CUDA),1)
	$(NVCC) $(NVCC_FLAGS) -arch=$(CUDA_ARCH) $< -o $@ $(LIBS) $(CUBLAS)
else
	$(CXX) $(SIMT_FLAGS) -x c++ $< -o $@ $(LIBS)
endif

# Another compiler or other flags than last time: build again.
FLAGS = $(CXX) $(CXXFLAGS_ALL) $(LIBS) CUDA=$(CUDA) $(CUDA_ARCH)
build/flags: FORCE
	@mkdir -p build
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
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
model_awq.bin: build/models/tiny-llama.awq.bin
	cp $< $@

build/models/%.q8.bin: $(PY) $(EXPORTER) models/%/model.safetensors models/%/config.json models/%/tokenizer.json
	@mkdir -p $(@D)
	$(PY) -m export q8 models/$* $@ --quiet

# The same calibration as for the golden vectors.
CALIBRATION := --calib models/calibration.txt --seq-len 256
W8A8_EXPORT = @mkdir -p $(@D) && $(PY) -m export w8a8 models/$* $@ --quiet $(CALIBRATION)
AWQ_EXPORT = @mkdir -p $(@D) && $(PY) -m export awq models/$* $@ --quiet $(CALIBRATION)
CALIBRATED_SOURCE = $(PY) $(EXPORTER) models/calibration.txt models/%/model.safetensors models/%/config.json models/%/tokenizer.json
build/models/%.w8a8.bin: $(CALIBRATED_SOURCE)
	$(W8A8_EXPORT)
build/models/%.w8a8-block32.bin: $(CALIBRATED_SOURCE)
	$(W8A8_EXPORT) --block 32
build/models/%.w8a8-static.bin: $(CALIBRATED_SOURCE)
	$(W8A8_EXPORT) --act static
build/models/%.awq.bin: $(CALIBRATED_SOURCE)
	$(AWQ_EXPORT)
build/models/%.awq-g64.bin: $(CALIBRATED_SOURCE)
	$(AWQ_EXPORT) --group-size 64

# ---- run -------------------------------------------------------------------------------------------------------
run: runq model.bin
	./runq model.bin -i "Once upon a time"

single: $(PROGRAMS:%=build/single/%.cpp)
build/single/%.cpp: %.cpp $(HEADERS) tools/single.py
	@mkdir -p $(@D)
	$(PYTHON) tools/single.py $< > $@

# ---- test ------------------------------------------------------------------------------------------------------
test: $(TEST_BINS) build/tokenize_tool build/limits build/in_turns $(PROGRAMS:%=build/asan/%) build/asan/runq_awq $(PROGRAMS) runq_awq \
      single $(PY) model.bin model_w8a8.bin model_awq.bin $(TEST_MODELS)
	@$(PY) tests/run.py $(TEST_BINS)

build/%_test.o: tests/%_test.cpp $(HEADERS) $(wildcard *.cpp tests/*.h) build/flags build/packages-test
	$(CXX) $(CXXFLAGS_ALL) -Itests -c $< -o $@
build/main.o: tests/main.cpp build/flags build/packages-test
	$(CXX) $(CXXFLAGS_ALL) -c $< -o $@
OTHER_TESTS := $(PROGRAMS:%=tests/%_test.cpp) $(SIMT_TESTS:%=tests/%.cpp) tests/int8_simde_test.cpp
build/common_test: build/main.o $(patsubst tests/%.cpp,build/%.o,$(filter-out $(OTHER_TESTS),$(wildcard tests/*_test.cpp)))
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
# Where VNNI is emulated, whatever the machine has: see the source. A program of its own, as it defines the kernels again.
build/int8_simde_test.o: CXXFLAGS_ALL := $(filter-out -march=%,$(CXXFLAGS_ALL))
build/int8_simde_test.o: tests/int8_matmul_test.cpp
build/int8_simde_test: build/main.o build/int8_simde_test.o
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
$(PROGRAMS:%=build/%_test): build/%_test: build/main.o build/%_test.o
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)

# Kernels, always through simt/ here. In the checked build the emulator looks at every load and store: simt/checks.cpp.
AWQ_SOURCES := runq_awq.cu $(HEADERS) $(SIMT)
CHECKED_FLAGS := $(SIMT_FLAGS) -O1 -g -DCHECKED_BUILD -fsanitize=thread,alignment,bounds $(if $(findstring clang,$(CXX)),,-Wno-tsan)
build/simt_test.o build/runq_awq_test.o: CXXFLAGS_ALL := $(SIMT_FLAGS)
$(SIMT_TESTS:%=build/%.o): $(AWQ_SOURCES)
build/awq_kernels_test.o: bench/awq_kernels.cu
build/simt_checks_test.o build/awq_kernels_test.o: build/%.o: tests/%.cpp build/flags build/packages-test
	$(CXX) $(CHECKED_FLAGS) -Itests -c $< -o $@
build/runq_awq_checked_test.o: tests/runq_awq_test.cpp tests/safetensors.h build/flags build/packages-test
	$(CXX) $(CHECKED_FLAGS) -Itests -c $< -o $@
build/checks.o: simt/checks.cpp $(SIMT) build/flags build/packages
	$(CXX) $(SIMT_FLAGS) -c $< -o $@
build/simt_test build/runq_awq_test: build/%: build/main.o build/%.o
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
build/simt_checks_test build/runq_awq_checked_test build/awq_kernels_test: build/%: build/main.o build/checks.o build/%.o
	$(CXX) $(CXXFLAGS_ALL) $^ -Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset -o $@ $(LIBS)

# What only a GPU shows, in one report. The machine needs the CUDA toolkit, make and python3 with numpy. What else the
# tests take comes from build/gpu-files, where it is not installed: `make gpu-files` fills that folder, to be copied along.
GPU_BINS   := $(addprefix build/gpu/,runq_awq awq_kernels runq_awq_test awq_kernels_test)
GPU_MODELS := $(foreach m,$(TINY),$(foreach s,awq awq-g64,build/models/$m.$s.bin))
GPU_FLAGS   = $(filter-out -DNO_TOKENIZER,$(NVCC_FLAGS)) -DNO_TOKENIZER -lineinfo -arch=$(CUDA_ARCH) -Itests \
              $(if $(and $(wildcard /usr/include/doctest/doctest.h),$(wildcard /usr/include/nlohmann/json.hpp)),,-isystem build/gpu-files/include)
GPU_BUILD   = $(NVCC) $(GPU_FLAGS) $(CUBLAS) $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)
build/gpu/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(GPU_BUILD)' | cmp -s - $@ || echo '$(GPU_BUILD)' > $@
$(GPU_BINS): build/gpu/flags
build/gpu/runq_awq: runq_awq.cu $(AWQ_SOURCES)
	$(NVCC) $(GPU_FLAGS) $< -o $@ $(CUBLAS)
build/gpu/awq_kernels: bench/awq_kernels.cu $(AWQ_SOURCES)
	$(NVCC) $(GPU_FLAGS) $< -o $@ $(CUBLAS)
build/gpu/runq_awq_test build/gpu/awq_kernels_test: build/gpu/%: tests/%.cpp tests/main.cpp tests/safetensors.h bench/awq_kernels.cu $(AWQ_SOURCES)
	$(NVCC) $(GPU_FLAGS) -x cu tests/main.cpp $< -o $@ $(CUBLAS)

gpu-files: build/packages-test $(GPU_MODELS)
	@mkdir -p build/gpu-files/include build/gpu-files/models
	cp -r /usr/include/doctest /usr/include/nlohmann build/gpu-files/include
	cp $(GPU_MODELS) build/gpu-files/models

# GPU_CHECK='--quick', '--only ladder speed --tune' and so on: python3 -m bench.gpu_check --help
gpu-check:
	@$(MAKE) --no-print-directory -j4 $(GPU_BINS)
	@$(PYTHON) -m bench.gpu_check $(GPU_CHECK)

# Where nvcc is: everything compiles for two generations of GPUs without a warning, and no kernel of this project keeps
# registers in memory ("spills"). Nothing of it runs here.
CUDA_CHECKS := $(foreach sm,80 90,build/cuda/runq_awq.sm_$(sm).o build/cuda/awq_kernels.sm_$(sm).o)
define cuda_check
@mkdir -p $(@D)
$(NVCC) $(NVCC_FLAGS) $(filter-out -l% -L% -Xlinker -rpath%,$(CUBLAS)) -Werror all-warnings -Xptxas -v -arch=sm_$* -c $< -o $@ 2> $(@:.o=.log) || { cat $(@:.o=.log); exit 1; }
@! grep -B2 -E '[1-9][0-9]* bytes spill' $(@:.o=.log)
endef
build/cuda/runq_awq.sm_%.o: runq_awq.cu $(AWQ_SOURCES)
	$(cuda_check)
build/cuda/awq_kernels.sm_%.o: bench/awq_kernels.cu $(AWQ_SOURCES)
	$(cuda_check)
ifneq ($(shell command -v $(NVCC)),)
cuda: $(CUDA_CHECKS)
	@echo 'runq_awq.cu and bench/awq_kernels.cu compile for sm_80 and sm_90, nothing spills'
else
cuda:
	@echo 'there is no nvcc here: runq_awq.cu was not compiled for a GPU'
endif

build/tokenize_tool: tests/tokenize_tool.cpp $(HEADERS) build/flags build/packages
	$(CXX) $(CXXFLAGS_ALL) $< -o $@ $(LIBS)

# The same program under AddressSanitizer and UBSan, for the test that feeds it broken files.
ASAN := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
build/asan/%: %.cpp $(HEADERS) build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_ALL) $(ASAN) $< -o $@ $(LIBS)
build/asan/%: %.cu $(HEADERS) $(SIMT) build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) $(ASAN) -x c++ $< -o $@ $(LIBS)

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

build/limits build/in_turns: build/%: bench/%.cpp common/machine.h common/int8_matmul.h common/attention.h common/vector.h build/flags build/packages
	$(CXX) $(CXXFLAGS_ALL) $< -o $@

# ---- lint ------------------------------------------------------------------------------------------------------
lint: $(PY) build/packages-test
	@sh tools/install.sh $(PACKAGES_LINT)
	clang-format --dry-run --Werror $(CPP_FILES)
	$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check --quiet .
	@for cxx in g++ clang++; do for f in *.cpp simt/*.cpp tests/*.cpp bench/*.cpp; do \
	    echo "$$cxx -Wall -Wextra -Wshadow -Werror $$f"; \
	    $$cxx -std=c++20 -fopenmp -march=$(ARCH) -I. -Itests -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -fsyntax-only $$f || exit 1; \
	done; done
	@for cxx in g++ clang++; do for f in *.cu bench/*.cu; do \
	    echo "$$cxx -Wall -Wextra -Wshadow -Werror $$f"; \
	    $$cxx -x c++ -std=c++20 -fopenmp -march=$(ARCH) -I. -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -fsyntax-only $$f || exit 1; \
	done; done
	clang-tidy --quiet --warnings-as-errors='*' $(wildcard *.cpp) -- -std=c++20 -fopenmp -I.
	clang-tidy --quiet --warnings-as-errors='*' $(wildcard *.cu) -- -x c++ -std=c++20 -fopenmp -I. -Wno-unknown-pragmas

format: $(PY)
	clang-format -i $(CPP_FILES)
	$(PY) -m ruff format --quiet .
	$(PY) -m ruff check --quiet --fix .

# ---- the rest --------------------------------------------------------------------------------------------------
help:
	@echo 'make             build the programs, export the bundled model to model.bin, model_w8a8.bin, model_awq.bin'
	@echo 'make run         the same, and print a story'
	@echo 'make test        set up, build and run every test'
	@echo 'make cuda        compile runq_awq for two kinds of GPU, where nvcc is'
	@echo 'make gpu-check   on a machine with a GPU: tests, sanitizer, every kernel timed, in one report (make gpu-files first)'
	@echo 'make test-arm    the Arm kernels and the forward pass, cross-compiled and run under qemu'
	@echo 'make lint        clang-format, clang-tidy, ruff, warnings as errors with g++ and clang++'
	@echo 'make format      put all sources into their format'
	@echo 'make golden      write golden/data anew from the numpy reference'
	@echo 'make test-hf     compare the reference with transformers (PYTHON_HF=python that has torch)'
	@echo 'make bench       speed against what this machine can do (SCHEME=q8 MODELS="llama-3.2-1b qwen3-0.6b" RUNS=3 THREADS=n)'
	@echo 'make single      build/single/: each program and its headers in one file'
	@echo 'make runq        only that program; likewise runq_w8a8, runq_awq'
	@echo 'make clean       remove what was built'
	@echo 'Choices: CXX=clang++  ARCH=x86-64-v3  TOKENIZER=0 (without PCRE2 and utf8proc: ids only)  WERROR=1'
	@echo '         CUDA=1 CUDA_ARCH=sm_90 (runq_awq for a GPU)  CUDA=0 (for the CPU)'

clean:
	rm -rf build $(PROGRAMS) runq_awq model.bin model_w8a8.bin model_awq.bin

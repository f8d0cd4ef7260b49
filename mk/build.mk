# Compiling: flags, packages, the programs.
empty :=
comma := ,

# g++ 12 sees overlaps in std::string's operator+ (GCC bug 105651) and uninitialized registers in the AVX-512 headers
# (105593) that are not there; passing vectors between functions concerns no ABI, as all of them are inlined.
warnings_of = -Wall -Wextra -Wshadow -Wno-psabi $(if $(or $(findstring clang,$1),$(findstring zig,$1)),,-Wno-restrict -Wno-maybe-uninitialized -Wno-uninitialized)
WARNINGS := $(call warnings_of,$(CXX)) $(if $(WERROR),-Werror)
# clang calls a processor of Apple's by -mcpu. On Windows g++ does not align the stack to vectors of 32 bytes (GCC bug
# 54412); the assembler makes moves of such that need no alignment.
WINDOWS := $(findstring _NT,$(UNAME))
MARCH   := $(if $(filter Darwin,$(UNAME)),-mcpu,-march)=$(ARCH)$(if $(WINDOWS), -Wa$(comma)-muse-unaligned-vector-move)
# A program has a second form over engine/, the one that is built here. Alone, without this, its file is all of it: make plain.
ENGINE := -DENGINE
# Rounding stays exactly as written, fused only where the text says so; errno and floating-point traps, which nothing
# here looks at, are given up.
CXXFLAGS_ALL := -std=c++20 -O3 $(MARCH) -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off $(ENGINE) -I. $(WARNINGS) $(CXXFLAGS)
# Of the programs that people run: a mistake stops the program before it can be used. The sanitizers see more, and
# have no need of it.
HARDENING := -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3 -fstack-protector-strong $(if $(filter Linux,$(UNAME)),-Wl$(comma)-z$(comma)relro$(comma)-z$(comma)now)
PACKAGES_BUILD := g++
ifeq ($(TOKENIZER),0)
CXXFLAGS_ALL += -DNO_TOKENIZER
else
LIBS := -lpcre2-8 -lutf8proc
# Homebrew's libraries are where no compiler looks, and its libedit where pkg-config does not.
ifeq ($(UNAME),Darwin)
PKG_CONFIG    := PKG_CONFIG_PATH="$$(brew --prefix libedit)/lib/pkgconfig" pkg-config
DARWIN_NEEDS  := libpcre2-8 libutf8proc $(if $(filter-out 0,$(LINE_EDITOR)),libedit)
DARWIN_CFLAGS := $(shell $(PKG_CONFIG) --cflags $(DARWIN_NEEDS))
CXXFLAGS_ALL  += $(DARWIN_CFLAGS)
LIBS          := $(shell $(PKG_CONFIG) --libs-only-L $(DARWIN_NEEDS)) $(LIBS)
endif
PACKAGES_BUILD += pkg-config libpcre2-dev libutf8proc-dev
ifneq ($(LINE_EDITOR),0)
CXXFLAGS_ALL += -DLINE_EDITOR
LIBS += -ledit
PACKAGES_BUILD += libedit-dev
endif
endif
LIBS += $(if $(WINDOWS),-lshell32 -lsynchronization)
PACKAGES_PYTHON := python3-venv
PACKAGES_TEST := doctest-dev nlohmann-json3-dev libsimde-dev tmux
PACKAGES_ARM  := g++-aarch64-linux-gnu qemu-user
PACKAGES_OPENCL := pocl-opencl-icd ocl-icd-opencl-dev
PACKAGES_HIP  := hipcc libamdhip64-dev rocm-device-libs
PACKAGES_LINT := clang clang-format clang-tidy
PACKAGES_FUZZ := clang libclang-rt-dev
PACKAGES_LLVM := llvm

# The compiler lists the headers that it read, for each file that it makes: build/deps/FILE.d, read back at the end.
DEPS = -MMD -MP -MT $@ -MF build/deps/$(subst /,_,$@).d
DEPS_FOLDER := $(shell mkdir -p build/deps)
-include $(wildcard build/deps/*.d)

# What every program needs and takes long to compile is compiled once; all else of engine/ is headers.
LIBRARY   := engine/app/cli.cpp engine/app/line_editor.cpp engine/cpu/attention.cpp engine/cpu/quant_matmul.cpp
LIBRARY_O := $(LIBRARY:%.cpp=build/lib/%.o)
# Products with matrices of few bits take longest to compile; these programs have none.
INT8_PROGRAMS := runq runq_w8a8
INT8_LIBRARY  := $(LIBRARY_O:%/quant_matmul.o=%/int8_matmul.o)
build/lib/engine/cpu/int8_matmul.o: engine/cpu/quant_matmul.cpp build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_ALL) $(HARDENING) -DINT8_ALONE $(DEPS) -c $< -o $@
HEADERS   := $(wildcard engine/*/*.h engine/*/*.cuh)
$(LIBRARY_O) $(PROGRAMS:%=build/lib/%.o): build/lib/%.o: %.cpp build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_ALL) $(HARDENING) $(DEPS) -c $< -o $@

# A program in two steps, of which a compiler's cache can keep the first: $(call compiled,FLAGS) makes $@.o of $<.
compiled = $(CXX) $1 $(DEPS) -c $< -o $@.o

$(INT8_PROGRAMS): $(INT8_LIBRARY)
$(filter-out $(INT8_PROGRAMS),$(PROGRAMS)): $(LIBRARY_O)
$(PROGRAMS): %: build/lib/%.o
	$(CXX) $(CXXFLAGS_ALL) $(HARDENING) $^ -o $@ $(LIBS)

# A CUDA program is for the GPU where there are nvcc and a GPU, and otherwise for the CPU, through simt/. CUDA=1 and
# CUDA=0 say which; CUDA_ARCH for which GPU. Where cuBLAS cannot be found it is built without.
NVCC      ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
CUDA      ?= $(shell command -v $(NVCC) >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo 1 || echo 0)
CUDA_ARCH ?= native
spaced_to_commas = $(subst $(empty) $(empty),$(comma),$(strip $1))
NVCC_FLAGS := -std=c++20 -O3 -I. -Xcompiler $(call spaced_to_commas,-fopenmp-simd -pthread -Wall -Wextra $(if $(WERROR),-Werror)) $(filter -D%,$(CXXFLAGS_ALL))
CUBLAS     = $(eval CUBLAS := $$(shell sh tools/cublas.sh $$(NVCC) $$(PYTHON)))$(CUBLAS)
# CUDA code looks at the same bytes as uint4 and as half.
SIMT_FLAGS := $(CXXFLAGS_ALL) -fno-strict-aliasing -Wno-unknown-pragmas
$(CUDA_PROGRAMS): %: %.cu $(LIBRARY_O) build/flags build/packages
ifeq ($(CUDA),1)
	$(NVCC) $(NVCC_FLAGS) -arch=$(CUDA_ARCH) $(DEPS) $< $(LIBRARY_O) -o $@ $(LIBS) $(CUBLAS)
else
	$(CXX) $(SIMT_FLAGS) $(HARDENING) $(DEPS) -x c++ -c $< -o build/lib/$@.o
	$(CXX) $(SIMT_FLAGS) $(HARDENING) build/lib/$@.o $(LIBRARY_O) -o $@ $(LIBS)
endif

# Another compiler or other flags than last time: build again. Here and now, without what single targets add.
FLAGS := $(CXX) $(CXXFLAGS_ALL) $(HARDENING) $(LIBS) CUDA=$(CUDA) $(CUDA_ARCH)
build/flags: FORCE
	@mkdir -p build
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
FORCE:

# Packages are asked for before anything is compiled or fetched, all that the goals take at once, so that a person types one
# password, or one line for root. A goal that is not in this list takes those of one rule.
NEEDS_HERE = $(sort $(foreach goal,$(or $(MAKECMDGOALS),all),$(NEEDS_$(goal))))
$(foreach goal,all run chat smollm2 bench quality test-real serve-check,$(eval NEEDS_$(goal) := BUILD PYTHON))
$(foreach goal,test check gpu-files,$(eval NEEDS_$(goal) := BUILD PYTHON TEST))
$(foreach goal,fuzz fuzz-corpus test-fuzz,$(eval NEEDS_$(goal) := BUILD PYTHON FUZZ))
NEEDS_fuzz-coverage := BUILD PYTHON FUZZ LLVM
$(foreach goal,$(PROGRAMS) $(CUDA_PROGRAMS),$(eval NEEDS_$(goal) := BUILD))
$(foreach goal,$(FIRST_MODELS),$(eval NEEDS_$(goal) := PYTHON))
NEEDS_test-all := BUILD PYTHON TEST LINT ARM MINGW WINE HIP FUZZ HW WEB BROWSER DIST
$(foreach goal,lint lint-format lint-g++ lint-clang++ lint-tidy,$(eval NEEDS_$(goal) := BUILD PYTHON TEST LINT))
NEEDS_test-arm := BUILD PYTHON TEST ARM
NEEDS_hip      := BUILD HIP
NEEDS_test-hf  := BUILD
install = CXX='$(CXX)' PYTHON='$(PYTHON)' sh tools/install.sh $(sort $1 $(foreach needs,$(NEEDS_HERE),$(PACKAGES_$(needs))))

# Another compiler than before, or a tokenizer after all: ask again. The lines are those that were asked for.
build/packages: FORCE
	@mkdir -p build
	@grep -qxF '$(CXX) $(PACKAGES_BUILD)' $@ 2>/dev/null || \
	    { $(call install,$(PACKAGES_BUILD)) && echo '$(CXX) $(PACKAGES_BUILD)' >> $@; }

build/packages-test: build/packages
	@$(call install,$(PACKAGES_TEST))
	@touch $@

# ---- alone -----------------------------------------------------------------------------------------------------------
# The programs of which the file is all there is: compiled alone, without engine/.
#
#     make plain         build/plain/runq and so on; the first lines of each file have the command for it
#     make plain-asan    build/plain-asan/: the same under AddressSanitizer and UBSan, for tests
#     make sections      what several programs have in common is copied out of the first that has it (tools/sections.py)
PLAIN_PROGRAMS := runq runq_w8a8 runq_gptq runq_moe
# Through the emulator, which is all that their files need besides. nvcc compiles them alone, too: make cuda.
PLAIN_CUDA     := runq_awq

.PHONY: plain plain-asan sections
plain: $(PLAIN_PROGRAMS:%=build/plain/%) $(PLAIN_CUDA:%=build/plain/%)
plain-asan: $(PLAIN_PROGRAMS:%=build/plain-asan/%)
NEEDS_plain      := BUILD
NEEDS_plain-asan := BUILD

# Where a compiler has no library of OpenMP, as on macOS, its threads are given up.
OPENMP       = $(eval OPENMP := $$(shell echo 'int main() {}' | $$(CXX) -fopenmp -x c++ - -o /dev/null 2>/dev/null && echo -fopenmp || echo -fopenmp-simd))$(OPENMP)
PLAIN_FLAGS  = -std=c++20 -O3 $(MARCH) -ffp-contract=off $(OPENMP) $(WARNINGS) $(if $(filter 0,$(TOKENIZER)),-DNO_TOKENIZER) $(DARWIN_CFLAGS) $(CXXFLAGS)
PLAIN_LIBS  := $(filter-out -ledit,$(LIBS))
$(PLAIN_PROGRAMS:%=build/plain/%): build/plain/%: %.cpp build/flags build/packages
	@mkdir -p $(@D)
	$(call compiled,$(PLAIN_FLAGS))
	$(CXX) $(PLAIN_FLAGS) $@.o -o $@ $(PLAIN_LIBS)
PLAIN_ASAN = $(PLAIN_FLAGS) -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS
$(PLAIN_PROGRAMS:%=build/plain-asan/%): build/plain-asan/%: %.cpp build/flags build/packages
	@mkdir -p $(@D)
	$(call compiled,$(PLAIN_ASAN))
	$(CXX) $(PLAIN_ASAN) $@.o -o $@ $(PLAIN_LIBS)

PLAIN_SIMT = $(PLAIN_FLAGS) -fno-strict-aliasing -Wno-unknown-pragmas
$(PLAIN_CUDA:%=build/plain/%): build/plain/%: %.cu build/flags build/packages
	@mkdir -p $(@D)
	$(call compiled,$(PLAIN_SIMT) -x c++)
	$(CXX) $(PLAIN_SIMT) $@.o -o $@ $(PLAIN_LIBS)

# The tests of a program once more, on its plain form.
$(PLAIN_CUDA:%=build/plain/%_test.o): build/plain/%_test.o: tests/%_test.cpp build/flags build/packages-test
	@mkdir -p $(@D)
	$(CXX) $(PLAIN_SIMT) -I. $(DOCTEST) $(DEPS) -c $< -o $@
$(PLAIN_CUDA:%=build/plain/%_test): build/plain/%_test: build/main.o build/plain/%_test.o
	$(CXX) $(PLAIN_SIMT) $^ -o $@ $(PLAIN_LIBS)
$(PLAIN_PROGRAMS:%=build/plain/%_test.o): build/plain/%_test.o: tests/%_test.cpp build/flags build/packages-test
	@mkdir -p $(@D)
	$(CXX) $(PLAIN_FLAGS) -O1 -I. $(DOCTEST) $(DEPS) -c $< -o $@
$(PLAIN_PROGRAMS:%=build/plain/%_test): build/plain/%_test: build/main.o build/plain/%_test.o
	$(CXX) $(PLAIN_FLAGS) $^ -o $@ $(PLAIN_LIBS)

sections:
	@'$(PYTHON)' tools/sections.py

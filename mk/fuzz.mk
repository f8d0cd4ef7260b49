# Fuzzing with libFuzzer under AddressSanitizer and UBSan: docs/contributing.md.
#
#     make fuzz                                     every harness for a minute
#     make fuzz SECONDS=600 FUZZ="encode load_runq" these two, ten minutes each
#     make fuzz FUZZ_CHECKS=                        without sanitizers, and comparisons are not followed: ten times as many
#                                                   executions and more; what they reach is in build/fuzz, where the next
#                                                   make fuzz goes on with it
#     make test-fuzz                                each harness finds a bug that is planted for it
#     make fuzz-coverage                            what the inputs reach, by file, and the lines with a branch that none takes
#     make fuzz-corpus                              what the stored inputs do not reach yet goes into tests/fuzz/corpus
FUZZ_COMMON := $(filter-out replay load forward,$(patsubst tests/fuzz/%.cpp,%,$(wildcard tests/fuzz/*.cpp)))
FUZZ_ALL    := $(FUZZ_COMMON) $(foreach p,$(ALL_PROGRAMS),load_$p forward_$p) $(foreach p,$(PLAIN_PROGRAMS),plain_load_$p plain_forward_$p)
FUZZ        ?= $(FUZZ_ALL)
SECONDS     ?= 60
FUZZ_CXX    ?= clang++
FUZZ_CHECKS ?= address,undefined

FUZZ_FLAGS := -std=c++20 -g $(if $(FUZZ_CHECKS),-O1,-O2 -fno-sanitize-coverage=trace-cmp) -march=$(ARCH) -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off -fno-strict-aliasing $(ENGINE) -I. \
              -Wall -Wextra -Wshadow -Wno-unknown-pragmas -Wno-psabi -Wno-pass-failed $(if $(WERROR),-Werror) \
              -fsanitize=fuzzer$(addprefix $(comma),$(FUZZ_CHECKS)) -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS
FUZZ_BINS  := $(FUZZ:%=build/fuzz/bin/%)
FUZZ_LIBS  := -lpcre2-8 -lutf8proc
# The tokenizers that are fuzzed with text.
FUZZ_MODELS := $(TINY:%=build/models/%.q8.bin)
source_of    = $(wildcard $1.cpp $1.cu)

.PHONY: fuzz fuzz-corpus fuzz-coverage test-fuzz
fuzz: $(FUZZ_BINS) $(FUZZ_MODELS)
	@'$(PYTHON)' tests/fuzz/run.py --seconds $(SECONDS) $(FUZZ)
fuzz-corpus: $(FUZZ_BINS) $(FUZZ_MODELS)
	@'$(PYTHON)' tests/fuzz/run.py --merge $(FUZZ)
test-fuzz: $(VENV_READY) build/packages-fuzz $(FUZZ_MODELS)
	@FUZZ="$(FUZZ)" FUZZ_ALL="$(FUZZ_ALL)" FUZZ_COMPILE="$(FUZZ_CXX) $(FUZZ_FLAGS) $(FUZZ_LIBS)" $(PY) -m pytest -n "$$(nproc)" tests/fuzz/planted_bugs.py

# LIBRARY is compiled once for all harnesses.
FUZZ_LIBRARY_O := $(LIBRARY:%.cpp=build/fuzz/lib/%.o)
$(FUZZ_LIBRARY_O): build/fuzz/lib/%.o: %.cpp build/packages-fuzz build/fuzz/flags
	@mkdir -p $(@D)
	$(FUZZ_CXX) $(FUZZ_FLAGS) $(DEPS) -c $< -o $@
fuzz_link = $(FUZZ_CXX) $(FUZZ_FLAGS) $(DEPS) -DLIBRARY_IS_LINKED $1 $< $(FUZZ_LIBRARY_O) -o $@ $(FUZZ_LIBS)
$(FUZZ_COMMON:%=build/fuzz/bin/%): build/fuzz/bin/%: tests/fuzz/%.cpp $(FUZZ_LIBRARY_O)
	@mkdir -p $(@D)
	$(call fuzz_link)
build/fuzz/bin/load_%: tests/fuzz/load.cpp $(FUZZ_LIBRARY_O)
	@mkdir -p $(@D)
	$(call fuzz_link,-DPROGRAM='"$(call source_of,$*)"')
build/fuzz/bin/forward_%: tests/fuzz/forward.cpp $(FUZZ_LIBRARY_O)
	@mkdir -p $(@D)
	$(call fuzz_link,-DPROGRAM='"$(call source_of,$*)"')
# Of the program's file alone: tests/fuzz/plain_form.h.
build/fuzz/bin/plain_load_%: tests/fuzz/load.cpp $(FUZZ_LIBRARY_O)
	@mkdir -p $(@D)
	$(call fuzz_link,-DPLAIN -DPROGRAM='"$(call source_of,$*)"')
build/fuzz/bin/plain_forward_%: tests/fuzz/forward.cpp $(FUZZ_LIBRARY_O)
	@mkdir -p $(@D)
	$(call fuzz_link,-DPLAIN -DPROGRAM='"$(call source_of,$*)"')

build/fuzz/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FUZZ_CXX) $(FUZZ_FLAGS)' | cmp -s - $@ || echo '$(FUZZ_CXX) $(FUZZ_FLAGS)' > $@

build/packages-fuzz: build/packages
	@$(call install,$(PACKAGES_FUZZ))
	@touch $@

# The stored inputs, without libFuzzer and with the usual compiler: a program for the harnesses of engine/, and one for
# each program's, which also takes the broken files of tests/test_broken_files.py. Part of make test. Inputs are small:
# compiling is what takes time.
ASAN    := -O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS
REPLAYS := build/fuzz/replay $(ALL_PROGRAMS:%=build/fuzz/replay_%)
ifneq ($(TOKENIZER),0)
test: $(REPLAYS)
endif
REPLAY_LIBRARY_O := $(LIBRARY:%.cpp=build/fuzz/replay_lib/%.o)
$(REPLAY_LIBRARY_O): build/fuzz/replay_lib/%.o: %.cpp build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) $(ASAN) $(DEPS) -c $< -o $@
define replay
@mkdir -p $(@D)
$(call compiled,$(SIMT_FLAGS) $(ASAN) -DLIBRARY_IS_LINKED $1)
$(CXX) $(SIMT_FLAGS) $(ASAN) $@.o $(REPLAY_LIBRARY_O) -o $@ $(LIBS)
endef
build/fuzz/replay: tests/fuzz/replay.cpp $(REPLAY_LIBRARY_O)
	$(call replay)
# The two harnesses of a program, and those of its file alone.
replayed = -DPROGRAM='"$(call source_of,$*)"' $(if $(filter $*,$(PLAIN_PROGRAMS)),-DWITH_PLAIN)
build/fuzz/replay_%: tests/fuzz/replay.cpp $(REPLAY_LIBRARY_O) mk/build.mk
	$(call replay,$(replayed))

# The replays once more, with counters of what is executed.
COVERAGE   := -std=c++20 -O0 -march=$(ARCH) -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off -fno-strict-aliasing $(ENGINE) -I. -w \
              -fprofile-instr-generate -fcoverage-mapping -DLIBRARY_IS_LINKED
COVERAGE_O := $(LIBRARY:%.cpp=build/fuzz/coverage/%.o)
$(COVERAGE_O): build/fuzz/coverage/%.o: %.cpp build/packages-fuzz
	@mkdir -p $(@D)
	$(FUZZ_CXX) $(COVERAGE) $(DEPS) -c $< -o $@
coverage_link = $(FUZZ_CXX) $(COVERAGE) $(DEPS) $1 $< $(COVERAGE_O) -o $@ $(FUZZ_LIBS)
build/fuzz/coverage/replay: tests/fuzz/replay.cpp $(COVERAGE_O)
	$(call coverage_link)
build/fuzz/coverage/replay_%: tests/fuzz/replay.cpp $(COVERAGE_O)
	$(call coverage_link,$(replayed))
fuzz-coverage: $(REPLAYS:build/fuzz/%=build/fuzz/coverage/%) $(FUZZ_MODELS)
	@$(call install,$(PACKAGES_LLVM))
	@'$(PYTHON)' tests/fuzz/run.py --coverage $(FUZZ)

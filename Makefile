# make            build runq and export the bundled model to model.bin
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

# g++ 12 sees overlaps in std::string's operator+ that are not there (GCC bug 105651).
WARNINGS := -Wall -Wextra -Wshadow $(if $(findstring clang,$(CXX)),,-Wno-restrict) $(if $(WERROR),-Werror)
# Rounding stays exactly as written; only errno and floating-point traps, which nothing here looks at, are given up.
CXXFLAGS_ALL := -std=c++20 -O3 -march=$(ARCH) -fopenmp -fno-math-errno -fno-trapping-math -I. $(WARNINGS) $(CXXFLAGS)
ifeq ($(TOKENIZER),0)
CXXFLAGS_ALL += -DNO_TOKENIZER
PACKAGES_BUILD := g++
else
LIBS := -lpcre2-8 -lutf8proc
PACKAGES_BUILD := g++ pkg-config libpcre2-dev libutf8proc-dev
endif
PACKAGES_TEST := doctest-dev nlohmann-json3-dev
PACKAGES_LINT := clang clang-format clang-tidy libomp-dev

HEADERS   := $(wildcard common/*.h)
VENV      := .venv
PY        := $(VENV)/bin/python
EXPORTER  := $(wildcard export/*.py golden/*.py)
TINY      := tiny-llama tiny-qwen3
TEST_BINS := build/common_test build/runq_test
CPP_FILES := $(wildcard *.cpp common/*.h tests/*.cpp tests/*.h)

.PHONY: all run test test-cpp test-py test-hf golden single lint format help clean
.DELETE_ON_ERROR:

all: runq model.bin

# ---- build -----------------------------------------------------------------------------------------------------
runq: runq.cpp $(HEADERS) build/flags build/packages
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

build/models/%.q8.bin: $(PY) $(EXPORTER) models/%/model.safetensors models/%/config.json models/%/tokenizer.json
	@mkdir -p $(@D)
	$(PY) -m export q8 models/$* $@ --quiet

# ---- run -------------------------------------------------------------------------------------------------------
run: runq model.bin
	./runq model.bin -i "Once upon a time"

single: build/single/runq.cpp
build/single/%.cpp: %.cpp $(HEADERS) tools/single.py
	@mkdir -p $(@D)
	$(PYTHON) tools/single.py $< > $@

# ---- test ------------------------------------------------------------------------------------------------------
test: $(TEST_BINS) build/tokenize_tool build/asan/runq runq single $(PY) model.bin \
      $(TINY:%=build/models/%.q8.bin)
	@$(PY) tests/run.py $(TEST_BINS)

build/%_test.o: tests/%_test.cpp $(HEADERS) $(wildcard *.cpp tests/*.h) build/flags build/packages-test
	$(CXX) $(CXXFLAGS_ALL) -Itests -c $< -o $@
build/main.o: tests/main.cpp build/flags build/packages-test
	$(CXX) $(CXXFLAGS_ALL) -c $< -o $@
build/common_test: build/main.o $(patsubst tests/%.cpp,build/%.o,$(filter-out tests/runq_test.cpp,$(wildcard tests/*_test.cpp)))
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
build/runq_test: build/main.o build/runq_test.o
	$(CXX) $(CXXFLAGS_ALL) $^ -o $@ $(LIBS)
build/tokenize_tool: tests/tokenize_tool.cpp $(HEADERS) build/flags build/packages
	$(CXX) $(CXXFLAGS_ALL) $< -o $@ $(LIBS)

# The same program under AddressSanitizer and UBSan, for the test that feeds it broken files.
build/asan/runq: runq.cpp $(HEADERS) build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_ALL) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all $< -o $@ $(LIBS)

# Compares the numpy reference with transformers itself; needs torch and transformers in the Python it is given:
#     make test-hf PYTHON_HF=/path/to/python
PYTHON_HF ?= $(PYTHON)
test-hf:
	$(PYTHON_HF) -m tests.hf_fixtures check

golden: $(PY)
	$(PY) -m golden make

# ---- lint ------------------------------------------------------------------------------------------------------
lint: $(PY) build/packages-test
	@sh tools/install.sh $(PACKAGES_LINT)
	clang-format --dry-run --Werror $(CPP_FILES)
	$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check --quiet .
	@for cxx in g++ clang++; do for f in *.cpp tests/*.cpp; do \
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
	@echo 'make             build runq and export the bundled model to model.bin'
	@echo 'make run         the same, and print a story'
	@echo 'make test        set up, build and run every test'
	@echo 'make lint        clang-format, clang-tidy, ruff, warnings as errors with g++ and clang++'
	@echo 'make format      put all sources into their format'
	@echo 'make golden      write golden/data anew from the numpy reference'
	@echo 'make test-hf     compare the reference with transformers (PYTHON_HF=python that has torch)'
	@echo 'make single      build/single/runq.cpp: the program and its headers in one file'
	@echo 'make runq        only the program'
	@echo 'make clean       remove what was built'
	@echo 'Choices: CXX=clang++  ARCH=x86-64-v3  TOKENIZER=0 (without PCRE2 and utf8proc: ids only)  WERROR=1'

clean:
	rm -rf build runq model.bin

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
STRICT   = -x c++ -std=c++20 -fopenmp-simd -march=$(ARCH) $(ENGINE) -I. -Itests -DBACKEND=portable -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -fsyntax-only
lint-g++ lint-clang++: lint-%: build/packages-lint
	@$(call each,$(COMPILED),$*,$(STRICT) {})
	@$(call each,$(PLAIN_PROGRAMS:%=%.cpp),$*,$(filter-out $(ENGINE) -I%,$(STRICT)) {})

lint-tidy: build/packages-lint
	@$(call each,$(wildcard *.cpp *.cu) $(LIBRARY),clang-tidy,--quiet --warnings-as-errors="*" {} -- -x c++ -std=c++20 -fopenmp-simd $(ENGINE) -I. -Wno-unknown-pragmas)
	@$(call each,$(PLAIN_PROGRAMS:%=%.cpp),clang-tidy,--quiet --warnings-as-errors="*" {} -- -std=c++20 -fopenmp-simd -Wno-unknown-pragmas)

format: $(VENV_READY)
	clang-format -i $(CPP_FILES)
	$(PY) -m ruff format --quiet .
	$(PY) -m ruff check --quiet --fix .

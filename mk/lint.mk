# Formats, warnings as errors with two compilers, static analysis.
CPP_FILES := $(wildcard *.cpp *.cu common/*/*.h common/*/*.cuh common/*/*.cpp common/backend/*.cu docs/*.c simt/*.h simt/*.cpp tests/*.cpp tests/*.h tests/fuzz/*.cpp tests/fuzz/*.h bench/*.cpp bench/*.cu bench/*.cuh)

# opencl.cpp only where OpenCL's headers are.
BACKEND_FILES := $(filter-out $(if $(filter opencl,$(BACKENDS)),,%/opencl.cpp),$(wildcard common/backend/*.cpp common/backend/*.cu))

.PHONY: lint-format lint-g++ lint-clang++ lint-tidy
lint: lint-format lint-g++ lint-clang++ lint-tidy

build/packages-lint: build/packages-test
	@$(call install,$(PACKAGES_LINT))
	@touch $@

lint-format: $(VENV_READY) build/packages-lint
	clang-format --dry-run --Werror $(CPP_FILES)
	$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check --quiet .

lint-g++ lint-clang++: lint-%: build/packages-lint
	@for f in *.cpp $(LIBRARY) $(BACKEND_FILES) simt/*.cpp tests/*.cpp tests/fuzz/*.cpp bench/*.cpp *.cu bench/*.cu; do \
	    echo "$* -Wall -Wextra -Wshadow -Werror $$f"; \
	    $* -x c++ -std=c++20 -fopenmp-simd -march=$(ARCH) -I. -Itests -DBACKEND=portable -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -fsyntax-only $$f || exit 1; \
	done

lint-tidy: build/packages-lint
	clang-tidy --quiet --warnings-as-errors='*' $(wildcard *.cpp) $(LIBRARY) -- -std=c++20 -fopenmp-simd -I.
	clang-tidy --quiet --warnings-as-errors='*' $(wildcard *.cu) -- -x c++ -std=c++20 -fopenmp-simd -I. -Wno-unknown-pragmas

format: $(VENV_READY)
	clang-format -i $(CPP_FILES)
	$(PY) -m ruff format --quiet .
	$(PY) -m ruff check --quiet --fix .

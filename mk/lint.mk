# Formats, warnings as errors with two compilers, static analysis.
CPP_FILES := $(wildcard *.cpp *.cu common/*/*.h common/*/*.cuh simt/*.h simt/*.cpp tests/*.cpp tests/*.h bench/*.cpp bench/*.cu bench/*.cuh)

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

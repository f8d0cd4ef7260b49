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
PLAIN_FLAGS  = -std=c++20 -O3 $(MARCH) $(OPENMP) $(WARNINGS) $(if $(filter 0,$(TOKENIZER)),-DNO_TOKENIZER) $(DARWIN_CFLAGS) $(CXXFLAGS)
PLAIN_LIBS  := $(filter-out -ledit,$(LIBS))
$(PLAIN_PROGRAMS:%=build/plain/%): build/plain/%: %.cpp build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(PLAIN_FLAGS) $(DEPS) $< -o $@ $(PLAIN_LIBS)
$(PLAIN_PROGRAMS:%=build/plain-asan/%): build/plain-asan/%: %.cpp build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(PLAIN_FLAGS) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS $(DEPS) $< -o $@ $(PLAIN_LIBS)

PLAIN_SIMT = $(PLAIN_FLAGS) -fno-strict-aliasing -Wno-unknown-pragmas
$(PLAIN_CUDA:%=build/plain/%): build/plain/%: %.cu build/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(PLAIN_SIMT) $(DEPS) -x c++ $< -o $@ $(PLAIN_LIBS)

# The tests of a program once more, on its plain form.
$(PLAIN_CUDA:%=build/plain/%_test.o): build/plain/%_test.o: tests/%_test.cpp build/flags build/packages-test
	@mkdir -p $(@D)
	$(CXX) $(PLAIN_SIMT) -I. -Itests $(DEPS) -c $< -o $@
$(PLAIN_CUDA:%=build/plain/%_test): build/plain/%_test: build/main.o build/plain/%_test.o
	$(CXX) $(PLAIN_SIMT) $^ -o $@ $(PLAIN_LIBS)
$(PLAIN_PROGRAMS:%=build/plain/%_test.o): build/plain/%_test.o: tests/%_test.cpp build/flags build/packages-test
	@mkdir -p $(@D)
	$(CXX) $(PLAIN_FLAGS) -O1 -I. -Itests $(DEPS) -c $< -o $@
$(PLAIN_PROGRAMS:%=build/plain/%_test): build/plain/%_test: build/main.o build/plain/%_test.o
	$(CXX) $(PLAIN_FLAGS) $^ -o $@ $(PLAIN_LIBS)

sections:
	@'$(PYTHON)' tools/sections.py

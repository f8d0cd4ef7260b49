# The kernels and the forward pass on Arm, once for each level of its instructions, emulated by qemu. On an Arm machine
# itself: make test-arm ARM_CXX=g++ ARM_RUN= ARM_ARCHS=native
#
# A program for another Arm machine, compiled here (runq_w8a8 and runq_gptq in the same way):
#     Linux       make runq CXX=aarch64-linux-gnu-g++ ARCH=armv8.2-a+dotprod TOKENIZER=0 CXXFLAGS=-static
#     Android     make runq CXX=$NDK/toolchains/llvm/prebuilt/linux-x86_64/bin/aarch64-linux-android29-clang++ \
#                     ARCH=armv8.2-a+dotprod TOKENIZER=0 CXXFLAGS=-static-libstdc++
#                 adb push runq model.bin /data/local/tmp
# A static runq_gptq loads no back ends (docs/backends.md); the linker warns of that.
# Without TOKENIZER=0, PCRE2 and utf8proc have to be there for that machine. Cores with i8mm (Armv8.6: Neoverse V1 and
# N2, Cortex-X2 and A710, and later) take ARCH=armv8.6-a, older ones without dotprod ARCH=armv8-a.
ARM_CXX   ?= aarch64-linux-gnu-g++
ARM_ARCHS ?= armv8-a armv8.2-a+dotprod armv8.6-a
ARM_RUN   ?= qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu
# The test libraries are headers in /usr/include, which comes last: the target's own libc headers must win.
ARM_FLAGS := -std=c++20 -O2 -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math -DNO_TOKENIZER $(ENGINE) -I. -Itests \
             -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) -idirafter /usr/include

# The kernels in one test program, each program's source in one of its own.
ARM_KERNELS := tests/quant_matmul_test.cpp tests/lowbit_matmul_test.cpp tests/attention_test.cpp tests/attention_int8_test.cpp \
               tests/ops_test.cpp
ARM_TESTS   := $(foreach a,$(ARM_ARCHS),build/arm/$a/kernels_test $(PROGRAMS:%=build/arm/$a/%_test))
ARM_SOURCES := $(HEADERS) $(LIBRARY) $(wildcard *.cpp tests/*.h) tests/main.cpp build/packages-arm
build/packages-arm: build/packages-test
	@$(call install,$(PACKAGES_ARM))
	@touch $@
define arm_rules
build/arm/$1/kernels_test: $(ARM_KERNELS) $(ARM_SOURCES)
	@mkdir -p $$(@D)
	$(ARM_CXX) $(ARM_FLAGS) -march=$1 tests/main.cpp $(ARM_KERNELS) $(LIBRARY) -o $$@
build/arm/$1/%_test: tests/%_test.cpp $(ARM_SOURCES)
	@mkdir -p $$(@D)
	$(ARM_CXX) $(ARM_FLAGS) -march=$1 tests/main.cpp $$< $(LIBRARY) -o $$@
endef
$(foreach a,$(ARM_ARCHS),$(eval $(call arm_rules,$a)))
test-arm: $(ARM_TESTS) $(TEST_MODELS) $(RANDOM_MODELS)
	@for test in $(ARM_TESTS); do \
	    echo "--- $$test"; $(ARM_RUN) $$test --no-colors=1 || echo "exit code $$?"; \
	done | awk -v runs=$(words $(ARM_TESTS)) '{ print; fflush() } \
	    /^\[doctest\] test cases:/ { passed += $$6; failed += $$9; runs-- } \
	    END { failed += runs; print passed " passed, " failed " failed"; exit failed > 0 }'

# ---- Arm -------------------------------------------------------------------------------------------------------------
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
ARM_FLAGS := -std=c++20 -O2 -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off -DNO_TOKENIZER $(ENGINE) -I. -Itests \
             -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) -idirafter /usr/include

# The kernels in one test program, each program's source in one of its own.
ARM_KERNELS := tests/quant_matmul_test.cpp tests/lowbit_matmul_test.cpp tests/attention_test.cpp tests/attention_int8_test.cpp \
               tests/ops_test.cpp
ARM_TESTS   := $(foreach a,$(ARM_ARCHS),build/arm/$a/kernels_test $(PROGRAMS:%=build/arm/$a/%_test))
build/packages-arm: build/packages-test
	@$(call install,$(PACKAGES_ARM))
	@touch $@
ARM_LIBRARY := $(LIBRARY) tests/main.cpp
define arm_rules
$(patsubst %.cpp,build/arm/$1/%.o,$(ARM_LIBRARY) $(ARM_KERNELS) $(PROGRAMS:%=tests/%_test.cpp)): build/arm/$1/%.o: %.cpp build/packages-arm
	@mkdir -p $$(@D)
	$(ARM_CXX) $(ARM_FLAGS) -march=$1 $$(DEPS) -c $$< -o $$@
build/arm/$1/kernels_test: $(ARM_KERNELS:%.cpp=build/arm/$1/%.o)
$(PROGRAMS:%=build/arm/$1/%_test): build/arm/$1/%_test: build/arm/$1/tests/%_test.o
build/arm/$1/kernels_test $(PROGRAMS:%=build/arm/$1/%_test): $(ARM_LIBRARY:%.cpp=build/arm/$1/%.o)
	$(ARM_CXX) $(ARM_FLAGS) -march=$1 $$^ -o $$@
endef
$(foreach a,$(ARM_ARCHS),$(eval $(call arm_rules,$a)))
test-arm: $(ARM_TESTS) $(TEST_MODELS) $(RANDOM_MODELS)
	@for test in $(ARM_TESTS); do \
	    echo "--- $$test"; $(ARM_RUN) $$test --no-colors=1 || echo "exit code $$?"; \
	done | awk -v runs=$(words $(ARM_TESTS)) '{ print; fflush() } \
	    /^\[doctest\] test cases:/ { passed += $$6; failed += $$9; runs-- } \
	    END { failed += runs; print passed " passed, " failed " failed"; exit failed > 0 }'

# Other systems' compilers read the program with back ends and that with most of engine/os. Nothing is made.
.PHONY: lint-systems
NEEDS_lint-systems := BUILD TEST ARM MINGW
lint-systems: build/packages-arm build/packages-mingw
	$(ARM_CXX) $(ARM_FLAGS) -march=armv8.6-a -fsyntax-only runq_gptq.cpp
	$(DESK_CXX_windows-mingw) $(call DESK_FLAGS,$(DESK_CXX_windows-mingw)) $(DESK_ISA_windows-mingw) -DNO_TOKENIZER -fsyntax-only runq.cpp

# ---- libraries from source -------------------------------------------------------------------------------------------
# PCRE2 and utf8proc from the sources of the distribution's packages, for systems that have no packages of them:
# What is below and web.mk compile them.
SOURCES     := build/library-sources
PCRE2_PARTS := auto_possess chartables compile config context error extuni find_bracket jit_compile maketables match match_data \
               newline ord2utf pattern_info script_run serialize string_utils study substring tables ucd valid_utf xclass
PCRE2_FLAGS := -DHAVE_CONFIG_H -DPCRE2_CODE_UNIT_WIDTH=8 -DPCRE2_STATIC -DSUPPORT_PCRE2_8 -DSUPPORT_UNICODE -DHAVE_MEMMOVE \
               -DHAVE_STDINT_H -DHAVE_INTTYPES_H -I$(SOURCES)/pcre2/src

$(SOURCES)/ready: tools/library_sources.py
	@'$(PYTHON)' $< $(@D)
	@mkdir -p $(@D)/include
	@cd $(@D)/pcre2/src && cp pcre2.h.generic pcre2.h && cp config.h.generic config.h && \
	    cp pcre2_chartables.c.dist pcre2_chartables.c && cp pcre2.h ../../utf8proc/utf8proc.h ../../include
	@touch $@

# ---- Windows and macOS -----------------------------------------------------------------------------------------------
# The programs for other systems than this one, with the tokenizer: docs/desks.md.
#
#     make windows          build/desks/windows/*.exe, by zig
#     make windows-mingw    build/desks/windows-mingw/*.exe, by the distribution's g++ for Windows
#     make macos            build/desks/macos/*, for Apple's processors, by zig
#     make test-windows     both kinds for Windows under Wine, and what the ones for macOS are linked with
#
# zig is clang with the headers and libraries of many systems, from the Python package index, in the version of
# tools/zig.lock and in an environment of its own.

DESKS := windows windows-mingw macos
.PHONY: windows windows-mingw macos
NEEDS_windows       := PYTHON
NEEDS_macos         := PYTHON
NEEDS_windows-mingw := MINGW
NEEDS_test-windows  := BUILD PYTHON MINGW WINE

ZIG_FOLDER := build/zig
ZIG_CACHE  ?= $(ZIG_FOLDER)/cache
ZIG        := ZIG_GLOBAL_CACHE_DIR=$(ZIG_CACHE) ZIG_LOCAL_CACHE_DIR=$(ZIG_CACHE) $(ZIG_FOLDER)/bin/python -m ziglang
$(ZIG_FOLDER)/ready: tools/zig.lock $(call moved,$(ZIG_FOLDER))
	$(call set_up,tools/zig.lock)

# The distribution's threads for Windows are those of POSIX.
MINGW          := x86_64-w64-mingw32
PACKAGES_MINGW := g++-mingw-w64-x86-64-posix
build/packages-mingw:
	@mkdir -p $(@D)
	@$(call install,$(PACKAGES_MINGW))
	@touch $@

# Of each: its compilers, the instructions that runq_gptq is compiled for and those of the other programs, what it links
# with, how programs and libraries are called, and the back ends of runq_gptq (docs/backends.md) with their instructions.
# zig writes the names of processors its own way, and makes an archive where a library shall be static.
X86_LEVELS                := avx2 avxvnni avx512vnni
DESK_CXX_windows          := $(ZIG) c++ -target x86_64-windows-gnu
DESK_CC_windows           := $(ZIG) cc -target x86_64-windows-gnu
DESK_ANY_windows          := -march=x86_64 -DATTEND_AVX2
DESK_ISA_windows          := -march=x86_64_v3
DESK_LINK_windows         := -static -lshell32 -lapi-ms-win-core-synch-l1-2-0 -s
DESK_LIBRARY_windows      := -lapi-ms-win-core-synch-l1-2-0 -s
DESK_READY_windows        := $(ZIG_FOLDER)/ready
DESK_EXE_windows          := .exe
DESK_DLL_windows          := .dll
DESK_BACKENDS_windows     := $(X86_LEVELS)

DESK_CXX_windows-mingw      := $(MINGW)-g++-posix -Wa,-muse-unaligned-vector-move
DESK_CC_windows-mingw       := $(MINGW)-gcc-posix
DESK_ANY_windows-mingw      := -march=x86-64 -DATTEND_AVX2
DESK_ISA_windows-mingw      := -march=x86-64-v3
DESK_LINK_windows-mingw     := -static -lshell32 -lsynchronization -s
DESK_LIBRARY_windows-mingw  := -static -lsynchronization -s
DESK_READY_windows-mingw    := build/packages-mingw
DESK_EXE_windows-mingw      := .exe
DESK_DLL_windows-mingw      := .dll
DESK_BACKENDS_windows-mingw := $(X86_LEVELS)

# Every processor of Apple's has dotprod, from M2 on i8mm.
DESK_CXX_macos      := $(ZIG) c++ -target aarch64-macos.13.0
DESK_CC_macos       := $(ZIG) cc -target aarch64-macos.13.0
DESK_ANY_macos      := -mcpu=apple_m1
DESK_ISA_macos      := -mcpu=apple_m1
DESK_LINK_macos     := -s
DESK_LIBRARY_macos  := -s
DESK_READY_macos    := $(ZIG_FOLDER)/ready
DESK_DLL_macos      := .dylib
DESK_BACKENDS_macos := dotprod i8mm
DESK_i8mm           := -mcpu=apple_m2
DESK_dotprod        := -mcpu=apple_m1
DESK_avx2           := -mavx2 -mfma -mf16c
DESK_avxvnni        := $(DESK_avx2) -mavxvnni
DESK_avx512vnni     := $(DESK_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni

# Flags of this project without those of this machine and of its compiler. Less than -O3 is for tests that have no time.
DESK_O     ?= -O3
# $1: a compiler.
DESK_FLAGS = -std=c++20 $(DESK_O) -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off $(ENGINE) -I. -ffile-prefix-map=$(CURDIR)=. \
             -DPCRE2_STATIC -DUTF8PROC_STATIC -isystem $(SOURCES)/include $(call warnings_of,$1) $(if $(WERROR),-Werror)

# ---- the programs ----------------------------------------------------------------------------------------------------
# $1: the system, $2: its folder of objects and $3: their instructions.
define desk_objects
$(LIBRARY:%.cpp=$2/%.o) $(PROGRAMS:%=$2/%.o): $2/%.o: %.cpp $(SOURCES)/ready build/desks/$1/flags $$(DESK_READY_$1)
	@mkdir -p $$(@D)
	$$(DESK_CXX_$1) $$(call DESK_FLAGS,$$(DESK_CXX_$1)) $3 $$(DEPS) -c $$< -o $$@
endef
# $1: the system, $2: a back end.
define desk_backend
build/desks/$1/backend/$2.entry.o: engine/backend/cpu.cpp build/desks/$1/flags $$(DESK_READY_$1)
	@mkdir -p $$(@D)
	$$(DESK_CXX_$1) $$(call DESK_FLAGS,$$(DESK_CXX_$1)) $(DESK_ANY_$1) $(DESK_HIDDEN) -DBACKEND=$2 $$(DEPS) -c $$< -o $$@
build/desks/$1/backend/$2.kernels.o: engine/backend/cpu_kernels.cpp build/desks/$1/flags $$(DESK_READY_$1)
	@mkdir -p $$(@D)
	$$(DESK_CXX_$1) $$(call DESK_FLAGS,$$(DESK_CXX_$1)) $(DESK_ANY_$1) $(DESK_$2) $(DESK_HIDDEN) $$(DEPS) -c $$< -o $$@
build/desks/$1/backends/quant_gemm_$2$(DESK_DLL_$1): build/desks/$1/backend/$2.entry.o build/desks/$1/backend/$2.kernels.o
	@mkdir -p $$(@D)
	$$(DESK_CXX_$1) -shared -pthread $$^ $(DESK_LIBRARY_$1) -o $$@
endef
DESK_PCRE2  := -O2 -DSUPPORT_JIT $(PCRE2_FLAGS) -ffile-prefix-map=$(CURDIR)=.
DESK_HIDDEN := -fvisibility=hidden -fvisibility-inlines-hidden
define desk_rules
build/desks/$1/flags: FORCE
	@mkdir -p $$(@D)
	@echo '$$(DESK_CXX_$1) $$(call DESK_FLAGS,$$(DESK_CXX_$1)) $$(DESK_ISA_$1) $$(DESK_LINK_$1) $$(DESK_PCRE2)' > $$@.new
	@cmp -s $$@.new $$@ && rm $$@.new || mv $$@.new $$@
$(PCRE2_PARTS:%=build/desks/$1/pcre2_%.o): build/desks/$1/pcre2_%.o: $(SOURCES)/ready build/desks/$1/flags $$(DESK_READY_$1)
	$$(DESK_CC_$1) $$(DESK_ANY_$1) $$(DESK_PCRE2) -c $(SOURCES)/pcre2/src/pcre2_$$*.c -o $$@
build/desks/$1/utf8proc.o: $(SOURCES)/ready build/desks/$1/flags $$(DESK_READY_$1)
	$$(DESK_CC_$1) $$(DESK_ANY_$1) -O2 -DUTF8PROC_STATIC -c $(SOURCES)/utf8proc/utf8proc.c -o $$@
$(call desk_objects,$1,build/desks/$1/any,$(DESK_ANY_$1))
$(call desk_objects,$1,build/desks/$1/isa,$(DESK_ISA_$1))
$(foreach b,$(DESK_BACKENDS_$1),$(eval $(call desk_backend,$1,$b)))
$(filter-out %_gptq$(DESK_EXE_$1),$(PROGRAMS:%=build/desks/$1/%$(DESK_EXE_$1))): build/desks/$1/%$(DESK_EXE_$1): build/desks/$1/isa/%.o \
    $(LIBRARY:%.cpp=build/desks/$1/isa/%.o) $(PCRE2_PARTS:%=build/desks/$1/pcre2_%.o) build/desks/$1/utf8proc.o
	$$(DESK_CXX_$1) -pthread $$^ $(DESK_LINK_$1) -o $$@
build/desks/$1/attention_avx2.o: engine/cpu/attention.cpp build/desks/$1/flags $$(DESK_READY_$1)
	@mkdir -p $$(@D)
	$$(DESK_CXX_$1) $$(call DESK_FLAGS,$$(DESK_CXX_$1)) $(DESK_ANY_$1) $(DESK_avx2) -O3 $$(DEPS) -c $$< -o $$@
build/desks/$1/runq_gptq$(DESK_EXE_$1): build/desks/$1/any/runq_gptq.o $(LIBRARY:%.cpp=build/desks/$1/any/%.o) \
    $(if $(findstring ATTEND_AVX2,$(DESK_ANY_$1)),build/desks/$1/attention_avx2.o) $(PCRE2_PARTS:%=build/desks/$1/pcre2_%.o) build/desks/$1/utf8proc.o
	$$(DESK_CXX_$1) -pthread $$^ $(DESK_LINK_$1) -o $$@
$1: $(PROGRAMS:%=build/desks/$1/%$(DESK_EXE_$1)) $(DESK_BACKENDS_$1:%=build/desks/$1/backends/quant_gemm_%$(DESK_DLL_$1))
endef
$(foreach desk,$(DESKS),$(eval $(call desk_rules,$(desk))))

# What `make windows windows-mingw macos` made: ids, error lines and chats under Wine.
PACKAGES_WINE := wine64 tmux file
build/packages-wine:
	@mkdir -p $(@D)
	@$(call install,$(PACKAGES_WINE))
	@touch $@
.PHONY: test-windows
test-windows: windows windows-mingw macos build/packages-wine $(PROGRAMS) $(VENV_READY) $(TEST_MODELS) $(RANDOM_MODELS)
	@$(PY) -m pytest -q -rs tests/test_wine.py

# ---- releases --------------------------------------------------------------------------------------------------------
# Releases: dist/, docs/desks.md.
#
#     make dist         for Linux on x86-64 and aarch64, macOS and Windows: programs, models, licences; SHA256SUMS
#     make test-dist    builds it again in another folder and compares the bytes; runs the Linux ones in an empty root
#                       folder, those for Windows under Wine
#
# Equal sources and compilers make equal files, wherever and whenever: no time but the commit's, no path, no name of a
# user. The compilers are this machine's g++ and g++-aarch64-linux-gnu, and zig.
DIST         := linux-x86_64 linux-aarch64 macos-arm64 windows-x86_64
VERSION      := $(shell sed -n 's/.*program_version = "\(.*\)".*/\1/p' engine/app/options.h)
DIST_ARCHIVE = dist/runq-$(VERSION)-$1.$(if $(findstring windows,$1),zip,tar.gz)

# ---- Linux: static programs that have everything once for each level of instructions, so that one file runs on any
# processor and as fast as it can. A level's objects become one, of which its main() alone is seen from outside; what runs
# before a main() waits until the level is chosen (engine/app/levels.cpp).
LEVELS_linux-x86_64   := avx512vnni avxvnni avx2 portable
LEVELS_linux-aarch64  := i8mm dotprod neon
DIST_BASE_x86_64      := -march=x86-64
DIST_BASE_aarch64     := -march=armv8-a
DIST_neon             := -march=armv8-a
DIST_dotprod          := -march=armv8.2-a+dotprod
DIST_i8mm             := -march=armv8.6-a
DIST_TOOLS_x86_64     := x86_64-linux-gnu-
DIST_TOOLS_aarch64    := aarch64-linux-gnu-
DIST_FLAGS            := -fno-gnu-unique -DSTATIC_PROGRAM $(HARDENING)

# $1: the processor, $2: a level.
define dist_level
$(LIBRARY:%.cpp=build/dist/linux-$1/$2/%.o) $(PROGRAMS:%=build/dist/linux-$1/$2/%.o): build/dist/linux-$1/$2/%.o: %.cpp $(SOURCES)/ready build/dist/linux-$1/flags build/packages-dist
	@mkdir -p $$(@D)
	$(DIST_TOOLS_$1)g++ $$(call DESK_FLAGS,g++) $(DIST_FLAGS) $(or $(DIST_$2),$(DIST_BASE_$1) $(DESK_$2)) -Dmain=main_$2 $$(DEPS) -c $$< -o $$@
$(PROGRAMS:%=build/dist/linux-$1/$2/%.whole.o): %.whole.o: %.o $(LIBRARY:%.cpp=build/dist/linux-$1/$2/%.o) mk/desks.mk
	$(DIST_TOOLS_$1)ld -r --force-group-allocation $$(filter %.o,$$^) -o $$@.all
	$(DIST_TOOLS_$1)objcopy --wildcard --keep-global-symbol='_Z*main_$2iPPc' --rename-section .init_array=constructors_$2 $$@.all $$@
	@rm $$@.all
endef
define dist_linux
build/dist/linux-$1/flags: FORCE
	@mkdir -p $$(@D)
	@echo '$(DIST_TOOLS_$1)g++ $$(call DESK_FLAGS,g++) $(DIST_FLAGS) $$(DESK_PCRE2)' > $$@.new
	@cmp -s $$@.new $$@ && rm $$@.new || mv $$@.new $$@
$(foreach l,$(LEVELS_linux-$1),$(eval $(call dist_level,$1,$l)))
$(PCRE2_PARTS:%=build/dist/linux-$1/pcre2_%.o): build/dist/linux-$1/pcre2_%.o: $(SOURCES)/ready build/dist/linux-$1/flags build/packages-dist
	$(DIST_TOOLS_$1)gcc $(DIST_BASE_$1) $$(DESK_PCRE2) -c $(SOURCES)/pcre2/src/pcre2_$$*.c -o $$@
build/dist/linux-$1/utf8proc.o: $(SOURCES)/ready build/dist/linux-$1/flags build/packages-dist
	$(DIST_TOOLS_$1)gcc $(DIST_BASE_$1) -O2 -DUTF8PROC_STATIC -c $(SOURCES)/utf8proc/utf8proc.c -o $$@
build/dist/linux-$1/levels.o: engine/app/levels.cpp build/dist/linux-$1/flags build/packages-dist
	$(DIST_TOOLS_$1)g++ $$(call DESK_FLAGS,g++) $(HARDENING) $(DIST_BASE_$1) -D'LEVELS=$(LEVELS_linux-$1:%=X(%))' $$(DEPS) -c $$< -o $$@
build/dist/linux-$1/programs: $(PROGRAMS:%=build/dist/linux-$1/programs/%)
$(PROGRAMS:%=build/dist/linux-$1/programs/%): build/dist/linux-$1/programs/%: build/dist/linux-$1/levels.o $(foreach l,$(LEVELS_linux-$1),build/dist/linux-$1/$l/%.whole.o) \
    $(PCRE2_PARTS:%=build/dist/linux-$1/pcre2_%.o) build/dist/linux-$1/utf8proc.o
	@mkdir -p $$(@D)
	$(DIST_TOOLS_$1)g++ -static -pthread -Wl,--build-id=none,-z,relro,-z,now -s $$^ -o $$@
endef
$(foreach cpu,x86_64 aarch64,$(eval $(call dist_linux,$(cpu))))

PACKAGES_DIST := g++ g++-aarch64-linux-gnu
NEEDS_dist      := BUILD PYTHON DIST
NEEDS_test-dist := BUILD PYTHON DIST WINE
build/packages-dist:
	@mkdir -p $(@D)
	@$(call install,$(PACKAGES_DIST))
	@touch $@

# ---- archives --------------------------------------------------------------------------------------------------------
# What of a release is a program: those of `make macos` and `make windows`, and their back ends.
DIST_PROGRAMS_linux-x86_64   := $(PROGRAMS:%=build/dist/linux-x86_64/programs/%)
DIST_PROGRAMS_linux-aarch64  := $(PROGRAMS:%=build/dist/linux-aarch64/programs/%)
DIST_PROGRAMS_macos-arm64    := $(PROGRAMS:%=build/desks/macos/%) $(DESK_BACKENDS_macos:%=build/desks/macos/backends/quant_gemm_%.dylib)
DIST_PROGRAMS_windows-x86_64 := $(PROGRAMS:%=build/desks/windows/%.exe) $(DESK_BACKENDS_windows:%=build/desks/windows/backends/quant_gemm_%.dll)
DIST_MODELS                  := $(patsubst runq%,model%.bin,$(PROGRAMS))
DIST_LICENCES                := LICENSE docs/licences.md

SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
define dist_archive
$(call DIST_ARCHIVE,$1): $(DIST_PROGRAMS_$1) $(DIST_MODELS) $(DIST_LICENCES) tools/dist.py
	@mkdir -p $$(@D)
	@'$(PYTHON)' tools/dist.py $$@ --time $$(SOURCE_DATE_EPOCH) --system $1 --sources $(SOURCES) \
	    $(DIST_PROGRAMS_$1) $(DIST_MODELS) $(DIST_LICENCES)
endef
$(foreach d,$(DIST),$(eval $(call dist_archive,$d)))

.PHONY: dist test-dist
dist: dist/SHA256SUMS
dist/SHA256SUMS: $(foreach d,$(DIST),$(call DIST_ARCHIVE,$d))
	@cd $(@D) && sha256sum $(notdir $^) > SHA256SUMS && cat SHA256SUMS
test-dist: dist build/packages-wine
	@$(PY) -m pytest -q -rs tests/test_dist.py

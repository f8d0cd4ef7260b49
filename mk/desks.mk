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
ZIG        := ZIG_GLOBAL_CACHE_DIR=$(ZIG_FOLDER)/cache ZIG_LOCAL_CACHE_DIR=$(ZIG_FOLDER)/cache $(ZIG_FOLDER)/bin/python -m ziglang
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
X86_LEVELS                := portable avx2 avxvnni avx512vnni
DESK_CXX_windows          := $(ZIG) c++ -target x86_64-windows-gnu
DESK_CC_windows           := $(ZIG) cc -target x86_64-windows-gnu
DESK_ANY_windows          := -march=x86_64
DESK_ISA_windows          := -march=x86_64_v3
DESK_LINK_windows         := -static -lshell32 -s
DESK_LIBRARY_windows      := -s
DESK_READY_windows        := $(ZIG_FOLDER)/ready
DESK_EXE_windows          := .exe
DESK_DLL_windows          := .dll
DESK_BACKENDS_windows     := $(X86_LEVELS)

DESK_CXX_windows-mingw      := $(MINGW)-g++-posix -Wa,-muse-unaligned-vector-move
DESK_CC_windows-mingw       := $(MINGW)-gcc-posix
DESK_ANY_windows-mingw      := -march=x86-64
DESK_ISA_windows-mingw      := -march=x86-64-v3
DESK_LINK_windows-mingw     := -static -lshell32 -s
DESK_LIBRARY_windows-mingw  := -static -s
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
DESK_portable       :=
DESK_avx2           := -mavx2 -mfma -mf16c
DESK_avxvnni        := $(DESK_avx2) -mavxvnni
DESK_avx512vnni     := $(DESK_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni

# Flags of this project without those of this machine and of its compiler. Less than -O3 is for tests that have no time.
DESK_O     ?= -O3
# $1: a compiler.
DESK_FLAGS = -std=c++20 $(DESK_O) -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math $(ENGINE) -I. -ffile-prefix-map=$(CURDIR)=. \
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
build/desks/$1/runq_gptq$(DESK_EXE_$1): build/desks/$1/any/runq_gptq.o $(LIBRARY:%.cpp=build/desks/$1/any/%.o) $(PCRE2_PARTS:%=build/desks/$1/pcre2_%.o) build/desks/$1/utf8proc.o
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

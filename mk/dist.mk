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
$(PROGRAMS:%=build/dist/linux-$1/$2/%.whole.o): %.whole.o: %.o $(LIBRARY:%.cpp=build/dist/linux-$1/$2/%.o) mk/dist.mk
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

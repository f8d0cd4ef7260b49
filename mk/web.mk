# The programs in WebAssembly, for the page and for node:
#
#     make web              build/web/: the programs, unchanged, and worker.js, which runs them
#     make test-web-node    them under node: the golden ids, the operations, damaged files
#
# EMCC is Debian 12's Emscripten, 3.1.6 (clang 14). web/compat/ has what its C++ library lacks.
# It looks for Debian's acorn, which a node of another package finds only if told where.
EMCC ?= env NODE_PATH=/usr/share/nodejs emcc
WEB  := build/web
WASM := build/wasm
PACKAGES_WEB := emscripten nodejs
NEEDS_web := PYTHON WEB
NEEDS_test-web-node := BUILD PYTHON TEST WEB

# SIMD and exceptions are what browsers have had since 2021 and 2022.
WASM_FLAGS := -msimd128 -fwasm-exceptions
WASM_CXXFLAGS = -std=c++20 $(WASM_FLAGS) -fno-math-errno -fno-trapping-math $(ENGINE) -isystem web/compat -I. $(WASM_LIBRARIES_I) \
                $(filter-out -Wno-restrict -Wno-maybe-uninitialized -Wno-uninitialized,$(WARNINGS)) -Wno-unused-parameter
# Small, but for the kernels: -O3 in place of -Os and -Oz makes a module a fifth larger and no faster; kernels for size
# take four times as long.
WASM_KERNELS  := engine/cpu/attention.cpp engine/cpu/quant_matmul.cpp
optimized     = $(if $(filter $1,$(WASM_KERNELS)),-O2,-Os)
# A module that a page makes anew for every run. Memory grows up to what 32-bit addresses reach.
WASM_LINK := $(WASM_FLAGS) -Oz -sENVIRONMENT=worker -sMODULARIZE -sEXPORT_ES6 -sINVOKE_RUN=0 -sEXIT_RUNTIME \
             -sALLOW_MEMORY_GROWTH -sMEMORY_GROWTH_LINEAR_STEP=16MB -sMAXIMUM_MEMORY=4GB -sFORCE_FILESYSTEM \
             -sEXPORTED_FUNCTIONS=_main,_memalign -sEXPORTED_RUNTIME_METHODS=FS,callMain,ENV

# ---- PCRE2 and utf8proc -----------------------------------------------------------------------------------------------
LIBRARIES_C      := $(WASM)/libraries
WASM_LIBRARIES_I := -isystem $(SOURCES)/include
WASM_LIBS        := $(PCRE2_PARTS:%=$(LIBRARIES_C)/pcre2_%.o) $(LIBRARIES_C)/utf8proc.o
$(PCRE2_PARTS:%=$(LIBRARIES_C)/pcre2_%.o): $(LIBRARIES_C)/pcre2_%.o: $(SOURCES)/ready mk/libraries.mk build/packages-web
	@mkdir -p $(@D)
	$(EMCC) -Os $(WASM_FLAGS) $(PCRE2_FLAGS) -c $(SOURCES)/pcre2/src/pcre2_$*.c -o $@
$(LIBRARIES_C)/utf8proc.o: $(SOURCES)/ready build/packages-web
	@mkdir -p $(@D)
	$(EMCC) -Os $(WASM_FLAGS) -DUTF8PROC_STATIC -c $(SOURCES)/utf8proc/utf8proc.c -o $@

# ---- the programs -----------------------------------------------------------------------------------------------------
WASM_LIBRARY_O := $(LIBRARY:%.cpp=$(WASM)/%.o)
$(WASM_LIBRARY_O) $(PROGRAMS:%=$(WASM)/%.o): $(WASM)/%.o: %.cpp $(WASM)/flags $(SOURCES)/ready build/packages-web
	@mkdir -p $(@D)
	$(EMCC) $(WASM_CXXFLAGS) $(call optimized,$<) $(DEPS) -c $< -o $@

$(PROGRAMS:%=$(WEB)/%.js): $(WEB)/%.js: $(WASM)/%.o $(WASM_LIBRARY_O) $(WASM_LIBS)
	@mkdir -p $(@D)
	$(EMCC) $(WASM_LINK) $^ -o $@
$(PROGRAMS:%=$(WEB)/%.wasm): %.wasm: %.js ;

# ---- programs with a mistake in them: web/variants/NAME.json, tools/web_variant.py ------------------------------------
WEB_VARIANTS  := $(patsubst web/variants/%.json,%,$(wildcard web/variants/*.json))
WEB_FILES     := no-smoothing
WEB_PROGRAMS  := $(filter-out $(WEB_FILES),$(WEB_VARIANTS))
VARIANT_OF     = $(shell sed -n 's/^ *"program": "\(.*\)",/\1/p' web/variants/$1.json)
$(WEB_PROGRAMS:%=$(WASM)/variants/%.o): $(WASM)/variants/%.o: web/variants/%.json tools/web_variant.py $(HEADERS) $(PROGRAMS:%=%.cpp) \
    $(WASM)/flags $(SOURCES)/ready build/packages-web
	@$(PYTHON) tools/web_variant.py sources $< $(WASM)/variants/$*
	program=$(call VARIANT_OF,$*).cpp copy=$(@:.o=)/$$program; test -e $$copy && program=$$copy; \
	    $(EMCC) -I$(@:.o=) $(WASM_CXXFLAGS) -Os -c $$program -o $@
$(WEB_PROGRAMS:%=$(WEB)/variants/%.js): $(WEB)/variants/%.js: $(WASM)/variants/%.o $(WASM_LIBRARY_O) $(WASM_LIBS)
	@mkdir -p $(@D)
	$(EMCC) $(WASM_LINK) $^ -o $@
$(WEB)/variants/no-smoothing.bin: $(VENV_READY) $(EXPORTER) models/tiny-llama/model.safetensors
	@mkdir -p $(@D)
	@OPENBLAS_NUM_THREADS=1 $(PY) -m export w8a8 models/tiny-llama $@ --quiet --no-smooth
$(WEB)/variants.json: tools/web_variant.py $(wildcard web/variants/*.json)
	@mkdir -p $(@D)
	@$(PYTHON) tools/web_variant.py list $@ $(filter %.json,$^)

# ---- all of it --------------------------------------------------------------------------------------------------------
WEB_MODULES := $(patsubst web/%,$(WEB)/%,$(wildcard web/*.js) web/package.json)
$(WEB_MODULES): $(WEB)/%: web/%
	@mkdir -p $(@D)
	@cp $< $@

.PHONY: web test-web-node
web: $(PROGRAMS:%=$(WEB)/%.js) $(WEB_MODULES) $(WEB_PROGRAMS:%=$(WEB)/variants/%.js) $(WEB_FILES:%=$(WEB)/variants/%.bin) $(WEB)/variants.json
	@$(PYTHON) tools/web_sizes.py $(WEB)

# ---- tests ------------------------------------------------------------------------------------------------------------
# The kernels in one test program, each program's source in one of its own, as on Arm (mk/arm.mk). They read files of the
# machine, as node lets them; Emscripten 3.1.6 does not expect that node can fetch.
WASM_TESTS      := kernels $(PROGRAMS)
WASM_TEST_FLAGS  = $(WASM_CXXFLAGS) -DNO_TOKENIZER -DDOCTEST_CONFIG_NO_POSIX_SIGNALS -Itests -idirafter /usr/include
WASM_TEST_LINK  := $(WASM_FLAGS) -O1 -sENVIRONMENT=node -sNODERAWFS -sEXIT_RUNTIME -sALLOW_MEMORY_GROWTH -sMAXIMUM_MEMORY=4GB
KERNEL_TESTS    := $(ARM_KERNELS:tests/%.cpp=$(WASM)/tests/%.o)
$(KERNEL_TESTS) $(PROGRAMS:%=$(WASM)/tests/%_test.o) $(WASM)/tests/main.o: $(WASM)/tests/%.o: tests/%.cpp $(WASM)/flags build/packages-web build/packages-test
	@mkdir -p $(@D)
	$(EMCC) $(WASM_TEST_FLAGS) -O1 $(DEPS) -c $< -o $@
$(LIBRARY:%.cpp=$(WASM)/tests/%.o): $(WASM)/tests/%.o: %.cpp $(WASM)/flags build/packages-web
	@mkdir -p $(@D)
	$(EMCC) $(WASM_TEST_FLAGS) $(call optimized,$<) $(DEPS) -c $< -o $@
$(WASM)/kernels_test.js: $(KERNEL_TESTS)
$(PROGRAMS:%=$(WASM)/%_test.js): $(WASM)/%_test.js: $(WASM)/tests/%_test.o
$(WASM_TESTS:%=$(WASM)/%_test.js): $(WASM)/tests/main.o $(LIBRARY:%.cpp=$(WASM)/tests/%.o)
	$(EMCC) $(WASM_TEST_LINK) $(filter %.o,$^) -o $@

test-web-node: web $(WASM_TESTS:%=$(WASM)/%_test.js) $(PROGRAMS) $(VENV_READY) $(TEST_MODELS) $(RANDOM_MODELS)
	@$(PY) -m pytest -q tests/test_web_node.py

$(WASM)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(EMCC) $(WASM_CXXFLAGS) $(WASM_LINK)' | cmp -s - $@ || echo '$(EMCC) $(WASM_CXXFLAGS) $(WASM_LINK)' > $@

build/packages-web:
	@mkdir -p build
	@$(call install,$(PACKAGES_WEB))
	@touch $@

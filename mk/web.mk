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
NEEDS_web := WEB
NEEDS_test-web-node := BUILD PYTHON TEST WEB

# SIMD and exceptions are what browsers have had since 2021 and 2022.
WASM_FLAGS := -msimd128 -fwasm-exceptions
WASM_CXXFLAGS = -std=c++20 -O3 $(WASM_FLAGS) -fno-math-errno -fno-trapping-math -isystem web/compat -I. $(WASM_LIBRARIES_I) \
                $(filter-out -Wno-restrict -Wno-maybe-uninitialized -Wno-uninitialized,$(WARNINGS))
# A module that a page makes anew for every run. Memory grows up to what 32-bit addresses reach.
WASM_LINK := $(WASM_FLAGS) -O3 -sENVIRONMENT=worker -sMODULARIZE -sEXPORT_ES6 -sINVOKE_RUN=0 -sEXIT_RUNTIME \
             -sALLOW_MEMORY_GROWTH -sMAXIMUM_MEMORY=4GB -sFORCE_FILESYSTEM \
             -sEXPORTED_FUNCTIONS=_main,_memalign -sEXPORTED_RUNTIME_METHODS=FS,callMain,ENV

# ---- PCRE2 and utf8proc, from the sources of Debian's packages --------------------------------------------------------
LIBRARIES_C      := $(WASM)/libraries
WASM_LIBRARIES_I := -isystem $(LIBRARIES_C)/include
PCRE2_PARTS := auto_possess chartables compile context error extuni find_bracket jit_compile match match_data newline \
               ord2utf script_run string_utils study tables ucd valid_utf xclass
PCRE2_FLAGS := -DHAVE_CONFIG_H -DPCRE2_CODE_UNIT_WIDTH=8 -DSUPPORT_PCRE2_8 -DSUPPORT_UNICODE -DHAVE_MEMMOVE -DHAVE_STDINT_H
WASM_LIBS   := $(PCRE2_PARTS:%=$(LIBRARIES_C)/pcre2_%.o) $(LIBRARIES_C)/utf8proc.o

$(LIBRARIES_C)/ready: tools/web_libraries.py
	@$(PYTHON) $< $(@D)
	@mkdir -p $(@D)/include
	@cd $(@D)/pcre2/src && cp pcre2.h.generic ../../include/pcre2.h && cp pcre2.h.generic pcre2.h && \
	    cp config.h.generic config.h && cp pcre2_chartables.c.dist pcre2_chartables.c
	@cp $(@D)/utf8proc/utf8proc.h $(@D)/include
	@touch $@
$(PCRE2_PARTS:%=$(LIBRARIES_C)/pcre2_%.o): $(LIBRARIES_C)/pcre2_%.o: $(LIBRARIES_C)/ready build/packages-web
	$(EMCC) -O2 $(WASM_FLAGS) $(PCRE2_FLAGS) -I$(LIBRARIES_C)/pcre2/src -c $(LIBRARIES_C)/pcre2/src/pcre2_$*.c -o $@
$(LIBRARIES_C)/utf8proc.o: $(LIBRARIES_C)/ready build/packages-web
	$(EMCC) -O2 $(WASM_FLAGS) -DUTF8PROC_STATIC -c $(LIBRARIES_C)/utf8proc/utf8proc.c -o $@

# ---- the programs -----------------------------------------------------------------------------------------------------
WASM_LIBRARY_O := $(LIBRARY:%.cpp=$(WASM)/%.o)
$(WASM_LIBRARY_O) $(PROGRAMS:%=$(WASM)/%.o): $(WASM)/%.o: %.cpp $(WASM)/flags $(LIBRARIES_C)/ready build/packages-web
	@mkdir -p $(@D)
	$(EMCC) $(WASM_CXXFLAGS) $(DEPS) -c $< -o $@

$(PROGRAMS:%=$(WEB)/%.js): $(WEB)/%.js: $(WASM)/%.o $(WASM_LIBRARY_O) $(WASM_LIBS)
	@mkdir -p $(@D)
	$(EMCC) $(WASM_LINK) $^ -o $@
$(PROGRAMS:%=$(WEB)/%.wasm): %.wasm: %.js ;

WEB_MODULES := $(patsubst web/%,$(WEB)/%,$(wildcard web/*.js) web/package.json)
$(WEB_MODULES): $(WEB)/%: web/%
	@mkdir -p $(@D)
	@cp $< $@

.PHONY: web
web: $(PROGRAMS:%=$(WEB)/%.js) $(WEB_MODULES)

$(WASM)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(EMCC) $(WASM_CXXFLAGS) $(WASM_LINK)' | cmp -s - $@ || echo '$(EMCC) $(WASM_CXXFLAGS) $(WASM_LINK)' > $@

build/packages-web:
	@mkdir -p build
	@$(call install,$(PACKAGES_WEB))
	@touch $@

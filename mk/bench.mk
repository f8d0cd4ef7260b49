# Speed against what the machine can do: docs/performance.md.
MODELS  ?= llama-3.2-1b qwen3-0.6b
RUNS    ?= 3
THREADS ?=
SCHEME  ?= q8
# Of a scheme, and of one of its variants: gptq-4.
BENCH_PROGRAM := $(if $(filter q8,$(SCHEME)),runq,runq_$(firstword $(subst -, ,$(SCHEME))))
BENCH_OUT := build/bench/results.$(SCHEME)
bench: $(BENCH_PROGRAM) build/limits $(VENV_READY)
	$(PY) -m bench.run --scheme $(SCHEME) --program $(BENCH_PROGRAM) --models $(MODELS) --runs $(RUNS) \
	    $(if $(THREADS),--threads $(THREADS)) --json $(BENCH_OUT).json --svg $(BENCH_OUT).svg

build/limits build/in_turns: build/%: bench/%.cpp $(LIBRARY_O) build/flags build/packages
	$(call compiled,$(CXXFLAGS_ALL) $(HARDENING))
	$(CXX) $(CXXFLAGS_ALL) $(HARDENING) $@.o $(LIBRARY_O) -o $@ $(LIBS)

# A program of the folder TREE, of this version or another, as a library OUT: bench/versions.py asks for it.
version-library: build/packages
	$(CXX) $(filter-out -I. $(WARNINGS),$(CXXFLAGS_ALL)) $(HARDENING) -w -I$(TREE) $(if $(filter $(INT8_PROGRAMS),$(PROGRAM)),-DINT8_ALONE) -DPROGRAM='"$(PROGRAM).cpp"' \
	    -fPIC -shared -fvisibility=hidden $(if $(findstring clang,$(CXX)),,-fno-gnu-unique) -Wl,-Bsymbolic bench/in_process.cpp \
	    $(wildcard $(TREE)/engine/cpu/*.cpp) -o $(OUT) $(LIBS)
.PHONY: version-library

# runq over the engine, all but its attention, which is the plain loop out of runq.cpp: bench/ladder.py measures what the
# engine's brings.
LADDER = build/plain/runq build/ladder/runq runq
build/ladder/attend.cpp: runq.cpp
	@mkdir -p $(@D)
	@{ printf '#include <%s>\n' algorithm cmath cstdint && echo 'namespace plain {' && \
	    sed -n '/^\/\/ lift fused_multiply_add$$/,/^}/p; /^\/\/ lift exp_fp32$$/,/^}/p; /^\/\/ lift softmax$$/,/^}/p; /^\/\/ lift attend$$/,/^}/p' $< | sed 's/^inline //' && echo '}'; } > $@
build/ladder/attend.o: build/ladder/attend.cpp build/flags build/packages
	$(CXX) $(PLAIN_FLAGS) -c $< -o $@
build/ladder/runq: bench/plain_attention.cpp build/ladder/attend.o build/lib/runq.o $(filter-out %/attention.o,$(INT8_LIBRARY)) build/flags
	$(CXX) $(CXXFLAGS_ALL) $(HARDENING) $(DEPS) $(filter %.cpp %.o,$^) -o $@ $(LIBS)
ladder: $(LADDER) $(VENV_READY)
	$(PY) -m bench.ladder $(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(ROUNDS),--rounds $(ROUNDS))
NEEDS_ladder := BUILD PYTHON
.PHONY: ladder

# ---- serving ---------------------------------------------------------------------------------------------------------
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

# make            build the programs and export the bundled model for each
# make run        the same, and print a story
# make chat       fetch a real model and talk to it
# make test       set up, build and run the usual tests
# make help       all targets
#
# Everything is built into build/, but for the programs and their models. The rules are in mk/, by subject.

# No rules but those here and in mk/.
MAKEFLAGS += --no-builtin-rules

ifeq ($(filter undefine,$(.FEATURES)),)
$(error this GNU make is $(MAKE_VERSION), 3.82 or newer is needed: on macOS type brew install make, and gmake in place of make)
endif

# ---- choices ---------------------------------------------------------------------------------------------------
# Linux, Darwin (macOS), or MINGW64_NT... or UCRT64_NT... (Windows with MSYS2): docs/desks.md.
UNAME     ?= $(shell uname -s)
CXX       ?= g++
ARCH      ?= native
TOKENIZER ?= 1
LINE_EDITOR ?= $(if $(findstring _NT,$(UNAME)),0,1)
PYTHON    ?= python3
ifeq ($(origin CXX),default)
CXX := $(if $(filter Darwin,$(UNAME)),clang++,g++)
endif

# ---- what there is ---------------------------------------------------------------------------------------------
# A program NAME.cpp or NAME.cu: runq for the scheme q8, runq_SCHEME for any other. Its model for a first try is
# model.bin, or model_SCHEME.bin.
PROGRAMS      := runq runq_w8a8 runq_gptq runq_moe
CUDA_PROGRAMS := runq_awq
TINY          := tiny-llama tiny-qwen3
TINY_MOE      := tiny-qwen3-moe

# The model files that tests and golden vectors take, build/models/MODEL.NAME.bin: the exporter's scheme and options.
CALIBRATION          := --calib models/calibration.txt --seq-len 256
EXPORT_q8            := q8
EXPORT_w8a8          := w8a8 $(CALIBRATION)
EXPORT_w8a8-block32  := w8a8 $(CALIBRATION) --block 32
EXPORT_w8a8-static   := w8a8 $(CALIBRATION) --act static
EXPORT_w8a8-rotate   := w8a8 $(CALIBRATION) --rotate --rotate-seed 2
EXPORT_awq           := awq $(CALIBRATION)
EXPORT_awq-g64       := awq $(CALIBRATION) --group-size 64
EXPORT_gptq-w8       := gptq $(CALIBRATION) --bits 8
EXPORT_gptq-w4       := gptq $(CALIBRATION) --bits 4 --group 64
EXPORT_gptq-ladder   := gptq $(CALIBRATION)
EXPORT_gptq-sparse   := gptq $(CALIBRATION) --bits embed=8,attn=4,ffn=4 --sparse 2:4
EXPORT_moe-a8w8      := moe $(CALIBRATION) --format a8w8
EXPORT_moe-a8w4      := moe $(CALIBRATION) --format a8w4
EXPORT_moe-mxfp8     := moe $(CALIBRATION) --format mxfp8
EXPORT_moe-a8w4-pure := moe --format a8w4 --pure
EXPORT_moe-ladder    := moe $(CALIBRATION) --format ladder
# Small random models, for what no trained one has (models/random_models.py). They have no tokenizer.
RANDOM_MODELS := build/models/random-llama.gptq-order.bin build/models/random-qwen3-moe.moe-a8w8.bin

# ---- the usual targets -----------------------------------------------------------------------------------------
.PHONY: all run test check test-all test-arm test-hf test-models test-pages cuda hip gpu-files gpu-check golden bench lint format help install uninstall clean
.DELETE_ON_ERROR:

ALL_PROGRAMS := $(PROGRAMS) $(CUDA_PROGRAMS)
FIRST_MODELS := $(patsubst runq%,model%.bin,$(ALL_PROGRAMS))
all: $(ALL_PROGRAMS) $(FIRST_MODELS)

include mk/build.mk mk/models.mk mk/backends.mk mk/test.mk mk/fuzz.mk mk/desks.mk mk/bench.mk mk/hw.mk mk/web.mk

# What the goals take of Debian (mk/build.mk) comes before whatever asks for some of it, or fetches something.
ifneq ($(NEEDS_HERE),)
PACKAGES_HERE := build/packages-for-$(subst $(empty) $(empty),-,$(NEEDS_HERE))
$(PACKAGES_HERE):
	@mkdir -p build
	@$(call install)
	@touch $@
build/packages $(addprefix build/packages-,test hw arm opencl hip lint fuzz mingw wine dist web browser) $(SOURCES)/ready \
    $(VENV_READY) $(BOOK_VENV)/ready $(ZIG_FOLDER)/ready $(WEB_VENV)/ready build/hw/yowasp/ready: | $(PACKAGES_HERE)
endif

build/models/random-llama.gptq-order.bin:    EXPORT := gptq
build/models/random-qwen3-moe.moe-a8w8.bin: EXPORT := moe --format a8w8 --no-smooth
$(RANDOM_MODELS): build/models/random-%.bin: $(VENV_READY) $(EXPORTER) $(wildcard models/random-*/*)
	@mkdir -p $(@D)
	@$(PY) -m export $(firstword $(EXPORT)) models/random-$(basename $*) $@ --quiet --no-tokenizer $(wordlist 2,99,$(EXPORT))
golden test test-models: $(RANDOM_MODELS)

run: runq model.bin
	./runq model.bin -i "Once upon a time"

# Programs, manual pages and completions; DESTDIR=FOLDER: as if FOLDER were /.
PREFIX ?= /usr/local
# Of PREFIX=~/x bash makes a path, other shells do not.
home = $(if $(filter ~,$1),$(HOME),$(patsubst ~/%,$(HOME)/%,$1))
INSTALLED = $(call home,$(DESTDIR))$(call home,$(PREFIX))
# Nothing is written to build/: it would be root's after sudo make install, and in the way of the next user's.
install: $(ALL_PROGRAMS)
	@install -d '$(INSTALLED)/bin' '$(INSTALLED)/share/man/man1' '$(INSTALLED)/share/bash-completion/completions' \
	    '$(INSTALLED)/share/zsh/site-functions'
	install $(ALL_PROGRAMS) '$(INSTALLED)/bin'
	@pages=$$(mktemp -d) && trap 'rm -rf "$$pages"' EXIT && \
	    '$(PYTHON)' tools/manual.py "$$pages" $(ALL_PROGRAMS:%=./%) && \
	    install -m 644 "$$pages"/man/man1/* '$(INSTALLED)/share/man/man1' && \
	    install -m 644 "$$pages"/bash/* '$(INSTALLED)/share/bash-completion/completions' && \
	    install -m 644 "$$pages"/zsh/* '$(INSTALLED)/share/zsh/site-functions'
uninstall:
	rm -f $(foreach p,$(ALL_PROGRAMS),'$(INSTALLED)/bin/$p' '$(INSTALLED)/share/man/man1/$p.1' \
	    '$(INSTALLED)/share/bash-completion/completions/$p' '$(INSTALLED)/share/zsh/site-functions/_$p')

clean:
	rm -rf build $(ALL_PROGRAMS) $(FIRST_MODELS)

help:
	@echo 'make             build the programs, export the bundled model to $(FIRST_MODELS)'
	@echo 'make run         the same, and print a story'
	@echo 'make chat        fetch a real model (SmolLM2-135M-Instruct, 93 MB) and talk to it'
	@echo 'make runq        only that program; likewise $(filter-out runq,$(ALL_PROGRAMS))'
	@echo 'make plain       build/plain: the programs from their one file alone, without engine/ (make plain-asan: under AddressSanitizer)'
	@echo 'make test        set up, build and run the usual tests: about 20 minutes by make -j2 test'
	@echo 'make check       the C++ tests alone, in less than a minute after a change (P=runq: of one program)'
	@echo 'make bench       speed against what this machine can do (SCHEME=q8 MODELS="llama-3.2-1b qwen3-0.6b" RUNS=3 THREADS=n)'
	@echo 'make install     programs, manual pages and completions to PREFIX=/usr/local (make uninstall takes them away)'
	@echo 'make clean       remove what was built'
	@echo
	@echo 'Models and measurements'
	@echo 'make smollm2     the model of make chat as a file of every scheme'
	@echo 'make quality     how much each scheme loses on that model: docs/quality.md'
	@echo 'make ladder      what each part of the engine brings, over the plain loops (PROMPTS="128 512" ROUNDS=5)'
	@echo 'make golden      write golden/data anew from the numpy reference'
	@echo
	@echo 'More tests'
	@echo 'make lint        clang-format, clang-tidy, ruff, warnings as errors with g++ and clang++'
	@echo 'make test-all    all of them: hours'
	@echo 'make test-pages  type the commands of README.md and docs/ in a fresh clone (docs/contributing.md)'
	@echo 'make test-fresh  what README says first, on new Debian systems (needs root and debootstrap; SUITES=bookworm)'
	@echo 'make fuzz        look for inputs that crash, with libFuzzer (SECONDS=60 for each harness, FUZZ="encode chat")'
	@echo 'make test-hf     compare the reference, --hf-out and imports with transformers (PYTHON_HF=python that has torch)'
	@echo 'make serve-check what --hf-out writes, served by vLLM on this CPU and asked: docs/serving.md (PYTHON_SERVE=python that has vLLM; SERVE=smollm2)'
	@echo
	@echo 'Other machines'
	@echo 'make portable    build/portable: runq_gptq for any processor, and its back ends (BACKENDS="opencl cuda hip")'
	@echo 'make cuda        compile what runs on NVIDIA GPUs for two kinds of them; needs nvcc'
	@echo 'make test-ptx    what nvcc makes of the kernels, run on the CPU; needs nvcc: docs/ptx.md'
	@echo 'make hip         compile the back end for AMD GPUs, for two kinds of them'
	@echo 'make gpu-check   on a machine with a GPU: tests, sanitizer, every kernel timed, predictions, in one report (make gpu-files first)'
	@echo 'make test-arm    the Arm kernels and the forward pass, cross-compiled and run under qemu'
	@echo 'make windows     the programs for Windows, by zig (make windows-mingw: by g++; make macos: for Macs; make test-windows: under Wine)'
	@echo 'make dist        releases for Linux, macOS and Windows (make test-dist: built twice, run where nothing else is): docs/desks.md'
	@echo
	@echo 'Hardware: docs/rtl.md'
	@echo 'make hw          build and test the SystemVerilog of hw/ (FULL=1: 10^8 random pairs; make hw-quick: a part)'
	@echo 'make rtl-story   three programs with every product in RTL: the golden stories, and cycles beside the model (ARRAY=16x16)'
	@echo 'make chip-story  a whole token in RTL, from its id to its logits: the golden stories, traces, clocks of each step (ARRAY=16x16)'
	@echo 'make rtl-chip    place and route an array of 8 x 8 and one of 16 x 16 for an ECP5'
	@echo
	@echo 'Pages'
	@echo 'make web         build/web: the page in which the programs run step by step (docs/web.md, docs/web-build.md); make web-serve serves it (PORT=8000)'
	@echo 'make test-web    the page, in headless Chromium and Firefox (BROWSERS=chromium; make test-web-node: the programs of it, under node)'
	@echo 'make book        build/book: the pages as a site; make book-serve serves it (PORT=8000), make book-pdf prints it, make test-book looks at it'
	@echo
	@echo 'Sources'
	@echo 'make format      put all sources into their format'
	@echo 'make sections    copy what several programs have in common out of the first that has it'
	@echo
	@echo 'Choices: CXX=clang++  ARCH=x86-64-v3  TOKENIZER=0 (without PCRE2 and utf8proc: ids only)  WERROR=1'
	@echo '         LINE_EDITOR=0 (without libedit: chat without arrow keys and history)'
	@echo '         CUDA=1 CUDA_ARCH=sm_90 (runq_awq for a GPU)  CUDA=0 (for the CPU)'

# Back ends of runq_gptq, and a program for any processor that takes them: docs/backends.md.
#
#     make portable       build/portable/MACHINE/: runq_gptq for any x86-64 (or aarch64), and in backends/ the shared
#                         libraries of which it takes the best one. Copied as a whole, the folder runs elsewhere.
#     make portable CXX=aarch64-linux-gnu-g++ TOKENIZER=0      the same for another machine
MACHINE  := $(firstword $(subst -, ,$(shell $(CXX) -dumpmachine 2>/dev/null)))
PORTABLE := build/portable/$(MACHINE)
OBJECTS  := build/backends/$(MACHINE)
BACKEND_PATH = $(PORTABLE)/backends/quant_gemm_$1.so

# What each back end on a CPU is compiled for; `portable` is what any processor of the architecture has.
ifeq ($(MACHINE),x86_64)
ISA_portable   := -march=x86-64
ISA_avx2       := $(ISA_portable) -mavx2 -mfma -mf16c
ISA_avxvnni    := $(ISA_avx2) -mavxvnni
ISA_avx512vnni := $(ISA_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
CPU_BACKENDS   := portable avx2 avxvnni avx512vnni
else ifeq ($(MACHINE),aarch64)
ISA_portable   := -march=armv8-a
ISA_neon       := $(ISA_portable)
ISA_dotprod    := -march=armv8.2-a+dotprod
ISA_i8mm       := -march=armv8.6-a
CPU_BACKENDS   := neon dotprod i8mm
endif

# Only quant_gemm_backend() is to be seen from outside: two libraries that share a function of libstdc++'s templates
# would otherwise take one copy of it, compiled for the one or the other processor.
ANY_CPU       = $(filter-out -march=%,$(CXXFLAGS_ALL)) $(ISA_portable)
BACKEND_FLAGS = $(filter-out -march=%,$(CXXFLAGS_ALL)) -fPIC -fvisibility=hidden -fvisibility-inlines-hidden
BACKEND_LINK  = -shared -Wl,--version-script=common/backend/exports -Wl,-z,relro,-z,now,-z,defs

BACKENDS = $(foreach b,$(CPU_BACKENDS),$(call BACKEND_PATH,$b))
.PHONY: portable
portable: $(PORTABLE)/runq_gptq $(BACKENDS)

$(PORTABLE)/runq_gptq: runq_gptq.cpp $(OBJECTS)/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(ANY_CPU) $(HARDENING) $(DEPS) $< -o $@ $(LIBS)

define cpu_backend
$(OBJECTS)/$1.entry.o: common/backend/cpu.cpp $(OBJECTS)/flags
	$$(CXX) $$(BACKEND_FLAGS) $(ISA_portable) -DBACKEND=$1 $$(DEPS) -c $$< -o $$@
$(OBJECTS)/$1.kernels.o: common/backend/cpu_kernels.cpp $(OBJECTS)/flags
	$$(CXX) $$(BACKEND_FLAGS) $(ISA_$1) $$(DEPS) -c $$< -o $$@
$(call BACKEND_PATH,$1): $(OBJECTS)/$1.entry.o $(OBJECTS)/$1.kernels.o common/backend/exports
	@mkdir -p $$(@D)
	$$(CXX) -fopenmp $$(BACKEND_LINK) $$(filter %.o,$$^) -o $$@
endef
$(foreach b,$(CPU_BACKENDS),$(eval $(call cpu_backend,$b)))

$(OBJECTS)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@

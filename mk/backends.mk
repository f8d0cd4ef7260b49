# Back ends of runq_gptq, and a program for any processor that takes them: docs/backends.md.
#
#     make portable       build/portable/MACHINE/: runq_gptq for any x86-64 (or aarch64), and in backends/ the shared
#                         libraries of which it takes the best one. Copied as a whole, the folder runs elsewhere.
#     make portable BACKENDS="opencl cuda hip"                 these as well: what is for GPUs
#     make portable CXX=aarch64-linux-gnu-g++ TOKENIZER=0      the same for another machine
# Of a compiler that is not installed yet, by its name.
MACHINE  := $(firstword $(subst -, ,$(shell $(CXX) -dumpmachine 2>/dev/null) $(filter %-g++,$(CXX)) $(shell uname -m)))
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
BACKEND_LINK  = -shared -Wl,--version-script=engine/backend/exports -Wl,-z,relro,-z,now,-z,defs

# Beside those on CPUs: opencl, where its headers are (make build/packages-opencl).
BACKENDS ?= $(if $(wildcard /usr/include/CL/cl.h),$(if $(findstring $(MACHINE),$(shell uname -m)),opencl))
.PHONY: portable
portable: $(PORTABLE)/runq_gptq $(foreach b,$(CPU_BACKENDS) $(BACKENDS),$(call BACKEND_PATH,$b))

PORTABLE_O := $(LIBRARY:%.cpp=$(OBJECTS)/%.o)
$(PORTABLE_O): $(OBJECTS)/%.o: %.cpp $(OBJECTS)/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(ANY_CPU) $(HARDENING) $(DEPS) -c $< -o $@
$(PORTABLE)/runq_gptq: runq_gptq.cpp $(PORTABLE_O) $(OBJECTS)/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(ANY_CPU) $(HARDENING) $(DEPS) $< $(PORTABLE_O) -o $@ $(LIBS)

define cpu_backend
$(OBJECTS)/$1.entry.o: engine/backend/cpu.cpp $(OBJECTS)/flags
	$$(CXX) $$(BACKEND_FLAGS) $(ISA_portable) -DBACKEND=$1 $$(DEPS) -c $$< -o $$@
$(OBJECTS)/$1.kernels.o: engine/backend/cpu_kernels.cpp $(OBJECTS)/flags
	$$(CXX) $$(BACKEND_FLAGS) $(ISA_$1) $$(DEPS) -c $$< -o $$@
$(call BACKEND_PATH,$1): $(OBJECTS)/$1.entry.o $(OBJECTS)/$1.kernels.o engine/backend/exports
	@mkdir -p $$(@D)
	$$(CXX) -pthread $$(BACKEND_LINK) $$(filter %.o,$$^) -o $$@
endef
$(foreach b,$(CPU_BACKENDS),$(eval $(call cpu_backend,$b)))

$(call BACKEND_PATH,opencl): engine/backend/opencl.cpp engine/backend/exports $(OBJECTS)/flags \
    $(if $(wildcard /usr/include/CL/cl.h),,build/packages-opencl)
	@mkdir -p $(@D)
	$(CXX) $(BACKEND_FLAGS) $(BACKEND_LINK) $(DEPS) $< -o $@ -lOpenCL

# CUDA's own code runs on GPUs from Ampere on: that of Hopper is made for later ones when it is loaded.
GPU_CODE := -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=[sm_90,compute_90]
$(call BACKEND_PATH,cuda): engine/backend/gpu.cu engine/backend/exports $(OBJECTS)/flags
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -Xcompiler -fPIC,-fvisibility=hidden $(GPU_CODE) -shared $(addprefix -Xlinker ,--version-script=engine/backend/exports) $(DEPS) $< -o $@

# AMD's, for the GPUs of HIP_ARCHS; gfx1030 has wavefronts of 32 threads, gfx90a of 64.
HIPCC     ?= hipcc
HIP_ARCHS ?= gfx1030 gfx90a
HIP_FLAGS := -x hip -std=c++20 -O3 $(ENGINE) -I. -fPIC -fvisibility=hidden -Wall -Wextra -Wshadow -Werror $(HIP_ARCHS:%=--offload-arch=%)
$(call BACKEND_PATH,hip): engine/backend/gpu.cu $(HEADERS) $(wildcard simt/*.h) build/packages-hip
	@mkdir -p $(@D)
	$(HIPCC) $(HIP_FLAGS) $(BACKEND_LINK) $< -o $@
build/packages-hip build/packages-opencl: build/packages-%: build/packages
	@$(call install,$(if $(filter hip,$*),$(PACKAGES_HIP),$(PACKAGES_OPENCL)))
	@touch $@

# For tests: the source of the GPUs' back ends on a CPU, with warps of 32 and of 64 threads.
EMULATED_FLAGS = $(filter-out -march=%,$(SIMT_FLAGS)) -march=$(ARCH) $(filter-out $(CXXFLAGS_ALL),$(BACKEND_FLAGS)) $(BACKEND_LINK)
$(call BACKEND_PATH,emulated): engine/backend/gpu.cu engine/backend/exports $(OBJECTS)/flags
	@mkdir -p $(@D)
	$(CXX) $(EMULATED_FLAGS) $(DEPS) -x c++ $< -o $@
$(call BACKEND_PATH,emulated64): engine/backend/gpu.cu engine/backend/exports $(OBJECTS)/flags
	@mkdir -p $(@D)
	$(CXX) $(EMULATED_FLAGS) -DSIMT_WARP_SIZE=64 $(DEPS) -x c++ $< -o $@

$(OBJECTS)/flags: FORCE | build/packages
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@

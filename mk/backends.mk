# Back ends of runq_gptq, and a program for any processor that takes them: docs/backends.md.
#
#     make portable       build/portable/MACHINE/: runq_gptq for any x86-64 (or aarch64), and in backends/ the shared
#                         libraries of which it takes the best one. Copied as a whole, the folder runs elsewhere.
#     make portable BACKENDS="opencl cuda hip"                 these as well: what is for GPUs
#     make portable CXX=aarch64-linux-gnu-g++ TOKENIZER=0      the same for another machine
#     make portable BACKEND_O=-O1                              compiled in half the time, for tests
# Of a compiler that is not installed yet, by its name.
MACHINE  := $(firstword $(subst -, ,$(shell $(CXX) -dumpmachine 2>/dev/null) $(filter %-g++,$(CXX)) $(shell uname -m)))
PORTABLE := build/portable/$(MACHINE)
OBJECTS  := build/backends/$(MACHINE)
BACKEND_PATH = $(PORTABLE)/backends/quant_gemm_$1.so

# What each back end on a CPU is compiled for, and the program: ISA_portable, what any processor of the architecture has.
ifeq ($(MACHINE),x86_64)
ISA_portable   := -march=x86-64 -DATTEND_AVX2
ISA_avx2       := $(ISA_portable) -mavx2 -mfma -mf16c
ISA_avxvnni    := $(ISA_avx2) -mavxvnni
ISA_avx512vnni := $(ISA_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
CPU_BACKENDS   := avx2 avxvnni avx512vnni
else ifeq ($(MACHINE),aarch64)
ISA_portable   := -march=armv8-a
ISA_neon       := $(ISA_portable)
ISA_dotprod    := -march=armv8.2-a+dotprod
ISA_i8mm       := -march=armv8.6-a
CPU_BACKENDS   := neon dotprod i8mm
endif

# Only quant_gemm_backend() is to be seen from outside: two libraries that share a function of libstdc++'s templates
# would otherwise take one copy of it, compiled for the one or the other processor.
ANY_CPU       = $(filter-out -march=%,$(CXXFLAGS_ALL)) $(ISA_portable) $(BACKEND_O)
BACKEND_FLAGS = $(filter-out -march=%,$(CXXFLAGS_ALL)) -fPIC -fvisibility=hidden -fvisibility-inlines-hidden $(BACKEND_O)
BACKEND_LINK  = -shared -Wl,--version-script=engine/backend/exports -Wl,-z,relro,-z,now,-z,defs

# Beside those on CPUs, for this machine: opencl, where its headers are (make build/packages-opencl).
BACKENDS ?= $(if $(findstring $(MACHINE),$(shell uname -m)),$(if $(wildcard /usr/include/CL/opencl.hpp),opencl))
.PHONY: portable
portable: $(PORTABLE)/runq_gptq $(foreach b,$(CPU_BACKENDS) $(BACKENDS),$(call BACKEND_PATH,$b))

PORTABLE_O := $(LIBRARY:%.cpp=$(OBJECTS)/%.o)
$(PORTABLE_O): $(OBJECTS)/%.o: %.cpp $(OBJECTS)/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(ANY_CPU) $(HARDENING) $(DEPS) -c $< -o $@
# Attention once more, for AVX2 (engine/cpu/attention.cpp). Whatever else is optimized: a function of a header that is not
# inlined there would be the one that the linker takes for all.
ifdef ISA_avx2
$(PORTABLE)/runq_gptq: $(OBJECTS)/attention_avx2.o
$(OBJECTS)/attention_avx2.o: engine/cpu/attention.cpp $(OBJECTS)/flags build/packages
	$(CXX) $(ANY_CPU) $(ISA_avx2) -O3 $(HARDENING) $(DEPS) -c $< -o $@
endif
$(PORTABLE)/runq_gptq: runq_gptq.cpp $(PORTABLE_O) $(OBJECTS)/flags build/packages
	@mkdir -p $(@D)
	$(CXX) $(ANY_CPU) $(HARDENING) $(DEPS) $< $(filter %.o,$^) -o $@ $(LIBS)

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
    $(if $(wildcard /usr/include/CL/opencl.hpp),,build/packages-opencl)
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
EMULATED_FLAGS = $(filter-out -march=%,$(SIMT_FLAGS)) $(ISA_portable) $(filter-out $(CXXFLAGS_ALL),$(BACKEND_FLAGS)) $(BACKEND_LINK)
$(call BACKEND_PATH,emulated): engine/backend/gpu.cu engine/backend/exports $(OBJECTS)/flags
	@mkdir -p $(@D)
	$(call compiled,$(EMULATED_FLAGS) -x c++)
	$(CXX) $(EMULATED_FLAGS) $@.o -o $@
$(call BACKEND_PATH,emulated64): engine/backend/gpu.cu engine/backend/exports $(OBJECTS)/flags
	@mkdir -p $(@D)
	$(call compiled,$(EMULATED_FLAGS) -DSIMT_WARP_SIZE=64 -x c++)
	$(CXX) $(EMULATED_FLAGS) $@.o -o $@

$(OBJECTS)/flags: FORCE | build/packages
	@mkdir -p $(@D)
	@echo '$(FLAGS) $(BACKEND_O)' | cmp -s - $@ || echo '$(FLAGS) $(BACKEND_O)' > $@

# ---- GPUs ------------------------------------------------------------------------------------------------------------
# What takes nvcc, or a GPU.

# What only a GPU shows, in one report. The machine needs the CUDA toolkit, make and python3 with numpy. What else the
# tests take comes from build/gpu-files, where it is not installed: `make gpu-files` fills that folder, to be copied along.
GPU_TESTS  := $(addprefix build/gpu/,runq_awq_test awq_kernels_test backend_gpu_test)
GPU_BINS   := $(GPU_TESTS) $(addprefix build/gpu/,runq_awq awq_kernels runq_gptq backends/quant_gemm_cuda.so)
GPU_MODELS := $(filter %.awq.bin %.awq-g64.bin %.gptq-ladder.bin %.gptq-w8.bin,$(TEST_MODELS))
NO_LIBRARY  = $(filter-out -DNO_TOKENIZER -DLINE_EDITOR,$1) -DNO_TOKENIZER
GPU_FLAGS   = $(call NO_LIBRARY,$(NVCC_FLAGS)) -lineinfo -arch=$(CUDA_ARCH) -Itests \
              $(if $(and $(wildcard /usr/include/doctest/doctest.h),$(wildcard /usr/include/nlohmann/json.hpp)),,-isystem build/gpu-files/include)
GPU_BUILD   = $(NVCC) $(GPU_FLAGS) $(CUBLAS) $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)
build/gpu/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(GPU_BUILD)' | cmp -s - $@ || echo '$(GPU_BUILD)' > $@
# nvcc builds few files here, so each depends on everything that it could read.
CUDA_SOURCES := $(wildcard *.cu engine/backend/*.cu bench/*.cu bench/*.cuh engine/*/*.h engine/*/*.cuh simt/*.h)
$(GPU_BINS): $(CUDA_SOURCES) build/gpu/flags
GPU_LIBRARY := engine/app/cli.cpp engine/app/line_editor.cpp
build/gpu/runq_awq: runq_awq.cu $(GPU_LIBRARY)
	$(NVCC) $(GPU_FLAGS) $< $(GPU_LIBRARY) -o $@ $(CUBLAS)
build/gpu/awq_kernels: bench/awq_kernels.cu
	$(NVCC) $(GPU_FLAGS) $< -o $@ $(CUBLAS)
build/gpu/runq_gptq: runq_gptq.cpp $(LIBRARY)
	$(CXX) $(call NO_LIBRARY,$(CXXFLAGS_ALL)) $< $(LIBRARY) -o $@ -ldl
build/gpu/backends/quant_gemm_cuda.so: engine/backend/gpu.cu engine/backend/exports
	@mkdir -p $(@D)
	$(NVCC) $(GPU_FLAGS) -Xcompiler -fPIC,-fvisibility=hidden -shared -Xlinker --version-script=engine/backend/exports $< -o $@
$(GPU_TESTS): build/gpu/%: tests/%.cpp tests/main.cpp $(wildcard tests/*.h)
	$(NVCC) $(GPU_FLAGS) -x cu tests/main.cpp $< -o $@ $(CUBLAS)

gpu-files: build/packages-test $(GPU_MODELS)
	@mkdir -p build/gpu-files/include build/gpu-files/models
	cp -r /usr/include/doctest /usr/include/nlohmann build/gpu-files/include
	cp $(GPU_MODELS) build/gpu-files/models

# GPU_CHECK='--quick', '--only ladder speed --tune' and so on: python3 -m bench.gpu_check --help
# What does not compile is a failure in the report, and the rest runs all the same. (Make runs a line that says $(MAKE) even
# under -n, where nothing is to be written.)
MAKE_AGAIN = $(MAKE) --no-print-directory
gpu-check:
	@mkdir -p build/gpu
	@$(MAKE_AGAIN) -k -j4 $(GPU_BINS) 2>&1 | tee build/gpu/build.log
	@'$(PYTHON)' -m bench.gpu_check $(GPU_CHECK)

# Where nvcc is: everything compiles for two generations of GPUs without a warning, and no kernel of this project keeps
# registers in memory ("spills"). Nothing of it runs here.
CUDA_CHECKS := $(foreach sm,80 90,build/cuda/runq_awq.sm_$(sm).o build/cuda/plain_runq_awq.sm_$(sm).o build/cuda/awq_kernels.sm_$(sm).o build/cuda/backend.sm_$(sm).o)
define cuda_check
@mkdir -p $(@D)
$(NVCC) $(NVCC_FLAGS) $(filter-out -l% -L% -Xlinker -rpath%,$(CUBLAS)) -Werror all-warnings -Xptxas -v -arch=sm_$* -c $< -o $@ 2> $(@:.o=.log) || { cat $(@:.o=.log); exit 1; }
@! grep -B2 -E '[1-9][0-9]* bytes spill' $(@:.o=.log)
endef
build/cuda/runq_awq.sm_%.o: runq_awq.cu $(CUDA_SOURCES)
	$(cuda_check)
# The file alone: without -DENGINE, and where no include could find another.
build/cuda/plain_runq_awq.sm_%.o: private NVCC_FLAGS := $(filter-out $(ENGINE) -I.,$(NVCC_FLAGS)) -Xcompiler -Wno-restrict
build/cuda/plain_runq_awq.sm_%.o: runq_awq.cu build/flags
	$(cuda_check)
build/cuda/awq_kernels.sm_%.o: bench/awq_kernels.cu $(CUDA_SOURCES)
	$(cuda_check)
build/cuda/backend.sm_%.o: engine/backend/gpu.cu $(CUDA_SOURCES)
	$(cuda_check)
# What nvcc makes of the kernels, run on the CPU (docs/ptx.md): build/ptx/NAME.sm_80.ptx and so on. `make test` has a part.
PTX_OF       = $(foreach sm,80 90,$(1:%=build/ptx/%.sm_$(sm).ptx))
PTX_PROGRAMS := runq_awq build/plain/runq_awq $(addprefix build/,runq_awq_test awq_kernels_test backend_gpu_test)
make_ptx     = @mkdir -p $(@D) && $(NVCC) $(filter-out -DNO_TOKENIZER -DLINE_EDITOR,$(NVCC_FLAGS)) -DNO_TOKENIZER -DNO_CUBLAS -ptx -arch=sm_$* $< -o $@
build/ptx/runq_awq.sm_%.ptx: runq_awq.cu $(CUDA_SOURCES) build/flags
	$(make_ptx)
build/ptx/plain_runq_awq.sm_%.ptx: private NVCC_FLAGS := $(filter-out $(ENGINE) -I.,$(NVCC_FLAGS)) -Xcompiler -Wno-restrict
build/ptx/plain_runq_awq.sm_%.ptx: runq_awq.cu build/flags
	$(make_ptx)
build/ptx/awq_kernels.sm_%.ptx: bench/awq_kernels.cu $(CUDA_SOURCES) build/flags
	$(make_ptx)
build/ptx/backend.sm_%.ptx: engine/backend/gpu.cu $(CUDA_SOURCES) build/flags
	$(make_ptx)
.PHONY: ptx test-ptx cuda-cublas
NEEDS_test-ptx := BUILD PYTHON TEST
NEEDS_cuda-cublas := BUILD PYTHON TEST
ifneq ($(shell command -v $(NVCC)),)
cuda: $(CUDA_CHECKS)
	@echo '$(words $(CUDA_CHECKS)) of runq_awq.cu, bench/awq_kernels.cu and engine/backend/gpu.cu for sm_80 and sm_90 compile, nothing spills'
test: $(call PTX_OF,runq_awq backend)
# With cuBLAS's own header and library, of a Python package (570 MB): for test-all.
build/cublas/ready: tools/cublas.lock $(call moved,build/cublas)
	$(call set_up,tools/cublas.lock)
cuda-cublas: build/cublas/ready build/packages-test
	@flags=$$(sh tools/cublas.sh $(NVCC) build/cublas/bin/python) && case "$$flags" in *NO_CUBLAS*) exit 1;; esac && \
	$(MAKE_AGAIN) CUDA_ARCH=sm_90 CUBLAS="$$flags" $(addprefix build/gpu/,runq_awq awq_kernels runq_awq_test awq_kernels_test)
	@echo 'runq_awq.cu, bench/awq_kernels.cu and their tests compile and link with cuBLAS'
ptx: $(call PTX_OF,runq_awq plain_runq_awq awq_kernels backend)
test-ptx: ptx $(PTX_PROGRAMS) $(VENV_READY) $(filter %.awq.bin %.awq-g64.bin,$(TEST_MODELS))
	@$(PY) -m ptx.suite
	@$(PY) -m ptx.mutants
else
cuda cuda-cublas ptx test-ptx:
	@echo '$@: there is no nvcc here' >&2; exit 1
endif

# The back end compiles for AMD's GPUs, too.
hip: $(call BACKEND_PATH,hip)
	@echo 'engine/backend/gpu.cu compiles for $(HIP_ARCHS)'

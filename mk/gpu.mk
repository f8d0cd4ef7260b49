# What takes nvcc, or a GPU.

# What only a GPU shows, in one report. The machine needs the CUDA toolkit, make and python3 with numpy. What else the
# tests take comes from build/gpu-files, where it is not installed: `make gpu-files` fills that folder, to be copied along.
GPU_BINS   := $(addprefix build/gpu/,runq_awq awq_kernels runq_awq_test awq_kernels_test)
GPU_MODELS := $(filter %.awq.bin %.awq-g64.bin,$(TEST_MODELS))
GPU_FLAGS   = $(filter-out -DNO_TOKENIZER,$(NVCC_FLAGS)) -DNO_TOKENIZER -lineinfo -arch=$(CUDA_ARCH) -Itests \
              $(if $(and $(wildcard /usr/include/doctest/doctest.h),$(wildcard /usr/include/nlohmann/json.hpp)),,-isystem build/gpu-files/include)
GPU_BUILD   = $(NVCC) $(GPU_FLAGS) $(CUBLAS) $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)
build/gpu/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(GPU_BUILD)' | cmp -s - $@ || echo '$(GPU_BUILD)' > $@
# nvcc builds few files here, so each depends on everything that it could read.
CUDA_SOURCES := $(wildcard *.cu engine/backend/*.cu bench/*.cu bench/*.cuh engine/*/*.h engine/*/*.cuh simt/*.h)
$(GPU_BINS): $(CUDA_SOURCES) build/gpu/flags
build/gpu/runq_awq: runq_awq.cu engine/app/cli.cpp engine/app/line_editor.cpp
	$(NVCC) $(GPU_FLAGS) $^ -o $@ $(CUBLAS)
build/gpu/awq_kernels: bench/awq_kernels.cu
	$(NVCC) $(GPU_FLAGS) $< -o $@ $(CUBLAS)
build/gpu/runq_awq_test build/gpu/awq_kernels_test: build/gpu/%: tests/%.cpp tests/main.cpp $(wildcard tests/*.h)
	$(NVCC) $(GPU_FLAGS) -x cu tests/main.cpp $< -o $@ $(CUBLAS)

gpu-files: build/packages-test $(GPU_MODELS)
	@mkdir -p build/gpu-files/include build/gpu-files/models
	cp -r /usr/include/doctest /usr/include/nlohmann build/gpu-files/include
	cp $(GPU_MODELS) build/gpu-files/models

# GPU_CHECK='--quick', '--only ladder speed --tune' and so on: python3 -m bench.gpu_check --help
gpu-check:
	@$(MAKE) --no-print-directory -j4 $(GPU_BINS)
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
ifneq ($(shell command -v $(NVCC)),)
cuda: $(CUDA_CHECKS)
	@echo 'runq_awq.cu, bench/awq_kernels.cu and engine/backend/gpu.cu compile for sm_80 and sm_90, nothing spills'
else
cuda:
	@echo 'there is no nvcc here: nothing was compiled for a GPU'
endif

# The back end compiles for AMD's GPUs, too.
hip: $(call BACKEND_PATH,hip)
	@echo 'engine/backend/gpu.cu compiles for $(HIP_ARCHS)'

# The core of hw/rtl behind AXI, as a whole: in simulation under the programs, and on chips. docs/rtl.md.
#
#     make rtl-backend    build/portable/MACHINE/backends/quant_gemm_rtl.so: runq_gptq ... --backend rtl
#     make rtl-story      all goldens' ids with every product in RTL, and cycles beside bench/systolic.py
#     make rtl-chip       place and route; table and picture of docs/rtl.md
#     ARRAY=8x32          rows x columns of cells, for all of these

ARRAY      ?= 16x16
RTL_SOURCES := $(wildcard hw/rtl/*.sv)
VERILATOR_INCLUDE = $(shell verilator --getenv VERILATOR_ROOT)/include
PACKAGES_RTL := verilator

# The model that Verilator makes of the top, with its runtime: build/hw/axi-RxC/model/model.a.
rtl_rows = $(firstword $(subst x, ,$1))
rtl_cols = $(lastword $(subst x, ,$1))
RTL_VERILATOR = verilator --cc -O3 -Wall --x-assign fast --x-initial fast --noassert --top-module matmul_axi --prefix Vmatmul_axi $(RTL_TRACE)
build/hw/axi-%/model/model.a: $(RTL_SOURCES) build/packages-rtl
	@rm -rf $(@D) && mkdir -p $(@D)
	$(RTL_VERILATOR) -GROWS=$(call rtl_rows,$*) -GCOLS=$(call rtl_cols,$*) --Mdir $(@D) $(RTL_SOURCES)
	$(MAKE) -s -C $(@D) -f Vmatmul_axi.mk CXX='$(CXX)' OPT_FAST='-O2 -fPIC' OPT_SLOW='-O1 -fPIC' OPT_GLOBAL='-O2 -fPIC' \
	    Vmatmul_axi__ALL.a verilated.o verilated_threads.o $(if $(RTL_TRACE),verilated_vcd_c.o) > $(@D)/log
	cd $(@D) && ar -rcs model.a $$(ar -t Vmatmul_axi__ALL.a) verilated*.o
build/hw/axi-%/matmul_rtl.o: hw/sim/matmul_rtl.cpp hw/sim/matmul_rtl.h build/hw/axi-%/model/model.a
	$(CXX) -std=c++20 -O2 -fPIC -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) -I. -isystem $(VERILATOR_INCLUDE) -isystem $(@D)/model -c $< -o $@
# make does not see that the next run needs these again.
.PRECIOUS: build/hw/axi-%/model/model.a build/hw/axi-%/matmul_rtl.o build/hw/axi-%/rtl_session.o build/hw/axi-%/backend.o build/hw/axi-%/programs.o

build/packages-rtl: build/packages
	@$(call install,$(PACKAGES_RTL))
	@touch $@

# Stalls, reset, registers, and products against plain arithmetic.
build/hw/axi-%/matmul_axi_test: hw/tests/matmul_axi_test.cpp build/hw/axi-%/matmul_rtl.o build/hw/axi-%/model/model.a build/packages-test
	$(CXX) -std=c++20 -O1 -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) -I. $(filter-out %-test,$^) -pthread -o $@

# The back end `rtl`, beside the others of the portable build.
RTL_HOST = -std=c++20 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) -I.
build/hw/axi-%/backend.o: hw/sim/backend.cpp build/hw/axi-%/matmul_rtl.o
	$(CXX) $(RTL_HOST) $(DEPS) -c $< -o $@
build/hw/axi-%/rtl_session.o: hw/sim/rtl_session.cpp build/hw/axi-%/matmul_rtl.o
	$(CXX) $(RTL_HOST) $(DEPS) -c $< -o $@
build/hw/axi-%/backends/quant_gemm_rtl.so: build/hw/axi-%/backend.o build/hw/axi-%/rtl_session.o build/hw/axi-%/matmul_rtl.o build/hw/axi-%/model/model.a
	@mkdir -p $(@D)
	$(CXX) -pthread $(BACKEND_LINK) $^ -o $@
.PHONY: rtl-backend
rtl-backend: build/hw/axi-$(ARRAY)/backends/quant_gemm_rtl.so $(PORTABLE)/runq_gptq
	@mkdir -p $(PORTABLE)/backends
	cp $< $(call BACKEND_PATH,rtl)

# runq and runq_w8a8 with products and quantizer in RTL: their sources as they are, other objects beside them.
build/hw/axi-%/programs.o: hw/sim/programs.cpp hw/sim/in_rtl/common/cpu/quantize.h build/hw/axi-%/matmul_rtl.o
	$(CXX) -Ihw/sim/in_rtl $(CXXFLAGS_ALL) $(DEPS) -c $< -o $@
RTL_PROGRAMS := runq runq_w8a8
define rtl_program
.PRECIOUS: build/hw/axi-%/$1.o
build/hw/axi-%/$1.o: $1.cpp hw/sim/in_rtl/common/cpu/quantize.h build/hw/axi-%/matmul_rtl.o
	$$(CXX) -Ihw/sim/in_rtl $$(CXXFLAGS_ALL) $$(DEPS) -c $$< -o $$@
build/hw/axi-%/$1: build/hw/axi-%/$1.o build/hw/axi-%/programs.o build/hw/axi-%/rtl_session.o build/hw/axi-%/matmul_rtl.o build/lib/common/app/cli.o build/lib/common/cpu/attention.o build/hw/axi-%/model/model.a
	$$(CXX) $$(CXXFLAGS_ALL) $$^ -o $$@ $$(LIBS)
endef
$(foreach p,$(RTL_PROGRAMS),$(eval $(call rtl_program,$p)))

.PHONY: rtl-story
rtl-story: build/hw/axi-$(ARRAY)/runq build/hw/axi-$(ARRAY)/runq_w8a8 build/hw/axi-$(ARRAY)/backends/quant_gemm_rtl.so \
           $(PORTABLE)/runq_gptq $(foreach scheme,q8 w8a8 gptq-ladder,build/models/tiny-llama.$(scheme).bin) $(VENV_READY)
	@$(PY) -m hw.story --array $(ARRAY)

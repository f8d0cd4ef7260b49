# The core of hw/rtl behind AXI, as a whole: in simulation under the programs, and on chips. docs/rtl.md.
#
#     make rtl-backend    build/portable/MACHINE/backends/quant_gemm_rtl.so: runq_gptq ... --backend rtl
#     make rtl-story      all goldens' ids with every product in RTL, and cycles beside bench/systolic.py
#     make rtl-test       the core through its ports
#     make rtl-chip       place and route; table and picture of docs/rtl.md
#     ARRAY=8x32          rows x columns of cells, for the first three; SCALERS=8: how many the core has (mk/hw.mk)

RTL_OPT ?= -O2
# RTL, the sources, and HW, where all is built, are those of mk/hw.mk; hw/tests/core_mutants.py has other ones.
RTL_SOURCES := $(wildcard $(RTL)/*.sv)
HW_TOPS += matmul_axi mac_cell_pair
$(foreach goal,rtl-backend rtl-story rtl-test rtl-netlist rtl-quick rtl-wave rtl-chip hw-core-mutants,$(eval NEEDS_$(goal) := BUILD PYTHON TEST HW))

# The model that Verilator makes of the top, with its runtime: $(HW)/axi-RxC/model/model.a, or axi-RxC-scalersN.
RTL_ARRAY := $(ARRAY)$(if $(SCALERS),-scalers$(SCALERS))
rtl_scalers = $(word 2,$(subst -scalers, ,$1))
RTL_VERILATOR = verilator --cc -O3 -Wall --x-assign fast --x-initial fast --noassert --top-module matmul_axi --prefix Vmatmul_axi $(RTL_TRACE)
$(HW)/axi-%/model/model.a: $(RTL_SOURCES) build/packages-hw
	@rm -rf $(@D) && mkdir -p $(@D)
	$(RTL_VERILATOR) -GROWS=$(call array_rows,$*) -GCOLS=$(call array_cols,$*) -GMIN_GROUP=$(call array_rows,$*) $(if $(call rtl_scalers,$*),-GSCALERS=$(call rtl_scalers,$*)) --Mdir $(@D) $(RTL_SOURCES)
	MAKEFLAGS= make -s -j2 -C $(@D) -f Vmatmul_axi.mk CXX='$(CXX)' OPT_FAST='$(RTL_OPT) -fPIC' OPT_SLOW='-O1 -fPIC' OPT_GLOBAL='-O2 -fPIC' \
	    Vmatmul_axi__ALL.a verilated.o verilated_threads.o $(if $(RTL_TRACE),verilated_vcd_c.o) > $(@D)/log
	cd $(@D) && ar -rcs model.a $$(ar -t Vmatmul_axi__ALL.a) verilated*.o
$(HW)/axi-%/matmul_rtl.o: hw/sim/matmul_rtl.cpp hw/sim/matmul_rtl.h $(HW)/axi-%/model/model.a
	$(CXX) -std=c++20 -O2 -fPIC -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I. -isystem $(VERILATOR_ROOT)/include -isystem $(@D)/model $(if $(RTL_TRACE),-DVM_TRACE=1) -c $< -o $@
# make does not see that the next run needs these again.
.PRECIOUS: $(HW)/axi-%/matmul_axi_test.o $(HW)/axi-%/model/model.a $(HW)/axi-%/matmul_rtl.o $(HW)/axi-%/rtl_session.o $(HW)/axi-%/backend.o $(HW)/axi-%/programs.o

# Stalls, reset, registers, and products against plain arithmetic.
$(HW)/axi-%/matmul_axi_test.o: hw/tests/matmul_axi_test.cpp hw/sim/matmul_rtl.h build/packages-test
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O1 -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I. -c $< -o $@
$(HW)/axi-%/matmul_axi_test: $(HW)/axi-%/matmul_axi_test.o $(HW)/axi-%/matmul_rtl.o $(HW)/axi-%/model/model.a
	$(CXX) $^ -pthread -o $@

# The back end `rtl`, beside the others of the portable build.
RTL_HOST = -std=c++20 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I.
$(HW)/axi-%/backend.o: hw/sim/backend.cpp $(HW)/axi-%/matmul_rtl.o
	$(CXX) $(RTL_HOST) $(DEPS) -c $< -o $@
$(HW)/axi-%/rtl_session.o: hw/sim/rtl_session.cpp $(HW)/axi-%/matmul_rtl.o
	$(CXX) $(RTL_HOST) $(DEPS) -c $< -o $@
$(HW)/axi-%/backends/quant_gemm_rtl.so: $(HW)/axi-%/backend.o $(HW)/axi-%/rtl_session.o $(HW)/axi-%/matmul_rtl.o $(HW)/axi-%/model/model.a
	@mkdir -p $(@D)
	$(CXX) -pthread $(BACKEND_LINK) $^ -o $@
.PHONY: rtl-backend
rtl-backend: $(HW)/axi-$(RTL_ARRAY)/backends/quant_gemm_rtl.so $(PORTABLE)/runq_gptq
	@mkdir -p $(PORTABLE)/backends
	cp $< $(call BACKEND_PATH,rtl)

# runq and runq_w8a8 with products and quantizer in RTL: their sources as they are, other objects beside them.
$(HW)/axi-%/programs.o: hw/sim/programs.cpp hw/sim/in_rtl/engine/cpu/quantize.h $(HW)/axi-%/matmul_rtl.o
	$(CXX) -Ihw/sim/in_rtl $(CXXFLAGS_ALL) $(DEPS) -c $< -o $@
RTL_PROGRAMS := runq runq_w8a8
define rtl_program
.PRECIOUS: $(HW)/axi-%/$1.o
$(HW)/axi-%/$1.o: $1.cpp hw/sim/in_rtl/engine/cpu/quantize.h $(HW)/axi-%/matmul_rtl.o
	$$(CXX) -Ihw/sim/in_rtl $$(CXXFLAGS_ALL) $$(DEPS) -c $$< -o $$@
$(HW)/axi-%/$1: $(HW)/axi-%/$1.o $(HW)/axi-%/programs.o $(HW)/axi-%/rtl_session.o $(HW)/axi-%/matmul_rtl.o $(filter-out %/quant_matmul.o,$(LIBRARY_O)) $(HW)/axi-%/model/model.a
	$$(CXX) $$(CXXFLAGS_ALL) $$^ -o $$@ $$(LIBS)
endef
$(foreach p,$(RTL_PROGRAMS),$(eval $(call rtl_program,$p)))

.PHONY: rtl-story
rtl-story: $(HW)/axi-$(RTL_ARRAY)/runq $(HW)/axi-$(RTL_ARRAY)/runq_w8a8 $(HW)/axi-$(RTL_ARRAY)/backends/quant_gemm_rtl.so \
           $(PORTABLE)/runq_gptq $(foreach scheme,q8 w8a8 gptq-ladder,build/models/tiny-llama.$(scheme).bin) $(VENV_READY)
	@$(PY) -m hw.story --array $(ARRAY) $(if $(SCALERS),--scalers $(SCALERS))

# Two products by one multiplier, beside two cells.
$(HW)/mac_pair_test: hw/tests/mac_pair_test.cpp hw/tests/mac_pair.sv hw/chip/two_cells.sv hw/tests/sim.h $(RTL)/mac_cell.sv $(RTL)/mac_cell_pair.sv build/packages-hw build/packages-test
	@rm -rf $(HW)/mac_pair && mkdir -p $(HW)/mac_pair
	verilator --cc -O3 -Wall --top-module mac_pair --Mdir $(HW)/mac_pair $(filter %.sv,$^)
	MAKEFLAGS= make -s -j2 -C $(HW)/mac_pair -f Vmac_pair.mk CXX='$(CXX)' Vmac_pair__ALL.a verilated.o verilated_threads.o > $(HW)/mac_pair/log
	$(CXX) -std=c++20 -O2 -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I. -Ihw/tests -isystem $(VERILATOR_ROOT)/include -isystem $(HW)/mac_pair $< $(HW)/mac_pair/*.o -pthread -o $@

# The test of the core finds every mistake that is planted in it.
.PHONY: hw-core-mutants
hw-core-mutants: $(HW)/axi-4x4/matmul_axi_test
	@$(PYTHON) hw/tests/core_mutants.py $(if $(CORE_MUTANT),"$(CORE_MUTANT)")
hw: hw-core-mutants

# All signals of one tile, for the wave diagram of docs/rtl.md: build/hw/wave/tile.vcd.
.PHONY: rtl-wave
rtl-wave: build/hw/wave/tile.vcd $(VENV_READY)
	@$(PY) -m hw.wave $< docs/rtl-wave.json
	@$(PY) docs/figures.py docs rtl-wave.svg
build/hw/wave/tile.vcd: hw/sim/wave.cpp hw/sim/matmul_rtl.cpp hw/sim/matmul_rtl.h $(RTL_SOURCES) build/packages-hw
	@mkdir -p $(@D)
	@$(MAKE) -s HW=build/hw/wave RTL_OPT=-O0 RTL_TRACE=--trace build/hw/wave/axi-4x4/matmul_rtl.o
	$(CXX) -std=c++20 -O1 $(ENGINE) -I. $< build/hw/wave/axi-4x4/matmul_rtl.o build/hw/wave/axi-4x4/model/model.a -pthread -o $(@D)/wave
	$(@D)/wave $@

# What tests/test_rtl.py takes: make test builds it where Verilator is.
.PHONY: rtl-quick
rtl-quick: $(HW)/axi-16x16/matmul_axi_test $(HW)/axi-16x16/runq $(HW)/axi-16x16/runq_w8a8 $(HW)/axi-16x16/backends/quant_gemm_rtl.so \
           $(PORTABLE)/runq_gptq $(if $(FULL),build/hw/wave/tile.vcd)

# Place and route, and counts of cells: docs/rtl-chip.json and its picture. The tools of PyPI are in build/hw/yowasp.
.PHONY: rtl-chip
rtl-chip: build/hw/yowasp/ready $(VENV_READY) build/packages-hw
	@$(PY) -m hw.place
	@$(PY) docs/figures.py docs rtl-chip.svg
build/hw/yowasp/ready: tools/yowasp.lock $(call moved,build/hw/yowasp)
	$(call set_up,tools/yowasp.lock)

# The tests of the core for any array, and of two products by one multiplier.
.PHONY: rtl-test
rtl-test: $(HW)/axi-$(RTL_ARRAY)/matmul_axi_test $(HW)/mac_pair_test
	RTL_ARRAY=$(ARRAY) $(HW)/axi-$(RTL_ARRAY)/matmul_axi_test
	$(HW)/mac_pair_test
	@echo 'rtl-test: rows, columns and scalers of the core that passed: $(array_said)'
hw: rtl-test

# The core as Yosys understands it, its words and memories written as Verilog again, through the same test.
.PHONY: rtl-netlist
rtl-netlist: $(HW)/netlist/test
	$<
hw: rtl-netlist
$(HW)/netlist/test: $(RTL_SOURCES) $(HW)/axi-4x4/matmul_axi_test
	@rm -rf $(@D) && mkdir -p $(@D)
	yosys -q -p "read_verilog -sv $(RTL_SOURCES); hierarchy -check -top matmul_axi -chparam ROWS 4 -chparam COLS 4 -chparam MIN_GROUP 4; \
	    proc; flatten; opt; wreduce; peepopt; opt; memory -nomap; opt_clean; write_verilog -noattr $(@D)/matmul_axi.v" > $(@D)/yosys.log 2>&1 || { tail $(@D)/yosys.log; exit 1; }
	verilator --cc -O3 -Wno-fatal -Wno-lint --x-assign fast --x-initial fast --prefix Vmatmul_axi --top-module matmul_axi --Mdir $(@D) $(@D)/matmul_axi.v > $(@D)/verilator.log 2>&1
	MAKEFLAGS= make -s -j2 -C $(@D) -f Vmatmul_axi.mk CXX='$(CXX)' OPT_FAST=-O1 Vmatmul_axi__ALL.a > $(@D)/log
	$(CXX) $(HW)/axi-4x4/matmul_axi_test.o $(HW)/axi-4x4/matmul_rtl.o $(@D)/Vmatmul_axi__ALL.a $(HW)/axi-4x4/model/verilated.o $(HW)/axi-4x4/model/verilated_threads.o -pthread -o $@

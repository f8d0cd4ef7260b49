# hw/: the arithmetic in SystemVerilog, and its tests (docs/rtl.md). Needs the packages PACKAGES_HW.
#
#     make -j2 hw              build and test everything but the mutants and the stories
#     make hw FULL=1           the same with 10^8 random pairs for each fp32 module
#     make hw-quick            what make test runs of it
#     make hw-mutants          the tests find every mistake that is planted in the RTL (MUTANTS=name: this one)
#     make hw-coverage         lines and signals of the RTL that the tests reach
#     make hw-cocotb           the core under AXI models of PyPI; make hw-hls: a layer for high-level synthesis
#     make hw-unit ARRAY=8x32  the modules in Verilator, and tiles on an array of 8 rows x 32 columns; make hw-icarus likewise

# cocotb loads libpython3.so, which Debian's python3 does not come with.
PACKAGES_HW := verilator iverilog yosys doctest-dev nlohmann-json3-dev libpython3-dev
$(foreach goal,hw hw-quick hw-unit hw-lint hw-icarus hw-icarus-quick hw-formal hw-mutants hw-coverage hw-cocotb hw-cocotb-quick hw-hls,$(eval NEEDS_$(goal) := BUILD PYTHON TEST HW))
build/packages-hw: build/packages
	@$(call install,$(PACKAGES_HW))
	@touch $@

# ---- the array ---------------------------------------------------------------------------------------------------
# ARRAY: rows x columns of cells; SCALERS: how many the core has, if not as many as it chooses by itself. These goals take them,
# and any other goal refuses them. tools/array.sh has the rules.
ARRAY   ?= 16x16
SCALERS ?=
SCALERS_GOALS := rtl-test rtl-story rtl-backend
ARRAY_GOALS   := hw-quick hw-unit hw-icarus hw-icarus-quick chip-story $(SCALERS_GOALS)
define refuse_elsewhere
$(if $(filter command,$(origin $1)),$(if $(filter-out build/% $($1_GOALS),$(or $(MAKECMDGOALS),all)),$(error     $1=$($1): make $(firstword $(filter-out build/% $($1_GOALS),$(or $(MAKECMDGOALS),all))) does not take it; these do: $($1_GOALS))))
endef
$(call refuse_elsewhere,ARRAY)$(call refuse_elsewhere,SCALERS)
array_said = $(shell sh tools/array.sh '$(subst ','\'',$(ARRAY))' '$(subst ','\'',$(SCALERS))')
ARRAY_SIZES := $(if $(filter $(ARRAY_GOALS),$(MAKECMDGOALS)),$(array_said))
$(if $(filter error:,$(firstword $(ARRAY_SIZES))),$(error $(wordlist 2,99,$(ARRAY_SIZES))))
# Of a name such as 8x32 or 8x32-scalers8.
array_rows = $(firstword $(subst x, ,$1))
array_cols = $(lastword $(subst x, ,$(firstword $(subst -scalers, ,$1))))

# ---- modules and their tests -------------------------------------------------------------------------------------
# RTL: the sources; HW: where their models go; HW_OBJECTS: where the tests are compiled, which any sources with the same
# ports can share; HW_SAME: models that are taken from there, too; HW_OPT: how models are compiled. hw/tests/mutants.py has others.
RTL        ?= hw/rtl
HW         ?= build/hw
HW_OBJECTS ?= $(HW)
HW_OPT     ?= -O1

# Models by name, for Verilator: the module, and its parameters if they are not the default.
HW_MODELS := fp32_add fp32_mul fp32_fma fp32_div fp32_exp int_to_fp32 int_to_fp32_20 fp16_to_fp32 fp32_to_code \
             array_4x3 array_5x2 array_5x4_paired array_16x16 msd_array_16x16 msd_array_4x3 msd_array_5x2 msd_array_8x4 dot_row dot_row_5 \
             group_scaler row_scaler quantizer quantizer_4 weights msd_split rms_norm rms_norm_4 swiglu \
             attention attention_8
hw_module_int_to_fp32_20     := int_to_fp32 INT_W=20
hw_module_array_4x3          := systolic_array ROWS=4 COLS=3
hw_module_array_5x2          := systolic_array ROWS=5 COLS=2
hw_module_array_5x4_paired   := systolic_array ROWS=5 COLS=4 PAIRED=1'b1
hw_module_array_16x16        := systolic_array ROWS=16 COLS=16
hw_module_msd_array_16x16    := msd_array ROWS=16 COLS=16
hw_module_msd_array_4x3      := msd_array ROWS=4 COLS=3
hw_module_msd_array_5x2      := msd_array ROWS=5 COLS=2 ADD_EIGHTS=1'b0
hw_module_msd_array_8x4      := msd_array ROWS=8 COLS=4 ADD_EIGHTS=1'b0
hw_module_dot_row            := dot_row LANES=16 PRODUCTS=65536
hw_module_dot_row_5          := dot_row LANES=5 PRODUCTS=15 X_MAX=127 W_MAX=15 W_W=5
hw_module_group_scaler       := group_scaler ACC_W=32 TAG_W=16
hw_module_quantizer_4        := quantizer MAX_N=4
hw_module_rms_norm_4         := rms_norm MAX_N=4
hw_module_weights            := weight_expander
hw_module_vector_memory      := vector_memory WORDS=64
hw_module_word_reader_4      := word_reader BYTES=4
hw_module_word_writer_4      := word_writer BYTES=4
hw_module_attention_8        := attention MAX_DIM=8 MAX_POSITIONS=4
hw_module_array_$(ARRAY)     := systolic_array ROWS=$(call array_rows,$(ARRAY)) COLS=$(call array_cols,$(ARRAY))

# Test programs, hw/tests/NAME_test.cpp, and the models that each drives. That of the array has the array of ARRAY, too.
ARRAY_TEST := array$(if $(filter-out 16x16,$(ARRAY)),_$(ARRAY))
HW_TESTS := $(if $(filter hw-quick,$(MAKECMDGOALS)),$(ARRAY_TEST) scaler quantizer,fp32 $(ARRAY_TEST) dot_row scaler quantizer weights msd attention rms_norm swiglu)
HW_TESTS += $(if $(filter hw-quick,$(MAKECMDGOALS)),,token)
hw_models_fp32      := fp32_add fp32_mul fp32_fma fp32_div fp32_exp int_to_fp32 int_to_fp32_20 fp16_to_fp32 fp32_to_code
hw_models_array     := array_4x3 array_5x2 array_5x4_paired array_16x16
hw_models_dot_row   := dot_row dot_row_5
hw_models_scaler    := group_scaler row_scaler
hw_models_quantizer := quantizer quantizer_4
hw_models_rms_norm  := rms_norm rms_norm_4
hw_models_swiglu    := swiglu
hw_models_weights   := weights file_codes fp16_to_fp32
hw_models_token     := rope residual_add dequantizer code_packer vector_memory beat_to_words word_reader word_reader_4 word_writer word_writer_4
hw_models_attention := attention attention_8
hw_models_msd       := msd_split msd_array_16x16 msd_array_4x3 msd_array_5x2 msd_array_8x4 group_scaler fp32_add fp32_mul

VERILATOR      = verilator --cc --build -O3 --assert --x-initial unique -CFLAGS '-DVL_USER_STOP -std=c++20' -MAKEFLAGS OPT_FAST=$(HW_OPT) -y $(RTL) $(HW_VERILATOR)
VERILATOR_ROOT = $(eval VERILATOR_ROOT := $$(shell verilator --getenv VERILATOR_ROOT))$(VERILATOR_ROOT)
HW_FLAGS       = -std=c++20 -O2 -ffp-contract=off -fno-fast-math -pthread $(ENGINE) -I. -Ihw/tests -isystem $(VERILATOR_ROOT)/include \
                 $(WARNINGS) -DVECTORS='"build/hw/vectors"' $(if $(HW_COVERAGE),-DVM_COVERAGE=1 -DCOVERAGE_DIR='"$(HW)"')

# The test of the array, for that of ARRAY.
hw_models_array_$(ARRAY) := $(hw_models_array) array_$(ARRAY)
hw_flags_$(ARRAY_TEST)   := -DARRAY_ROWS=$(call array_rows,$(ARRAY)) -DARRAY_COLS=$(call array_cols,$(ARRAY)) \
                            -DARRAY_MODEL=Varray_$(ARRAY) -DARRAY_HEADER='"Varray_$(ARRAY).h"'

# Other options than last time: make the models again.
$(HW)/flags: FORCE
	@mkdir -p $(@D)
	@echo "$(VERILATOR)" | cmp -s - $@ || echo "$(VERILATOR)" > $@

define hw_model
$$(HW)/models/$1/V$1__ALL.a: $$(RTL)/$(firstword $(or $(hw_module_$1),$1)).sv build/packages-hw $$(HW)/flags
	@mkdir -p $$(@D)
	@MAKEFLAGS= $$(VERILATOR) $(if $(HW_COVERAGE),$(if $(findstring 16x16,$1),,--coverage-line --coverage-toggle)) --prefix V$1 --Mdir $$(@D) --top-module $(basename $(notdir $(firstword $(or $(hw_module_$1),$1)))) \
	    $(patsubst %,"-G%",$(wordlist 2,99,$(hw_module_$1))) $$< > $$(@D)/log || { cat $$(@D)/log; exit 1; }
	@sed 's|^[^:]*:|$$@:|' $$(@D)/V$1__ver.d > $$(@D)/sources.d
endef
$(foreach model,$(sort $(foreach test,$(HW_TESTS),$(hw_models_$(test)))),$(eval $(call hw_model,$(model))))
-include $(wildcard $(HW)/models/*/sources.d)

# Verilator's part of each program; it calls our vl_stop where an assertion does not hold.
HW_RUNTIME = $(patsubst %,$(HW_OBJECTS)/%.o,verilated verilated_threads $(if $(HW_COVERAGE),verilated_cov) $(if $(RTL_TRACE),verilated_vcd_c))
$(HW_RUNTIME): $(HW_OBJECTS)/%.o: $(HW_OBJECTS)/flags build/packages-hw
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O2 -w -fPIC -pthread -DVL_USER_STOP -I$(VERILATOR_ROOT)/include -I$(VERILATOR_ROOT)/include/vltstd -c $(VERILATOR_ROOT)/include/$*.cpp -o $@

$(HW_OBJECTS)/vectors.o $(HW_OBJECTS)/main.o: $(HW_OBJECTS)/%.o: build/packages-hw
	@mkdir -p $(@D)
	$(CXX) $(HW_FLAGS) $(DEPS) -c $(firstword $(wildcard hw/tests/$*.cpp tests/$*.cpp)) -o $@
define hw_test
$$(HW_OBJECTS)/$1_test.o: hw/tests/$(if $(filter $(ARRAY_TEST),$1),array,$1)_test.cpp $(foreach model,$(hw_models_$1),$$(HW_OBJECTS)/models/$(model)/V$(model)__ALL.a)
	$$(CXX) $$(HW_FLAGS) $$(hw_flags_$1) $$(DEPS) $(foreach model,$(hw_models_$1),-isystem $$(HW_OBJECTS)/models/$(model)) -c $$< -o $$@
$$(HW)/$1_test: $$(HW_OBJECTS)/$1_test.o $$(HW_OBJECTS)/vectors.o $$(HW_OBJECTS)/main.o $$(HW_RUNTIME) $(foreach model,$(hw_models_$1),$(if $(filter $(model),$(HW_SAME)),$$(HW_OBJECTS),$$(HW))/models/$(model)/V$(model)__ALL.a)
	$$(CXX) -pthread $$(filter %.o %.a,$$^) -o $$@
endef
$(foreach test,$(HW_TESTS),$(eval $(call hw_test,$(test))))

# Vectors of operations, and products on each array.
HW_VECTORS := build/hw/vectors/ops/manifest.json build/hw/vectors/$(ARRAY)/cases.txt
.PRECIOUS: build/hw/vectors/%/cases.txt
HW_VECTORS_FROM := hw/tests/make_vectors.py golden/data/ops.safetensors $(wildcard golden/*.py) $(VENV_READY)
build/hw/vectors/ops/manifest.json: $(HW_VECTORS_FROM)
	@$(PY) hw/tests/make_vectors.py $(@D)
build/hw/vectors/%/cases.txt: $(HW_VECTORS_FROM)
	@$(PY) hw/tests/make_vectors.py $(@D)

# ---- what runs ---------------------------------------------------------------------------------------------------
HW_RANDOM := $(if $(FULL),100000000,1000000)
HW_TOPS   := systolic_array dot_row group_scaler row_scaler quantizer fp32_fma fp32_exp file_codes weight_expander fp16_to_fp32 msd_array attention rms_norm swiglu
HW_TOPS   += rope residual_add dequantizer code_packer vector_memory word_reader word_writer chip_registers step_sequencer chip_axi
.PHONY: hw hw-quick hw-unit hw-lint hw-icarus hw-icarus-quick hw-formal hw-mutants hw-coverage
hw: hw-lint hw-unit hw-icarus hw-formal hw-coverage hw-cocotb hw-hls rtl-test rtl-netlist rtl-broken
	@echo 'hw: all passed, $(HW_RANDOM) random pairs for each fp32 module$(if $(FULL),, (FULL=1: 100000000))'
hw-quick: hw-lint hw-unit hw-icarus-quick hw-cocotb-quick hw-hls
	@echo 'hw-quick: $(HW_TESTS) passed; make hw also has the other modules, proofs, coverage, and every tile in Icarus'

# Every test program, one after the other. HW_PAIRS is read by fp32_test, HW_ARRAY by those that take products.
hw-unit: $(HW_TESTS:%=$(HW)/%_test) $(HW_VECTORS)
	@for test in $(HW_TESTS); do echo "--- $(HW)/$${test}_test"; HW_ARRAY=$(ARRAY) HW_PAIRS=$(or $(HW_PAIRS),$(HW_RANDOM)) $(HW)/$${test}_test --no-colors=1 || exit 1; done

# All three tools take every module, and Verilator has no warning, nor Yosys a latch, a loop or two drivers.
# hw-quick: of the modules that no other has, and with them of all below them, as their parameters are there.
HW_LINTED = $(if $(filter hw-quick,$(MAKECMDGOALS)),matmul_axi chip_axi dot_row row_scaler msd_array,$(HW_TOPS))
hw-lint: build/packages-hw
	@mkdir -p build/hw
	@for top in $(HW_LINTED); do verilator --lint-only -Wall -y $(RTL) --top-module $$top $(RTL)/$$top.sv || exit 1; done
	@for top in $(HW_LINTED); do iverilog -g2012 -y $(RTL) -Y .sv -s $$top -o build/hw/lint.vvp $(RTL)/$$top.sv || exit 1; done
	@yosys -q -e latch -p "read_verilog -sv $(RTL)/*.sv; design -save all; $(foreach top,$(HW_LINTED),design -load all; hierarchy -top $(top); proc; check -assert;)" \
	    > build/hw/yosys.log 2>&1 || { cat build/hw/yosys.log; exit 1; }
	@echo "hw-lint: $(words $(HW_LINTED)) modules and all below them: Verilator, Icarus, Yosys"

# A test bench of hw/tests on a product: $(call hw_bench,BENCH,ARRAY,OPTIONS). The shell has the product's name and sizes.
hw_bench = iverilog -g2012 -y $(RTL) -Y .sv -s $1 -P $1.ROWS=$(call array_rows,$2) -P $1.COLS=$(call array_cols,$2) -P $1.TOKENS=$$n \
               -P $1.OUTPUTS=$$m -P $1.INPUTS=$$k $3 -o build/hw/$1.vvp hw/tests/$1.sv && \
           { vvp -n build/hw/$1.vvp +vectors=build/hw/vectors/$2/passes-$$name > build/hw/$1.log; status=$$?; \
             sed "s|^|$1, $2, $$name: |" build/hw/$1.log; [ $$status = 0 ]; } && grep -q '^equal' build/hw/$1.log
# The cells of an ECP5, as Verilog.
YOSYS_ECP5 = $(dir $(shell command -v yosys))../share/yosys/ecp5
# The products of an array that a command prints: $(call hw_tiles,ARRAY,COMMAND).
hw_tiles = $2 build/hw/vectors/$1/cases.txt | while read name n m k g; do \
               $(call hw_bench,tile_tb,$1) && \
               $(call hw_bench,scaler_tb,$1,-P scaler_tb.GROUP=$$g) || exit 1; \
           done
# Long products take Icarus minutes. Beside 16 x 16, two other arrays have one product.
HW_OTHER_ARRAYS := $(if $(filter 16x16,$(ARRAY)),8x32 64x64)
hw-icarus: $(HW_OTHER_ARRAYS:%=build/hw/vectors/%/cases.txt)
hw-icarus hw-icarus-quick: build/hw/vectors/$(ARRAY)/cases.txt build/packages-hw
	@$(call hw_tiles,$(ARRAY),$(if $(findstring quick,$@),grep 16x64x64g64,awk '$$4 <= 2048'))
	@$(if $(findstring quick,$@),,$(foreach array,$(HW_OTHER_ARRAYS),$(call hw_tiles,$(array),grep 16x64x64g64) &&)) :
	@iverilog -g2012 -I $(YOSYS_ECP5) -s soft_mul_tb -o build/hw/soft_mul_tb.vvp hw/tests/soft_mul_tb.v hw/chip/soft_mul.v $(YOSYS_ECP5)/cells_sim.v && \
	    vvp -n build/hw/soft_mul_tb.vvp > build/hw/soft_mul_tb.log && sed 's|^|soft_mul_tb: |' build/hw/soft_mul_tb.log && grep -q '^equal' build/hw/soft_mul_tb.log
	@echo '$@: tiles and scalers of an array of $(ARRAY) in Icarus'

# The core under AXI models of PyPI (hw/tests/cocotb_axi.py), on Icarus, as cocotb takes no Verilator as old as Debian's.
COCOTB := build/hw/cocotb
$(COCOTB)/ready: tools/cocotb.lock $(call moved,$(COCOTB))
	$(call set_up,tools/cocotb.lock)
.PHONY: hw-cocotb hw-cocotb-quick
hw-cocotb hw-cocotb-quick: $(COCOTB)/ready build/packages-hw
	@iverilog -g2012 -s matmul_axi -P matmul_axi.ROWS=4 -P matmul_axi.COLS=8 -P matmul_axi.MIN_GROUP=4 -P matmul_axi.FETCH=1 -o $(COCOTB)/core.vvp $(wildcard $(RTL)/*.sv)
	@rm -f $(COCOTB)/results.xml
	@PATH="$(CURDIR)/$(COCOTB)/bin:$$PATH" VIRTUAL_ENV="$(CURDIR)/$(COCOTB)" PYTHONPATH="$(CURDIR)" COCOTB_LOG_LEVEL=WARNING \
	    COCOTB_RESULTS_FILE=$(COCOTB)/results.xml COCOTB_PRODUCTS=$(if $(findstring quick,$@),30,1000) MODULE=hw.tests.cocotb_axi TOPLEVEL=matmul_axi \
	    vvp -n -M "$$($(COCOTB)/bin/cocotb-config --prefix)/cocotb/libs" -m libcocotbvpi_icarus $(COCOTB)/core.vvp > $(COCOTB)/log 2>&1; \
	    grep -q '<testcase name="queue"' $(COCOTB)/results.xml && ! grep -q '<failure' $(COCOTB)/results.xml && ! grep -q 'ERROR:' $(COCOTB)/log || { cat $(COCOTB)/log; exit 1; }
	@echo '$@: $(if $(findstring quick,$@),30,1000) products under the AXI models of cocotbext-axi, in Icarus'

# A layer for high-level synthesis (hw/hls/layer.h) beside the golden trace, with RMSNorm in fp32 and fp64, in two compilers;
# nothing in it takes memory from the heap.
HLS_FLAGS := -std=c++17 -O1 -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -ffp-contract=off -fno-exceptions -I. -Ibuild/hw/hls
HLS_TRACE := golden/data/tiny-llama.q8.decode.trace.safetensors
.PHONY: hw-hls
hw-hls: build/models/tiny-llama.q8.bin $(VENV_READY)
	@mkdir -p build/hw/hls
	@$(PY) -m golden hex 'layers.1.*' --file $< --format c > build/hw/hls/weights.h
	@$(PY) -m golden hex 'layers.1.*' layers.0.ffn.residual --file $(HLS_TRACE) --format c > build/hw/hls/steps.h
	@for cxx in g++ $(if $(shell command -v clang++),clang++); do for norm in float double; do \
	    $$cxx $(HLS_FLAGS) -DNORM_T=$$norm -c hw/hls/layer_test.cpp -o build/hw/hls/layer_test.o || exit 1; \
	    ! nm -u build/hw/hls/layer_test.o | grep -E ' (malloc|calloc|_Zn[aw].*)$$' || exit 1; \
	    $$cxx build/hw/hls/layer_test.o -o build/hw/hls/layer_test && build/hw/hls/layer_test > build/hw/hls/log || { cat build/hw/hls/log; exit 1; }; \
	    echo "hw-hls: $$cxx, RMSNorm in $$norm: $$(tail -n 1 build/hw/hls/log)"; done; done

# Proofs: each hw/formal/NAME.sv has a module of its name with assertions, which sat of Yosys proves by induction over clocks.
hw-formal: build/packages-hw
	@for proof in $(basename $(notdir $(wildcard hw/formal/*.sv))); do \
	    yosys -q -p "read_verilog -sv -formal $(RTL)/*.sv hw/formal/$$proof.sv; hierarchy -top $$proof; proc; memory; opt; flatten; async2sync; opt; \
	        sat -verify -tempinduct -prove-asserts -set-assumes -seq 3 -set-at 1 checks_q 0 -maxsteps 10" > build/hw/formal.log 2>&1 || \
	        { cat build/hw/formal.log; exit 1; }; \
	    echo "hw-formal: $$proof is proved"; done

hw-mutants: $(HW_TESTS:%=build/hw/%_test) $(HW_VECTORS) build/hw/axi-4x8-scalers2/matmul_axi_test build/hw/axi-4x8-scalers2/system_test build/models/tiny-llama.q8.bin
	@$(PY) hw/tests/mutants.py $(if $(MUTANTS),'$(MUTANTS)')

# The same tests with models that count, but for the largest, which take minutes to compile and have the modules of others.
hw-coverage: build/packages-hw $(HW_VECTORS)
	@rm -f build/hw/coverage/*.dat
	@mkdir -p build/hw && $(MAKE) --no-print-directory hw-unit HW=build/hw/coverage HW_COVERAGE=1 HW_PAIRS=10000 \
	    > build/hw/coverage.log || { cat build/hw/coverage.log; exit 1; }
	@'$(PYTHON)' hw/tests/coverage.py build/hw/coverage/*.dat

# ---- the core --------------------------------------------------------------------------------------------------------
# The core of hw/rtl behind AXI, as a whole: in simulation under the programs, and on chips. docs/rtl.md.
#
#     make rtl-backend    build/portable/MACHINE/backends/quant_gemm_rtl.so: runq_gptq ... --backend rtl
#     make rtl-story      all goldens' ids with every product in RTL, and cycles beside bench/systolic.py
#     make rtl-test       the core through its ports
#     make rtl-chip       place and route; table and picture of docs/rtl.md
#     ARRAY=8x32          rows x columns of cells, for the first three; SCALERS=8: how many the core has (mk/hw.mk)

RTL_OPT ?= -O2
# RTL, the sources, and HW, where all is built, are those of mk/hw.mk; hw/tests/mutants.py has other ones.
RTL_SOURCES := $(wildcard $(RTL)/*.sv)
HW_TOPS += matmul_axi weight_fetcher mac_cell_pair
$(foreach goal,rtl-backend rtl-story rtl-test rtl-netlist rtl-quick rtl-wave rtl-chip rtl-broken,$(eval NEEDS_$(goal) := BUILD PYTHON TEST HW))

# The model that Verilator makes of the top: $(HW)/axi-RxC/model/Vmatmul_axi__ALL.a, or axi-RxC-scalersN.
RTL_ARRAY := $(ARRAY)$(if $(SCALERS),-scalers$(SCALERS))
rtl_scalers = $(word 2,$(subst -scalers, ,$1))
# The core has the master m_axi where its beats are those of AXI4.
rtl_fetch = $(if $(filter 4 8 16 32 64 128,$(call array_cols,$1)),"-GFETCH=1'b1")
RTL_VERILATOR = verilator --cc -O3 -Wall --x-assign fast --x-initial fast --assert -CFLAGS -DVL_USER_STOP --top-module matmul_axi --prefix Vmatmul_axi $(RTL_TRACE) $(HW_VERILATOR)
$(HW)/axi-%/model/Vmatmul_axi__ALL.a: $(RTL_SOURCES) build/packages-hw
	@rm -rf $(@D) && mkdir -p $(@D)
	$(RTL_VERILATOR) -GROWS=$(call array_rows,$*) -GCOLS=$(call array_cols,$*) -GMIN_GROUP=$(call array_rows,$*) $(if $(call rtl_scalers,$*),-GSCALERS=$(call rtl_scalers,$*)) $(call rtl_fetch,$*) --Mdir $(@D) $(RTL_SOURCES)
	MAKEFLAGS= make -s -j2 -C $(@D) -f Vmatmul_axi.mk CXX='$(CXX)' OPT_FAST='$(RTL_OPT) -fPIC' OPT_SLOW='-O1 -fPIC' Vmatmul_axi__ALL.a > $(@D)/log
$(HW_OBJECTS)/axi-%/matmul_rtl.o: hw/sim/matmul_rtl.cpp hw/sim/matmul_rtl.h hw/sim/assertions.h $(HW_OBJECTS)/axi-%/model/Vmatmul_axi__ALL.a
	$(CXX) -std=c++20 -O2 -fPIC -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I. -isystem $(VERILATOR_ROOT)/include -isystem $(@D)/model $(if $(RTL_TRACE),-DVM_TRACE=1) -c $< -o $@
# make does not see that the next run needs these again.
$(HW_OBJECTS)/axi-%/matmul_system.o: hw/sim/matmul_system.cpp hw/sim/matmul_system.h hw/driver/matmul.h hw/sim/matmul_rtl.h hw/sim/assertions.h $(HW_OBJECTS)/axi-%/model/Vmatmul_axi__ALL.a
	$(CXX) -std=c++20 -O2 -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I. -isystem $(VERILATOR_ROOT)/include -isystem $(@D)/model -c $< -o $@
.PRECIOUS: $(HW)/axi-%/matmul_system.o $(HW)/axi-%/system_test.o $(HW)/axi-%/matmul_axi_test.o $(HW)/axi-%/model/Vmatmul_axi__ALL.a $(HW)/axi-%/matmul_rtl.o $(HW)/axi-%/rtl_session.o $(HW)/axi-%/backend.o $(HW)/axi-%/programs.o

# Stalls, reset, registers, and products against plain arithmetic.
$(HW_OBJECTS)/axi-%/matmul_axi_test.o: hw/tests/matmul_axi_test.cpp hw/tests/product_case.h hw/sim/matmul_rtl.h build/packages-test
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O1 -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I. -c $< -o $@
$(HW_OBJECTS)/axi-%/system_test.o: hw/tests/system_test.cpp hw/tests/product_case.h hw/sim/matmul_rtl.h hw/sim/matmul_system.h hw/driver/matmul.h build/packages-test
	@mkdir -p $(@D)
	@echo '#include "hw/driver/matmul.h"' | $(CC) -x c -std=c99 -Wall -Wextra -Wpedantic -Wshadow -Werror -I. -fsyntax-only -
	$(CXX) -std=c++20 -O1 -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I. -c $< -o $@
$(HW)/axi-%/system_test: $(HW_OBJECTS)/axi-%/system_test.o $(HW_OBJECTS)/axi-%/matmul_system.o $(HW_OBJECTS)/axi-%/matmul_rtl.o $(HW)/axi-%/model/Vmatmul_axi__ALL.a $(HW_RUNTIME)
	$(CXX) $^ -pthread -o $@
$(HW)/axi-%/matmul_axi_test: $(HW_OBJECTS)/axi-%/matmul_axi_test.o $(HW_OBJECTS)/axi-%/matmul_rtl.o $(HW)/axi-%/model/Vmatmul_axi__ALL.a $(HW_RUNTIME)
	$(CXX) $^ -pthread -o $@

# The back end `rtl`, beside the others of the portable build.
RTL_HOST = -std=c++20 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I.
$(HW)/axi-%/backend.o: hw/sim/backend.cpp $(HW)/axi-%/matmul_rtl.o
	$(CXX) $(RTL_HOST) $(DEPS) -c $< -o $@
$(HW)/axi-%/rtl_session.o: hw/sim/rtl_session.cpp $(HW)/axi-%/matmul_rtl.o
	$(CXX) $(RTL_HOST) $(DEPS) -c $< -o $@
$(HW)/axi-%/backends/quant_gemm_rtl.so: $(HW)/axi-%/backend.o $(HW)/axi-%/rtl_session.o $(HW)/axi-%/matmul_rtl.o $(HW)/axi-%/model/Vmatmul_axi__ALL.a $(HW_RUNTIME)
	@mkdir -p $(@D)
	$(CXX) -pthread $(BACKEND_LINK) $^ -o $@
.PHONY: rtl-backend
rtl-backend: $(HW)/axi-$(RTL_ARRAY)/backends/quant_gemm_rtl.so $(PORTABLE)/runq_gptq
	@mkdir -p $(PORTABLE)/backends
	cp $< $(call BACKEND_PATH,rtl)

# runq and runq_w8a8 with products and quantizer in RTL: their sources as they are, other objects beside them. The simulation
# takes the time, so that the compiler need not.
$(HW)/axi-%/programs.o: hw/sim/programs.cpp hw/sim/in_rtl/engine/cpu/quantize.h $(HW)/axi-%/matmul_rtl.o
	$(CXX) -Ihw/sim/in_rtl $(CXXFLAGS_ALL) -O1 $(DEPS) -c $< -o $@
RTL_PROGRAMS := runq runq_w8a8
define rtl_program
.PRECIOUS: $(HW)/axi-%/$1.o
$(HW)/axi-%/$1.o: $1.cpp hw/sim/in_rtl/engine/cpu/quantize.h $(HW)/axi-%/matmul_rtl.o
	$$(CXX) -Ihw/sim/in_rtl $$(CXXFLAGS_ALL) -O1 $$(DEPS) -c $$< -o $$@
$(HW)/axi-%/$1: $(HW)/axi-%/$1.o $(HW)/axi-%/programs.o $(HW)/axi-%/rtl_session.o $(HW)/axi-%/matmul_rtl.o $(filter-out %/quant_matmul.o,$(LIBRARY_O)) $(HW)/axi-%/model/Vmatmul_axi__ALL.a $(HW_RUNTIME)
	$$(CXX) $$(CXXFLAGS_ALL) $$^ -o $$@ $$(LIBS)
endef
$(foreach p,$(RTL_PROGRAMS),$(eval $(call rtl_program,$p)))

.PHONY: rtl-story
rtl-story: $(HW)/axi-$(RTL_ARRAY)/runq $(HW)/axi-$(RTL_ARRAY)/runq_w8a8 $(HW)/axi-$(RTL_ARRAY)/backends/quant_gemm_rtl.so \
           $(PORTABLE)/runq_gptq $(foreach scheme,q8 w8a8 gptq-ladder,build/models/tiny-llama.$(scheme).bin) $(VENV_READY)
	@$(PY) -m hw.story --hw $(HW) --array $(ARRAY) $(if $(SCALERS),--scalers $(SCALERS)) $(STORY)

# A core with a mistake fails the story.
.PHONY: rtl-broken
rtl-broken: build/models/tiny-llama.q8.bin $(VENV_READY) build/packages-hw
	@rm -rf build/hw/broken/rtl && mkdir -p build/hw/broken && cp -r hw/rtl build/hw/broken/rtl
	@sed "s/+ (first_pass ? '0 : earlier)/- (first_pass ? '0 : earlier)/" hw/rtl/column_edges.sv > build/hw/broken/rtl/column_edges.sv && ! cmp -s hw/rtl/column_edges.sv build/hw/broken/rtl/column_edges.sv
	@$(MAKE_AGAIN) build/hw/broken/axi-4x4/runq RTL=build/hw/broken/rtl HW=build/hw/broken RTL_OPT=-O1 > build/hw/broken/log 2>&1 || { cat build/hw/broken/log; exit 1; }
	@! $(PY) -m hw.story --hw build/hw/broken --array 4x4 --ids 2 --programs q8 > build/hw/broken/log 2>&1 && \
	    grep -q "ids are NOT the golden's" build/hw/broken/log || { tail build/hw/broken/log; exit 1; }
	@echo 'rtl-broken: the story of a core with a mistake is found to be another'

# Two products by one multiplier, beside two cells.
$(HW)/mac_pair_test: hw/tests/mac_pair_test.cpp hw/tests/mac_pair.sv hw/chip/two_cells.sv hw/tests/sim.h $(RTL)/mac_cell.sv $(RTL)/mac_cell_pair.sv $(HW_RUNTIME) build/packages-test
	@rm -rf $(HW)/mac_pair && mkdir -p $(HW)/mac_pair
	verilator --cc -O3 -Wall --top-module mac_pair --Mdir $(HW)/mac_pair $(filter %.sv,$^)
	MAKEFLAGS= make -s -j2 -C $(HW)/mac_pair -f Vmac_pair.mk CXX='$(CXX)' Vmac_pair__ALL.a > $(HW)/mac_pair/log
	$(CXX) -std=c++20 -O2 -Wall -Wextra -Wshadow $(if $(WERROR),-Werror) $(ENGINE) -I. -Ihw/tests -isystem $(VERILATOR_ROOT)/include -isystem $(HW)/mac_pair $< $(HW)/mac_pair/*.o $(HW_RUNTIME) -pthread -o $@

# All signals of one tile, for the wave diagram of docs/rtl.md: build/hw/wave/tile.vcd.
.PHONY: rtl-wave
rtl-wave: build/hw/wave/tile.vcd $(VENV_READY)
	@$(PY) -m hw.wave $< docs/rtl-wave.json
	@$(PY) docs/figures.py docs rtl-wave.svg
build/hw/wave/tile.vcd: hw/sim/wave.cpp hw/sim/matmul_rtl.cpp hw/sim/matmul_rtl.h $(RTL_SOURCES) build/packages-hw
	@mkdir -p $(@D)
	@$(MAKE) -s HW=build/hw/wave RTL_OPT=-O0 RTL_TRACE=--trace build/hw/wave/axi-4x4/matmul_rtl.o build/hw/wave/verilated_vcd_c.o build/hw/wave/verilated.o build/hw/wave/verilated_threads.o
	$(CXX) -std=c++20 -O1 $(ENGINE) -I. $< build/hw/wave/axi-4x4/matmul_rtl.o build/hw/wave/axi-4x4/model/Vmatmul_axi__ALL.a build/hw/wave/verilated*.o -pthread -o $(@D)/wave
	$(@D)/wave $@

# What tests/test_rtl.py takes: make test builds it where Verilator is.
.PHONY: rtl-quick
QUICK_ARRAY := $(if $(FULL),16x16,8x8)
rtl-quick: $(foreach part,matmul_axi_test system_test runq runq_w8a8 backends/quant_gemm_rtl.so,$(HW)/axi-$(QUICK_ARRAY)/$(part)) \
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
rtl-test: $(HW)/axi-$(RTL_ARRAY)/matmul_axi_test $(HW)/axi-$(RTL_ARRAY)/system_test $(HW)/mac_pair_test
	RTL_ARRAY=$(ARRAY) $(HW)/axi-$(RTL_ARRAY)/matmul_axi_test
	$(HW)/axi-$(RTL_ARRAY)/system_test
	$(HW)/mac_pair_test
	@echo 'rtl-test: rows, columns and scalers of the core that passed: $(array_said)'

# The core as Yosys understands it, its words and memories written as Verilog again, through the same test.
.PHONY: rtl-netlist
rtl-netlist: $(HW)/netlist/matmul_axi_test
	$(@:rtl-%=$(HW)/%)/matmul_axi_test
	$(@:rtl-%=$(HW)/%)/system_test
$(HW)/netlist/matmul_axi_test: $(RTL_SOURCES) $(HW)/axi-4x4/matmul_axi_test $(HW)/axi-4x4/system_test
	@rm -rf $(@D) && mkdir -p $(@D)
	yosys -q -p "read_verilog -sv $(RTL_SOURCES); hierarchy -check -top matmul_axi -chparam ROWS 4 -chparam COLS 4 -chparam MIN_GROUP 4 -chparam FETCH 1'b1; \
	    proc; flatten; opt; wreduce; peepopt; opt; memory -nomap; opt_clean; write_verilog -noattr $(@D)/matmul_axi.v" > $(@D)/yosys.log 2>&1 || { tail $(@D)/yosys.log; exit 1; }
	verilator --cc -O3 -Wno-fatal -Wno-lint --x-assign fast --x-initial fast --prefix Vmatmul_axi --top-module matmul_axi --Mdir $(@D) $(@D)/matmul_axi.v > $(@D)/verilator.log 2>&1
	MAKEFLAGS= make -s -j2 -C $(@D) -f Vmatmul_axi.mk CXX='$(CXX)' OPT_FAST=-O1 Vmatmul_axi__ALL.a > $(@D)/log
	for test in system_test matmul_axi_test; do \
	    $(CXX) $(patsubst %,$(HW)/axi-4x4/%.o,matmul_rtl matmul_system) $(HW_RUNTIME) $(HW)/axi-4x4/$$test.o $(@D)/Vmatmul_axi__ALL.a -pthread -o $(@D)/$$test || exit 1; done

# ---- a whole token -----------------------------------------------------------------------------------------------------
# hw/rtl/chip_axi.sv with a model of memory: docs/chip.md.
#
#     make chip-story    the goldens' ids and traces, and clocks of each step; ARRAY=16x64, STORY='--models q8 --ids 2'
#     make chip-quick    two ids on 4x4
#     make chip-count    cells of each unit, for docs/rtl-chip.json

$(foreach goal,chip-story chip-quick chip-count,$(eval NEEDS_$(goal) := BUILD PYTHON TEST HW))
CHIP_SOURCES := hw/sim/chip_run.cpp hw/sim/chip_trace.sv
CHIP_VERILATOR = verilator --cc --exe -O3 -Wall -Wno-DECLFILENAME $(HW_VERILATOR) --x-assign fast --x-initial fast --assert \
                 -CFLAGS '-DVL_USER_STOP -std=c++20 -Wall -Wextra -I$(CURDIR)' --top-module chip_axi --prefix Vchip_axi -o chip_run
.PRECIOUS: $(HW)/chip-%/chip_run
$(HW)/chip-%/chip_run: $(RTL_SOURCES) $(CHIP_SOURCES) hw/sim/assertions.h build/packages-hw
	@rm -rf $(@D) && mkdir -p $(@D)
	$(CHIP_VERILATOR) -GROWS=$(call array_rows,$*) -GCOLS=$(call array_cols,$*) -CFLAGS -DCHIP_COLS=$(call array_cols,$*) \
	    --Mdir $(@D) $(RTL_SOURCES) $(abspath $(CHIP_SOURCES))
	MAKEFLAGS= make -s -j2 -C $(@D) -f Vchip_axi.mk CXX='$(CXX)' OPT_FAST=$(RTL_OPT) OPT_SLOW=-O1 > $(@D)/log
CHIP_MODELS := $(foreach model,tiny-llama.q8 tiny-qwen3.q8 tiny-llama.w8a8,build/models/$(model).bin)
.PHONY: chip-story chip-quick chip-count
chip-story: $(HW)/chip-$(ARRAY)/chip_run $(CHIP_MODELS) $(VENV_READY)
	@$(PY) -m hw.chip_story --hw $(HW) --array $(ARRAY) $(STORY)
chip-quick: $(HW)/chip-4x4/chip_run $(CHIP_MODELS) $(VENV_READY)
	@$(PY) -m hw.chip_story --hw $(HW) --array 4x4 --ids 2 --models q8 --faults
chip-count: $(VENV_READY) build/packages-hw
	@$(PY) -m hw.place units

# hw/: the arithmetic in SystemVerilog, and its tests (docs/rtl.md). Needs the packages PACKAGES_HW.
#
#     make hw                  build and test everything
#     make hw FULL=1           the same with 10^8 random pairs for each fp32 module
#     make hw-quick            what make test runs of it
#     make hw-coverage         lines and signals of the RTL that the tests reach
#     make hw-mutants          the tests find every mistake that is planted in the RTL (MUTANTS=name: this one)

PACKAGES_HW := verilator iverilog yosys doctest-dev nlohmann-json3-dev
$(foreach goal,hw hw-quick hw-coverage hw-mutants,$(eval NEEDS_$(goal) := BUILD PYTHON HW))
build/packages-hw: build/packages
	@$(call install,$(PACKAGES_HW))
	@touch $@

# ---- modules and their tests -------------------------------------------------------------------------------------
# RTL: the sources; HW: where their models go. hw/tests/mutants.py has other ones.
RTL ?= hw/rtl
HW  ?= build/hw

# Models by name, for Verilator: the module, and its parameters if they are not the default.
HW_MODELS := fp32_add fp32_mul fp32_fma fp32_div int_to_fp32 int_to_fp32_20 fp16_to_fp32 fp32_to_code \
             array_4x3 array_5x2 array_16x16 msd_array_16x16 msd_array_4x3 dot_row dot_row_5 \
             group_scaler group_scaler_fused row_scaler quantizer quantizer_4 weights msd_split
hw_module_int_to_fp32_20     := int_to_fp32 INT_W=20
hw_module_array_4x3          := systolic_array ROWS=4 COLS=3
hw_module_array_5x2          := systolic_array ROWS=5 COLS=2
hw_module_array_16x16        := systolic_array ROWS=16 COLS=16
hw_module_msd_array_16x16    := msd_array ROWS=16 COLS=16
hw_module_msd_array_4x3      := msd_array ROWS=4 COLS=3 ADD_EIGHTS=1'b0
hw_module_dot_row            := dot_row LANES=16 PRODUCTS=65536
hw_module_dot_row_5          := dot_row LANES=5 PRODUCTS=15 X_MAX=127 W_MAX=15 W_W=5
hw_module_group_scaler       := group_scaler ACC_W=32 TAG_W=16
hw_module_group_scaler_fused := group_scaler ACC_W=32 TAG_W=16 FUSED=1'b1
hw_module_quantizer_4        := quantizer MAX_N=4
hw_module_weights            := weight_expander

# Test programs, hw/tests/NAME_test.cpp, and the models that each drives.
HW_TESTS := fp32 array dot_row scaler quantizer weights msd
hw_models_fp32      := fp32_add fp32_mul fp32_fma fp32_div int_to_fp32 int_to_fp32_20 fp16_to_fp32 fp32_to_code
hw_models_array     := array_4x3 array_5x2 array_16x16
hw_models_dot_row   := dot_row dot_row_5
hw_models_scaler    := group_scaler group_scaler_fused row_scaler
hw_models_quantizer := quantizer quantizer_4
hw_models_weights   := weights file_codes fp16_to_fp32
hw_models_msd       := msd_split msd_array_16x16 msd_array_4x3

VERILATOR      = verilator --cc --build -O3 --x-initial unique -CFLAGS '-O1 -std=c++20' -y $(RTL) $(HW_VERILATOR)
VERILATOR_ROOT = $(eval VERILATOR_ROOT := $$(shell verilator --getenv VERILATOR_ROOT))$(VERILATOR_ROOT)
HW_FLAGS       = -std=c++20 -O2 -ffp-contract=off -fno-fast-math -pthread -I. -Ihw/tests -isystem $(VERILATOR_ROOT)/include \
                 $(WARNINGS) -DVECTORS='"build/hw/vectors"' -DCOVERAGE_DIR='"$(HW)"'

define hw_model
$$(HW)/models/$1/V$1__ALL.a: $$(RTL)/$(firstword $(or $(hw_module_$1),$1)).sv build/packages-hw mk/hw.mk
	@mkdir -p $$(@D)
	@MAKEFLAGS= $$(VERILATOR) --prefix V$1 --Mdir $$(@D) --top-module $(basename $(notdir $(firstword $(or $(hw_module_$1),$1)))) \
	    $(patsubst %,"-G%",$(wordlist 2,99,$(hw_module_$1))) $$< > $$(@D)/log || { cat $$(@D)/log; exit 1; }
	@sed 's|^[^:]*:|$$@:|' $$(@D)/V$1__ver.d > $$(@D)/sources.d
endef
$(foreach model,$(sort $(foreach test,$(HW_TESTS),$(hw_models_$(test)))),$(eval $(call hw_model,$(model))))
-include $(wildcard $(HW)/models/*/sources.d)

HW_RUNTIME := $(patsubst %,$(HW)/%.o,verilated verilated_threads $(if $(HW_COVERAGE),verilated_cov))
$(HW_RUNTIME): $(HW)/%.o: build/packages-hw
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O2 -w -pthread -I$(VERILATOR_ROOT)/include -I$(VERILATOR_ROOT)/include/vltstd -c $(VERILATOR_ROOT)/include/$*.cpp -o $@

$(HW)/vectors.o $(HW)/main.o: $(HW)/%.o: build/packages-hw
	@mkdir -p $(@D)
	$(CXX) $(HW_FLAGS) $(DEPS) -c $(firstword $(wildcard hw/tests/$*.cpp tests/$*.cpp)) -o $@
define hw_test
$$(HW)/$1_test: hw/tests/$1_test.cpp $$(HW)/vectors.o $$(HW)/main.o $$(HW_RUNTIME) $(foreach model,$(hw_models_$1),$$(HW)/models/$(model)/V$(model)__ALL.a)
	$$(CXX) $$(HW_FLAGS) $$(DEPS) $(foreach model,$(hw_models_$1),-isystem $$(HW)/models/$(model)) $$(filter-out %.h,$$^) -o $$@
endef
$(foreach test,$(HW_TESTS),$(eval $(call hw_test,$(test))))

build/hw/vectors/cases.txt: hw/tests/make_vectors.py golden/data/ops.safetensors $(wildcard golden/*.py) $(VENV_READY)
	@$(PY) hw/tests/make_vectors.py $(@D)

// Where kernels for a matrix are chosen by its group size: docs/cpu-kernels.md.
#include "engine/cpu/quant_matmul.h"

#include "engine/cpu/instructions.h"
#include "engine/cpu/packed_matrix.h"
#ifdef INT8_ALONE  // for programs that have no other matrices (mk/build.mk)
#include "engine/cpu/quant_paths.h"
using Forms = Int8Forms;
#else
#include "engine/cpu/lowbit_paths.h"
using Forms = AllForms;
#endif

bool quant_matmul(const QuantRows& x, std::span<const QuantProduct> list, bool row_each) {
    return BuildIsas::with_best_isa(
        x.group_size, [&](auto isa) { multiply_by<decltype(isa), Forms>(x, list, choose_kernel, row_each); });
}

const char* int8_kernel_name(int group_size) {
    const char* name = "portable";
    BuildIsas::with_best_isa(group_size, [&](auto isa) { name = isa.name; });
    return name;
}

const PackedMatrix* PackedMatrices::add(const QuantMatrix& w) {
    const PackedMatrix* packed = nullptr;
    BuildIsas::with_best_isa(w.group_size, [&](auto isa) { packed = add<decltype(isa), Forms>(w); });
    return packed;
}

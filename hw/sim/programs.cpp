// runq and runq_w8a8 with every product, and every quantization of activations, in RTL: what
// engine/cpu/quant_matmul.cpp and int8_quantize have by the CPU's instructions. The programs' sources are
// compiled as they are; this file is linked in the place of the former, and hw/sim/in_rtl declares the
// latter. docs/rtl.md.
#include <map>
#include <mutex>
#include <vector>

#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matmul.h"
#include "hw/sim/pack_matrix.h"
#include "hw/sim/rtl_session.h"

namespace {

// The one core that there is. Threads take turns.
struct Shared {
    std::mutex mutex;
    RtlSession rtl;
    std::map<const uint8_t*, RtlMatrix> matrices;  // by the address of their codes

    const RtlMatrix& packed(const QuantMatrix& w) {
        auto at = matrices.find(w.codes);
        if (at == matrices.end()) at = matrices.emplace(w.codes, pack_matrix(rtl.core, w)).first;
        return at->second;
    }
};
Shared& shared() {
    static Shared s;
    return s;
}

}  // namespace

bool int8_quantize(int8_t* codes, float* scales, int32_t* sums, const float* x, int n, int group_size,
                   const float* fixed_scale) {
    Shared& s = shared();
    const std::lock_guard lock(s.mutex);
    if (!s.rtl.core.fits(n, group_size)) return false;
    s.rtl.quantize(codes, scales, x, 1, n, group_size, fixed_scale);
    sum_groups(sums, codes, n, group_size);
    return true;
}

// row_each is for experts, which no program here has.
bool quant_matmul(const QuantRows& x, std::span<const QuantProduct> list, bool row_each) {
    Shared& s = shared();
    const std::lock_guard lock(s.mutex);
    if (row_each || !s.rtl.core.fits(x.n_cols, x.group_size)) return false;
    std::vector<RtlProduct> products;
    for (const QuantProduct& p : list) products.push_back({p.out, &s.packed(p.w)});
    s.rtl.multiply(x.codes, x.scales, x.n_rows, x.n_cols, x.group_size, products);
    return true;
}

const char* int8_kernel_name(int group_size) {
    return shared().rtl.core.fits(group_size, group_size) ? "rtl" : "portable";
}

const PackedMatrix* PackedMatrices::add(const QuantMatrix&) { return nullptr; }

// Back end on what a SYCL 2020 compiler has a device for: GPUs of Intel and others, and by name the CPU.
//
// As in opencl.cpp, a work group takes a row and up to eight tokens. Each of its items expands a group of
// activations' columns to int8 and multiplies it by all tokens; in the end the items' sums are added up.
// Memory is SYCL's unified shared memory (USM), so an address is a device's pointer.
#include <sycl/sycl.hpp>

#include <algorithm>
#include <exception>
#include <limits>

#include "engine/backend/device.h"
#include "engine/backend/quant_gemm.h"

namespace {

// ----------------------------------------------------------------------------
// Kernels

constexpr int n_items = 32, tokens_at_once = 8;  // of a work group

// fp16 as fp32, exactly. sycl::half is only for devices that compute in it.
float widen(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
    if (rest >= 0x7c00u << 13) return sycl::bit_cast<float>(sign | rest | 0x7f800000u);  // infinity, NaN
    return sycl::bit_cast<float>(sign | rest) * 0x1p112f;  // the bias of exponents is 127 in place of 15
}

// Columns k .. k + 15 of row i, k a multiple of 16, as the int8 codes that are multiplied.
void expand(int8_t* to, const QuantGemmMatrix& w, size_t i, int k, int zero) {
    const int n_codes = w.kind == QUANT_GEMM_SPARSE ? w.n_cols / 2 : w.n_cols;
    const uint8_t* row = w.codes + i * size_t(n_codes / (8 / w.bits));
    const int low = (1 << w.bits) - 1, factor = w.kind == QUANT_GEMM_TWO_LEVEL ? 5 : 1;
    if (w.kind == QUANT_GEMM_SPARSE) {
        // Eight columns have four codes; where the mask has a 1, the next of them.
        const uint8_t* ones = w.mask + (i * size_t(w.n_cols) + size_t(k)) / 8;
        const Place at = place_of(k / 2, n_codes, w.bits);
        for (int j = 0, next = 0; j < 16; j++) {
            const int kept = ones[j / 8] >> j % 8 & 1;
            to[j] = int8_t(kept * ((row[at.byte + sycl::min(next, 7)] >> at.shift & low) - zero));
            next += kept;
        }
    } else if (w.bits == 8) {
        for (int j = 0; j < 16; j++) to[j] = int8_t(row[k + j]);
    } else {
        const Place at = place_of(k, n_codes, w.bits);
        for (int j = 0; j < 16; j++) to[j] = int8_t(factor * (row[at.byte + j] >> at.shift & low) - zero);
    }
}

// The zero point of group s of row i's scales, and its scale.
struct Grid {
    int zero;
    float scale;
};
Grid grid_of(const QuantGemmMatrix& w, size_t i, size_t s) {
    const size_t n = size_t(w.n_cols / w.group), at = i * n + s;
    const bool halves = w.scale_type == QUANT_GEMM_GROUP_FP16;
    const float scale =
        halves ? widen(static_cast<const uint16_t*>(w.scales)[at]) : static_cast<const float*>(w.scales)[i];
    if (w.kind == QUANT_GEMM_TWO_LEVEL) return {w.levels[at] >> 4, float(w.levels[at] & 15) * scale};
    if (w.bits == 8) return {0, scale};
    return {w.zeros[i * ((n + 1) / 2) + s / 2] >> s % 2 * 4 & 15, scale};
}

// out[t][i] = row i times token t, for this group's row and tokens.
void multiply_row(const sycl::nd_item<2>& item, const QuantGemmMatrix& w, const QuantGemmRows& x,
                  float* out) {
    const size_t i = item.get_group(1), n_groups = size_t(x.n_cols / x.group_size);
    const int t0 = int(item.get_group(0)) * tokens_at_once;
    const int n_tokens = sycl::min(tokens_at_once, x.n_rows - t0);
    float sums[tokens_at_once] = {};
    for (size_t g = item.get_local_id(1); g < n_groups; g += n_items) {
        const int first = int(g) * x.group_size;
        const Grid grid = grid_of(w, i, size_t(first / w.group));
        int32_t acc[tokens_at_once] = {};
        for (int k = first; k < first + x.group_size; k += 16) {
            int8_t codes[16];
            expand(codes, w, i, k, grid.zero);
            for (int t = 0; t < n_tokens; t++) {
                const int8_t* token = x.codes + size_t(t0 + t) * size_t(x.n_cols) + k;
                for (int j = 0; j < 16; j++) acc[t] += codes[j] * token[j];
            }
        }
        for (int t = 0; t < n_tokens; t++)
            sums[t] += float(acc[t]) * (grid.scale * x.scales[size_t(t0 + t) * n_groups + g]);
    }
    for (int t = 0; t < n_tokens; t++) {
        const float sum = sycl::reduce_over_group(item.get_group(), sums[t], sycl::plus<float>());
        if (item.get_local_id(1) == 0) out[size_t(t0 + t) * size_t(w.n_rows) + i] = sum;
    }
}

// Codes, scale and sum of group g.
void quantize_group(const QuantGemmRows& rows, const float* x, size_t g) {
    const size_t begin = g * size_t(rows.group_size), end = begin + size_t(rows.group_size);
    float amax = 0;
    for (size_t k = begin; k < end; k++) {
        const float magnitude = sycl::fabs(x[k]);
        amax = magnitude > amax ? magnitude : amax;  // NaN: keeps amax
    }
    const float ratio = 127.0f / amax;
    const bool usable = ratio > 0 && ratio <= std::numeric_limits<float>::max();
    const float inv = usable ? ratio : 0;
    int32_t sum = 0;
    for (size_t k = begin; k < end; k++) {
        const float r = sycl::rint(x[k] * inv);
        const float low = r > -127.0f ? r : -127.0f;  // NaN: -127
        const int code = int(low < 127.0f ? low : 127.0f);
        rows.codes[k] = int8_t(code);
        sum += code;
    }
    rows.scales[g] = usable ? amax / 127.0f : 0.0f;
    rows.sums[g] = sum;
}

// ----------------------------------------------------------------------------
// The functions of a back end

// A device has to divide as IEEE 754 says and to keep subnormals, so that scales are exact.
int32_t rank_of(const sycl::device& device) {
    using enum sycl::info::fp_config;
    const auto floats = device.get_info<sycl::info::device::single_fp_config>();
    const auto has = [&](auto what) { return std::find(floats.begin(), floats.end(), what) != floats.end(); };
    if (!has(denorm) || !has(correctly_rounded_divide_sqrt)) return 0;
    if (!device.has(sycl::aspect::usm_device_allocations)) return 0;
    return device.is_gpu() ? 105 : 1;  // a CPU has faster back ends
}

sycl::device best_device() { return best_of(sycl::device::get_devices(), rank_of, "SYCL"); }

void rethrow(const sycl::exception_list& errors) {
    for (const std::exception_ptr& e : errors) std::rethrow_exception(e);
}

struct Sycl {
    sycl::queue queue;

    static int32_t rank() { return rank_of(best_device()); }
    explicit Sycl(QuantGemmRunLoop) : queue(best_device(), rethrow, {sycl::property::queue::in_order()}) {}

    void* allocate(size_t n_bytes) {
        void* m = sycl::malloc_device(std::max(n_bytes, size_t(1)), queue);
        if (m == nullptr) throw DeviceError(QUANT_GEMM_NO_MEMORY, "the device has too little memory");
        return m;
    }
    // Freeing does not wait for kernels, which may still read it.
    void release(void* memory) {
        queue.wait();
        sycl::free(memory, queue);
    }
    void upload(void* to, const void* from, size_t n_bytes) {
        queue.memcpy(to, from, n_bytes);
        queue.wait_and_throw();
    }
    void download(void* to, const void* from, size_t n_bytes) { upload(to, from, n_bytes); }

    void quantize(const QuantGemmRows& rows, const float* x) {
        const size_t n = size_t(rows.n_rows) * size_t(rows.n_cols / rows.group_size);
        queue.parallel_for(sycl::range<1>(n), [to = rows, x](sycl::id<1> g) { quantize_group(to, x, g[0]); });
    }
    void multiply(const QuantGemmMatrix& w, const QuantGemmRows& x, float* out) {
        const sycl::range<2> local(1, n_items),
            global(size_t(x.n_rows + tokens_at_once - 1) / tokens_at_once, size_t(w.n_rows) * n_items);
        queue.parallel_for(sycl::nd_range<2>(global, local),
                           [w, x, out](sycl::nd_item<2> item) { multiply_row(item, w, x, out); });
    }
};

}  // namespace

const QuantGemmBackend* quant_gemm_backend() { return Context<Sycl>::functions("sycl"); }

// What back ends on a device with its own memory share: errors, which formats they multiply and how codes are
// laid out, the choice of a device, loading matrices into its memory, and the table of functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/backend/quant_gemm.h"

// ----------------------------------------------------------------------------
// Errors

inline thread_local char latest_error[256] = "no error";
inline const char* error_text() { return latest_error; }

// The first line of `why` is what error_text() says.
inline int32_t fail(QuantGemmStatus status, const char* why) {
    std::snprintf(latest_error, sizeof latest_error, "%.*s", int(std::strcspn(why, "\n")), why);
    return status;
}

// An error with another status than QUANT_GEMM_FAILED.
struct DeviceError : std::runtime_error {
    QuantGemmStatus status;
    DeviceError(QuantGemmStatus s, const std::string& why) : std::runtime_error(why), status(s) {}
};

// Calls f. Returns the status for what it throws.
template <class F>
int32_t guarded(F f) try {
    f();
    return QUANT_GEMM_OK;
} catch (const DeviceError& e) {
    return fail(e.status, e.what());
} catch (const std::bad_alloc&) {
    return fail(QUANT_GEMM_NO_MEMORY, "out of memory");
} catch (const std::exception& e) {
    return fail(QUANT_GEMM_FAILED, e.what());
}

// ----------------------------------------------------------------------------
// Matrices

// Scales of rows, or fp16 scales and zero points of groups.
inline int32_t accepts(void*, const QuantGemmMatrix* w) {
    const bool per_row = w->scale_type == QUANT_GEMM_ROW_FP32, has_zeros = w->bits < 8 && !w->levels;
    const char* why = nullptr;
    if (w->group_size != 32 && w->group_size != 64)
        why = "groups of activations have to be of 32 or 64";
    else if (w->scale_type == QUANT_GEMM_GROUP_FP32 || w->scale_type == QUANT_GEMM_GROUP_INT8)
        why = "scales of groups have to be fp16";
    else if (has_zeros && (per_row || w->zeros == nullptr))
        why = "each group has to have a scale and a zero point";
    return why == nullptr ? QUANT_GEMM_OK : fail(QUANT_GEMM_UNSUPPORTED, why);
}

#ifndef __device__
#define __device__  // what CUDA and HIP call a function that runs on the device
#endif

// Where a row of n codes has code k: the byte, and the lowest bit in it. In a block of B bytes, byte j holds
// codes j, j + B, j + 2B, ...; blocks have 64 bytes, what is left at the end has 32, then 16.
struct Place {
    int byte, shift;
};
__device__ inline Place place_of(int k, int n, int bits) {
    const int per_byte = 8 / bits, n_bytes = n / per_byte;
    int start = k / (64 * per_byte) * 64, block = 64;
    while (start + block > n_bytes || k >= (start + block) * per_byte) {
        if (start + block <= n_bytes) start += block;
        block /= 2;
    }
    k -= start * per_byte;
    return {start + k % block, k / block * bits};
}

// ----------------------------------------------------------------------------
// The functions of a back end

// The device of the highest rank; of equals, the first. Throws if none has one above 0.
template <class Device>
Device best_of(const std::vector<Device>& devices, int32_t (*rank_of)(const Device&), const char* kind) {
    const auto best = std::max_element(devices.begin(), devices.end(), [&](const Device& a, const Device& b) {
        return rank_of(a) < rank_of(b);
    });
    if (best != devices.end() && rank_of(*best) > 0) return *best;
    throw DeviceError(QUANT_GEMM_NO_DEVICE,
                      std::string("there is no ") + kind + " device whose arithmetic is IEEE 754's");
}

// An open Device with its memory, and the table of its functions. A device's rank(), allocate(n_bytes),
// release(address), upload(to, from, n_bytes), download(to, from, n_bytes), quantize(rows, x) and
// multiply(w, x, out), of one product, are as in QuantGemmBackend, but throw where they fail.
template <class Device>
struct Context : Device {
    std::set<void*> memory;                // allocated
    std::deque<QuantGemmMatrix> matrices;  // loaded, with the addresses of their tables' copies

    explicit Context(QuantGemmRunLoop loop) : Device(loop) {}
    ~Context() {
        for (void* m : memory) guarded([&] { Device::release(m); });
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    void allocate(void** m, size_t n_bytes) { *m = *memory.insert(Device::allocate(n_bytes)).first; }
    void release(void* m) {
        memory.erase(m);
        Device::release(m);
    }
    // accepts() has refused other scales.
    void load(const QuantGemmMatrix* w, int32_t, void** matrix) {
        QuantGemmMatrix& m = matrices.emplace_back(*w);
        const auto copy = [&](auto& address, size_t n_bytes) {
            if (address == nullptr) return;
            void* to = nullptr;
            allocate(&to, n_bytes);
            Device::upload(to, address, n_bytes);
            address = static_cast<std::remove_reference_t<decltype(address)>>(to);
        };
        const size_t n_rows = size_t(m.n_rows), groups = size_t(m.n_cols / m.group);
        const size_t n_codes = size_t(m.kind == QUANT_GEMM_SPARSE ? m.n_cols / 2 : m.n_cols);
        const size_t scale_bytes =
            m.scale_type == QUANT_GEMM_GROUP_FP16 ? groups * sizeof(uint16_t) : sizeof(float);
        copy(m.codes, n_rows * n_codes * size_t(m.bits) / 8);
        copy(m.scales, n_rows * scale_bytes);
        copy(m.mask, n_rows * size_t(m.n_cols) / 8);
        copy(m.zeros, n_rows * ((groups + 1) / 2));
        copy(m.levels, n_rows * groups);
        *matrix = &m;
    }
    void upload(void* to, const void* from, size_t n_bytes) { Device::upload(to, from, n_bytes); }
    void download(void* to, const void* from, size_t n_bytes) { Device::download(to, from, n_bytes); }
    void quantize(const QuantGemmRows* rows, const float* x) { Device::quantize(*rows, x); }
    void multiply(const QuantGemmRows* x, const QuantGemmProduct* products, int32_t n) {
        for (const QuantGemmProduct* p = products; p < products + n; p++)
            Device::multiply(*static_cast<const QuantGemmMatrix*>(p->matrix), *x, p->out);
    }

    // A function of the table that calls a member of the context.
    template <auto member, class... Arguments>
    static int32_t call(void* context, Arguments... arguments) {
        return guarded([&] { (static_cast<Context*>(context)->*member)(arguments...); });
    }
    static const QuantGemmBackend* functions(const char* name) {
        static QuantGemmBackend f{};  // the same from every call
        f.version = QUANT_GEMM_VERSION;
        f.name = name;
        f.rank = [] {
            int32_t rank = 0;
            guarded([&] { rank = Device::rank(); });
            return rank;
        };
        f.open = [](void** context, QuantGemmRunLoop loop) {
            return guarded([&] { *context = new Context(loop); });
        };
        f.close = [](void* context) { delete static_cast<Context*>(context); };
        f.accepts = accepts;
        f.load = call<&Context::load>;
        f.allocate = call<&Context::allocate>;
        f.release = [](void* context, void* m) { call<&Context::release>(context, m); };
        f.upload = call<&Context::upload>;
        f.download = call<&Context::download>;
        f.quantize = call<&Context::quantize>;
        f.multiply = call<&Context::multiply>;
        f.error_text = error_text;
        return &f;
    }
};

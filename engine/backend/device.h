// What back ends on a device with its own memory share: errors, which formats they multiply and how codes are
// laid out, loading matrices into its memory, and the table of functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
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

// An open Device, loaded matrices, and the table of its functions. A device's rank(), allocate(n_bytes),
// upload(to, from, n_bytes), download(to, from, n_bytes) and multiply(w, x, out), of one product in its own
// memory, throw where they fail; release(address) does not.
template <class Device>
struct Context : Device {
    struct Release {
        Device* device = nullptr;
        void operator()(void* memory) const { device->release(memory); }
    };
    // Memory of the device.
    struct Room {
        std::unique_ptr<void, Release> address;
        size_t n_bytes = 0;
    };
    std::vector<Room> tables;              // of matrices
    std::deque<QuantGemmMatrix> matrices;  // loaded, with the addresses of their tables
    Room codes, scales;                    // of activations
    std::vector<Room> outputs;             // of each product

    explicit Context(QuantGemmRunLoop loop) : Device(loop) {}

    // The address of n values in a room, which grows if needed.
    template <class T>
    T* place(Room& room, size_t n) {
        if (const size_t n_bytes = n * sizeof(T); n_bytes > room.n_bytes)
            room = {{Device::allocate(n_bytes), {this}}, n_bytes};
        return static_cast<T*>(room.address.get());
    }
    template <class T>
    T* copy(Room& room, const T* from, size_t n) {
        T* to = place<T>(room, n);
        Device::upload(to, from, n * sizeof(T));
        return to;
    }

    // accepts() has refused other scales.
    void load(const QuantGemmMatrix* w, int32_t, void** matrix) {
        QuantGemmMatrix m = *w;
        const auto copied = [&](auto* from, size_t n_bytes) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(from);
            return bytes == nullptr ? nullptr : copy(tables.emplace_back(), bytes, n_bytes);
        };
        const size_t n_rows = size_t(m.n_rows), groups = size_t(m.n_cols / m.group);
        const size_t n_codes = size_t(m.kind == QUANT_GEMM_SPARSE ? m.n_cols / 2 : m.n_cols);
        const size_t scale_bytes =
            m.scale_type == QUANT_GEMM_GROUP_FP16 ? groups * sizeof(uint16_t) : sizeof(float);
        m.codes = copied(m.codes, n_rows * n_codes * size_t(m.bits) / 8);
        m.scales = copied(m.scales, n_rows * scale_bytes);
        m.mask = copied(m.mask, n_rows * size_t(m.n_cols) / 8);
        m.zeros = copied(m.zeros, n_rows * ((groups + 1) / 2));
        m.levels = copied(m.levels, n_rows * groups);
        *matrix = &matrices.emplace_back(m);
    }
    void multiply(const QuantGemmRows* rows, const QuantGemmProduct* products, int32_t n) {
        const size_t n_rows = size_t(rows->n_rows), n_groups = size_t(rows->n_cols / rows->group_size);
        QuantGemmRows x = *rows;  // without `sums`, which no kernel of a device reads
        x.codes = copy(codes, rows->codes, n_rows * size_t(rows->n_cols));
        x.scales = copy(scales, rows->scales, n_rows * n_groups);
        std::vector<float*> at;
        for (const QuantGemmProduct* p = products; p < products + n; p++) {
            const auto& w = *static_cast<const QuantGemmMatrix*>(p->matrix);
            if (at.size() == outputs.size()) outputs.emplace_back();
            at.push_back(place<float>(outputs[at.size()], n_rows * size_t(w.n_rows)));
            Device::multiply(w, x, at.back());
        }
        for (size_t i = 0; i < at.size(); i++) {
            const auto& w = *static_cast<const QuantGemmMatrix*>(products[i].matrix);
            Device::download(products[i].out, at[i], n_rows * size_t(w.n_rows) * sizeof(float));
        }
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
        f.multiply = call<&Context::multiply>;
        f.error_text = error_text;
        return &f;
    }
};

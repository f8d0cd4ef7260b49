// Back end on anything that has OpenCL 1.2: GPUs of Intel and others, and by name the CPU.
//
// A work group takes a row and up to eight tokens. Each of its items expands a group of activations' columns
// to int8 and multiplies it by all tokens; then an item for each token adds these groups' sums, first to
// last. Written to be short: no local memory holds codes, and no vendor's instructions are used.
#define CL_HPP_MINIMUM_OPENCL_VERSION 120
#define CL_HPP_TARGET_OPENCL_VERSION 120
#include <CL/opencl.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/backend/device.h"
#include "engine/backend/quant_gemm.h"

namespace {

constexpr size_t items = 32, tokens_at_once = 8;  // of a work group; as in the kernels

const char* const kernels = R"(
#define ITEMS 32
#define TOKENS 8

// Where a row of n codes has code k: the byte, and the lowest bit in it. See docs/model-files.md.
int2 place_of(int k, int n, int bits) {
    const int per_byte = 8 / bits, n_bytes = n / per_byte;
    int start = k / (64 * per_byte) * 64, block = 64;
    while (start + block > n_bytes || k >= (start + block) * per_byte) {
        if (start + block <= n_bytes) start += block;
        block /= 2;
    }
    k -= start * per_byte;
    return (int2)(start + k % block, k / block * bits);
}

// out[t][i] = row i times token t. bits, sparse, two_level: the format. The addresses are quant_gemm.h's.
__kernel void multiply(__global const uchar* codes, __global const uchar* mask, __global const half* scales,
                       __global const uchar* zeros, __global const uchar* levels, int bits, int sparse, int two_level, int halves,
                       int n_rows, int n_cols, int group, int group_size, __global const char* x,
                       __global const float* x_scales, int n_tokens, __global float* out) {
    const int i = get_group_id(0), item = get_local_id(0), t0 = get_group_id(1) * TOKENS;
    const int n = min(TOKENS, n_tokens - t0), n_groups = n_cols / group_size, n_scales = n_cols / group;
    const int n_codes = sparse ? n_cols / 2 : n_cols;
    __global const uchar* row = codes + (ulong)i * (n_codes * bits / 8);
    const uchar low = (uchar)((1 << bits) - 1);
    __local float2 groups[ITEMS][TOKENS];  // a group's sum, and the product of its scales
    float sum = 0;                         // of the token that is the item's number
    for (int first = 0; first < n_groups; first += ITEMS) {
        const int g = first + item, here = min(ITEMS, n_groups - first);
        if (item < here) {
            const int s = g * group_size / group;
            const ulong at = (ulong)i * n_scales + s;
            uchar zero = 0;
            float scale;
            if (two_level) {
                zero = levels[at] >> 4;
                scale = (float)(levels[at] & 15) * ((__global const float*)scales)[i];
            } else {
                if (bits < 8) zero = zeros[(ulong)i * ((n_scales + 1) / 2) + s / 2] >> s % 2 * 4 & 15;
                scale = halves ? vload_half(at, scales) : ((__global const float*)scales)[i];
            }
            int acc[TOKENS];
            for (int t = 0; t < TOKENS; t++) acc[t] = 0;
            for (int k = g * group_size; k < (g + 1) * group_size; k += 16) {
                char16 w;
                if (sparse) {
                    const int2 p = place_of(k / 2, n_codes, bits);
                    char expanded[16];
                    for (int j = 0, next = 0; j < 16; j++) {
                        if (j == 8) next = 4;
                        const int kept = mask[(ulong)i * (n_cols / 8) + (k + j) / 8] >> j % 8 & 1;
                        expanded[j] = kept ? (char)((row[p.x + min(next++, 7)] >> p.y & low) - zero) : (char)0;
                    }
                    w = vload16(0, expanded);
                } else if (bits == 8) {
                    w = as_char16(vload16(0, row + k));
                } else {
                    const int2 p = place_of(k, n_codes, bits);
                    const uchar16 v = vload16(0, row + p.x) >> (uchar16)(uchar)p.y & (uchar16)low;
                    w = as_char16(v * (uchar16)(two_level ? 5 : 1) - (uchar16)zero);
                }
                for (int t = 0; t < n; t++) {
                    const char16 v = vload16(0, x + (ulong)(t0 + t) * n_cols + k);
                    const int16 p = convert_int16(convert_short16(w) * convert_short16(v));
                    const int8 a = p.lo + p.hi;
                    const int4 b = a.lo + a.hi;
                    acc[t] += b.x + b.y + b.z + b.w;
                }
            }
            for (int t = 0; t < n; t++)
                groups[item][t] = (float2)(acc[t], scale * x_scales[(ulong)(t0 + t) * n_groups + g]);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int j = 0; item < n && j < here; j++) sum = fma(groups[j][item].x, groups[j][item].y, sum);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (item < n) out[(ulong)(t0 + item) * n_rows + i] = sum;
}
)";

void check(cl_int error) {
    if (error == CL_SUCCESS) return;
    const bool memory = error == CL_MEM_OBJECT_ALLOCATION_FAILURE || error == CL_OUT_OF_RESOURCES ||
                        error == CL_OUT_OF_HOST_MEMORY || error == CL_INVALID_BUFFER_SIZE;
    throw DeviceError(memory ? QUANT_GEMM_NO_MEMORY : QUANT_GEMM_FAILED,
                      "OpenCL error " + std::to_string(error));
}

// A device has to keep subnormals: products of scales may be as small.
int32_t rank_of(const cl::Device& device) {
    if ((device.getInfo<CL_DEVICE_SINGLE_FP_CONFIG>() & CL_FP_DENORM) == 0) return 0;
    const bool is_gpu = (device.getInfo<CL_DEVICE_TYPE>() & CL_DEVICE_TYPE_GPU) != 0;
    return is_gpu ? 100 : 1;  // a CPU has faster back ends
}

// The device of the highest rank; of equals, the first.
cl::Device best_device() {
    std::vector<cl::Platform> platforms;
    std::vector<cl::Device> devices;
    cl::Device best;
    int32_t best_rank = 0;
    cl::Platform::get(&platforms);
    for (const cl::Platform& platform : platforms) {
        if (platform.getDevices(CL_DEVICE_TYPE_ALL, &devices) != CL_SUCCESS) continue;
        for (const cl::Device& device : devices)
            if (const int32_t rank = rank_of(device); rank > best_rank) best = device, best_rank = rank;
    }
    if (best_rank > 0) return best;
    throw DeviceError(QUANT_GEMM_NO_DEVICE, "there is no OpenCL device that keeps subnormals");
}

// Addresses are cl_mem.
struct OpenCl {
    cl::Context context;
    cl::CommandQueue queue;
    cl::Kernel multiply_kernel;

    static int32_t rank() { return rank_of(best_device()); }
    explicit OpenCl(QuantGemmRunLoop) {
        const cl::Device device = best_device();
        cl_int e = CL_SUCCESS;
        const auto made = [&e](auto object) { return check(e), object; };
        context = made(cl::Context(device, nullptr, nullptr, nullptr, &e));
        queue = made(cl::CommandQueue(context, device, 0, &e));
        cl::Program program = made(cl::Program(context, kernels, false, &e));
        if (program.build({device}) != CL_SUCCESS)
            throw std::runtime_error("the kernels do not compile: " +
                                     program.getBuildInfo<CL_PROGRAM_BUILD_LOG>(device));
        multiply_kernel = made(cl::Kernel(program, "multiply", &e));
    }

    void* allocate(size_t n_bytes) {
        cl_int e = CL_SUCCESS;
        cl_mem m = clCreateBuffer(context(), CL_MEM_READ_WRITE, n_bytes, nullptr, &e);
        check(e);
        return m;
    }
    void release(void* memory) { clReleaseMemObject(static_cast<cl_mem>(memory)); }
    void upload(void* to, const void* from, size_t n_bytes) {
        check(clEnqueueWriteBuffer(queue(), static_cast<cl_mem>(to), CL_TRUE, 0, n_bytes, from, 0, nullptr,
                                   nullptr));
    }
    void download(void* to, void* from, size_t n_bytes) {
        check(clEnqueueReadBuffer(queue(), static_cast<cl_mem>(from), CL_TRUE, 0, n_bytes, to, 0, nullptr,
                                  nullptr));
    }
    void multiply(const QuantGemmMatrix& w, const QuantGemmRows& x, float* out) {
        const int sparse = w.kind == QUANT_GEMM_SPARSE, two_level = w.kind == QUANT_GEMM_TWO_LEVEL,
                  halves = w.scale_type == QUANT_GEMM_GROUP_FP16;
        const size_t token_groups = (size_t(x.n_rows) + tokens_at_once - 1) / tokens_at_once;
        cl_uint i = 0;
        const auto set = [&](const auto&... arguments) {  // addresses, each a cl_mem or null, and ints
            (check(multiply_kernel.setArg(i++, sizeof arguments, &arguments)), ...);
        };
        set(w.codes, w.mask, w.scales, w.zeros, w.levels, w.bits, sparse, two_level, halves, w.n_rows,
            w.n_cols, w.group, x.group_size, x.codes, x.scales, x.n_rows, out);
        check(queue.enqueueNDRangeKernel(multiply_kernel, cl::NullRange,
                                         {size_t(w.n_rows) * items, token_groups}, {items, 1}));
    }
};

}  // namespace

const QuantGemmBackend* quant_gemm_backend() { return Context<OpenCl>::functions("opencl"); }

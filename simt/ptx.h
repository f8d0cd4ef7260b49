// The PTX instructions that CUDA has no function for. On a GPU each is a line of assembly; elsewhere it is
// what the manual says it does (PTX ISA, https://docs.nvidia.com/cuda/parallel-thread-execution).
#pragma once

#include <cstdint>

#include "cuda.h"

#ifdef __CUDACC__

// Bitwise function of three words: bit 4 a + 2 b + c of `lut` is its value for the bits a, b, c.
template <unsigned lut>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(lut));
    return d;
}

// Four of the eight bytes of a (0 to 3) and b (4 to 7): each nibble of the selector chooses one. A nibble of
// 8 or more gives eight copies of the chosen byte's sign bit.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// 2^x, within 2 units of the last place; 0 if that is less than 2^-126.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Loads four 8x8 matrices of 16-bit numbers from shared memory. Lane 8 i + j passes the address of row j of
// matrix i, 16 bytes, and gets elements 2 (lane % 4) and the next of row lane / 4 of matrix i in r[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// Loads matrices as ldmatrix_x4 does, each transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c (16 x 8, fp32) += a (16 x 16, fp16) * b (16 x 8, fp16), each spread over the warp.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c (16 x 8, int32) += a (16 x 32, int8) * b (32 x 8, int8), each spread over the warp.
__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Begins to copy 4, 8 or 16 bytes into shared memory; zeros, reading nothing, if not valid.
template <int bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid) {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16);
    if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                     "l"(global), "r"(valid ? 16 : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                     "l"(global), "n"(bytes), "r"(valid ? bytes : 0)
                     : "memory");
    }
}
// Closes a group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the n latest groups of this thread.
template <int n>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}
// Adds 1 to *count and returns what it was. What this thread's block wrote before a barrier is visible to
// whoever sees the new count; what others wrote before they counted is visible to this thread from here on,
// and to its block after a barrier (PTX ISA, Memory Consistency Model: release and acquire).
__device__ __forceinline__ unsigned count_arrival(unsigned* count) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}
// Lets the next kernel start if its launch is early, then waits until the kernels before this one have
// finished and their results are visible. In front of it a kernel may read what no kernel writes, and no
// more.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

#else

template <unsigned lut>
uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    static_assert(lut < 256);
    uint32_t d = 0;
    for (unsigned i = 0; i < 8; i++) {
        if (lut >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
    return d;
}

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = selector >> (4 * i) & 15;
        const uint32_t byte = uint32_t(bytes >> (8 * (pick & 7))) & 0xff;
        d |= (pick & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << (8 * i);
    }
    return d;
}

inline float exp2_approx(float x) { return x < -126 ? 0.0f : exp2f(x); }

namespace simt {

inline void ldmatrix(uint32_t (&r)[4], const void* row, bool transposed) {
    const Emulating emulating;
    Block& b = block();
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
        b.fail("ldmatrix from an address that is no multiple of 16");
    if (!b.is_shared(row, 16)) b.fail("ldmatrix from outside shared memory");
    if (checks != nullptr) checks->access(b, row, 16, Access::read);
    struct {
        const uint16_t* row;
        uint32_t (&r)[4];
    } mine{static_cast<const uint16_t*>(row), r};
    b.sync_whole_warp(transposed ? At::ldmatrix_trans : At::ldmatrix, mine, [&](auto* const* lanes) {
        for (int lane = 0; lane < warp_size; lane++) {
            const int i = lane / 4, j = lane % 4 * 2;
            for (int m = 0; m < 4; m++) {
                const auto at = [&](int y, int x) -> uint32_t { return lanes[8 * m + y]->row[x]; };
                lanes[lane]->r[m] =
                    transposed ? at(j, i) | at(j + 1, i) << 16 : at(i, j) | at(i, j + 1) << 16;
            }
        }
    });
}

inline void cp_async(void* shared, const void* global, size_t bytes, bool valid) {
    const Emulating emulating;
    Block& b = block();
    const auto misaligned = [=](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes != 0; };
    if (misaligned(shared) || (valid && misaligned(global)))
        b.fail("cp.async of " + std::to_string(bytes) + " bytes " + (misaligned(shared) ? "to" : "from") +
               " an address that is no multiple of that");
    if (!b.is_shared(shared, bytes)) b.fail("cp.async to outside shared memory");
    if (valid && checks != nullptr) checks->access(b, global, bytes, Access::read);
    if (valid && b.allocation(global, bytes) == nullptr) b.fail("cp.async from outside all allocations");
    if (checks != nullptr) checks->copy_begins(b, shared, bytes);
    Lane& lane = b.running();
    lane.copies.push_back(
        {static_cast<char*>(shared), valid ? static_cast<const char*>(global) : nullptr, bytes, lane.groups});
}

// Copies are carried out as late as allowed: when a thread waits for them.
inline void cp_async_wait(int n) {
    const Emulating emulating;
    Block& b = block();
    Lane& lane = b.running();
    std::erase_if(lane.copies, [&](const Copy& copy) {
        if (copy.group >= lane.groups - n) return false;
        if (checks != nullptr) checks->copy_lands(b, copy.to, copy.bytes);
        if (copy.from != nullptr) {
            std::memcpy(copy.to, copy.from, copy.bytes);
        } else {
            std::memset(copy.to, 0, copy.bytes);
        }
        return true;
    });
}

}  // namespace simt

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { simt::ldmatrix(r, row, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { simt::ldmatrix(r, row, true); }

// The fragments are those of "Matrix Fragments for mma.m16n8k16 with floating point type". With g = lane / 4
// and t = lane % 4, a[0] holds row g, columns 2 t and 2 t + 1 of A; a[1] the same of row g + 8; a[2] and a[3]
// columns 2 t + 8 and on of the same rows. b[0] holds rows 2 t and 2 t + 1 of B, column g; b[1] rows 2 t + 8
// and on. c[0] and c[1] hold row g, columns 2 t and 2 t + 1 of C; c[2] and c[3] the same of row g + 8.
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    struct {
        float (&c)[4];
        const uint32_t (&a)[4], (&b)[2];
    } mine{c, a, b};
    simt::block().sync_whole_warp(simt::At::mma, mine, [](auto* const* lanes) {
        float A[16][16], B[16][8], C[16][8];
        const auto low = [](uint32_t w) { return simt::half_to_float(uint16_t(w)); };
        const auto high = [](uint32_t w) { return simt::half_to_float(uint16_t(w >> 16)); };
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) {
                const int row = g + i % 2 * 8, col = 2 * t + i / 2 * 8;
                A[row][col] = low(lanes[lane]->a[i]);
                A[row][col + 1] = high(lanes[lane]->a[i]);
                C[g + i / 2 * 8][2 * t + i % 2] = lanes[lane]->c[i];
            }
            for (int i = 0; i < 2; i++) {
                B[2 * t + 8 * i][g] = low(lanes[lane]->b[i]);
                B[2 * t + 8 * i + 1][g] = high(lanes[lane]->b[i]);
            }
        }
        for (int row = 0; row < 16; row++) {
            float sums[8];
            for (int col = 0; col < 8; col++) sums[col] = C[row][col];
            for (int k = 0; k < 16; k++) {
                for (int col = 0; col < 8; col++) sums[col] += A[row][k] * B[k][col];
            }
            for (int col = 0; col < 8; col++) C[row][col] = sums[col];
        }
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) lanes[lane]->c[i] = C[g + i / 2 * 8][2 * t + i % 2];
        }
    });
}

// The fragments are those of "Matrix Fragments for mma.m16n8k32". With g = lane / 4 and t = lane % 4, a[0]
// holds row g, columns 4 t to 4 t + 3 of A; a[1] the same of row g + 8; a[2] and a[3] columns 4 t + 16 and on
// of the same rows. b[0] holds rows 4 t to 4 t + 3 of B, column g; b[1] rows 4 t + 16 and on. c as for
// m16n8k16.
inline void mma_m16n8k32(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    struct {
        int (&c)[4];
        const uint32_t (&a)[4], (&b)[2];
    } mine{c, a, b};
    simt::block().sync_whole_warp(simt::At::mma, mine, [](auto* const* lanes) {
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + i / 2 * 8, col = 2 * (lane % 4) + i % 2;
                for (int t = 0; t < 4; t++) {  // the lanes that hold the row's and the column's 32 numbers
                    const auto &from = *lanes[row % 8 * 4 + t], &to = *lanes[col * 4 + t];
                    int& sum = lanes[lane]->c[i];
                    sum = __dp4a(int(from.a[row / 8]), int(to.b[0]), sum);
                    sum = __dp4a(int(from.a[row / 8 + 2]), int(to.b[1]), sum);
                }
            }
        }
    });
}

template <int bytes>
void cp_async(void* shared, const void* global, bool valid) {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16);
    simt::cp_async(shared, global, bytes, valid);
}
inline void cp_async_commit() {
    const simt::Emulating emulating;
    simt::block().running().groups++;
}
template <int n>
void cp_async_wait() {
    simt::cp_async_wait(n);
}
inline unsigned count_arrival(unsigned* count) {
    __threadfence();
    return atomicAdd(count, 1u);
}
inline void wait_for_previous() {}

#endif

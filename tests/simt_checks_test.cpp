// What the emulator's checked build notices: kernels with a mistake each, and kernels without. This file has
// to be compiled with -fsanitize=thread,alignment,bounds, and linked, without that, with simt/checks.cpp: see
// there.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "engine/os/threads.h"
#include "simt/cuda.h"
#include "simt/ptx.h"

namespace simt_checks {

[[maybe_unused]] const bool has_threads = (simt::run_loop = run_loop) != nullptr;

template <class T>
struct Device {
    explicit Device(size_t n, bool filled = true) {
        REQUIRE(cudaMalloc(&p, n * sizeof(T)) == cudaSuccess);
        if (filled) REQUIRE(cudaMemset(p, 0, n * sizeof(T)) == cudaSuccess);
    }
    ~Device() { cudaFree(p); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    T* p = nullptr;
};

// What a launch throws, less "simt: simt_checks::" in front.
template <auto kernel, class... Args>
std::string error_of(const Launch& how, Args... args) {
    try {
        launch<kernel>(how, args...);
    } catch (const std::runtime_error& error) {
        const std::string message = error.what(), front = "simt: simt_checks::";
        CHECK(message.starts_with(front));
        return message.substr(front.size());
    }
    return "no error";
}

void expect(const std::string& error, const std::string& part) {
    CAPTURE(part);
    CAPTURE(error);
    CHECK(error.find(part) != error.npos);
}

// ----------------------------------------------------------------------------
// No mistake, no complaint

struct Table {
    float scale[4];
    const float* bias;
};
__constant__ const int offsets[4] = {3, 1, 2, 0};
__device__ int n_calls = 0;

// A product of matrices of 16 x 16 k-steps, through two buffers that cp.async fills in turn.
__global__ void __launch_bounds__(64) pipeline(const half* a, float* out, int n_steps, Table table) {
    half* buffers = dynamic_shared<half>();  // [2][16][16]
    __shared__ float sums[2][32][4];
    __shared__ half2 last[64];
    const int t = threadIdx.x, lane = t % 32;
    const auto fetch = [&](int step) {
        if (t < 32) cp_async<16>(buffers + step % 2 * 256 + t * 8, a + step * 256 + t * 8, step < n_steps);
        cp_async_commit();
    };
    float c[4] = {};
    fetch(0);
    for (int step = 0; step < n_steps; step++) {
        fetch(step + 1);
        cp_async_wait<1>();
        __syncthreads();
        uint32_t x[4];
        ldmatrix_x4(x, buffers + step % 2 * 256 + lane % 16 * 16 + lane / 16 * 8);
        const uint32_t y[2] = {x[0], x[2]};
        mma_m16n8k16(c, x, y);
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) sums[t / 32][lane][i] = c[i] * table.scale[i];
    __syncwarp();
    const int from = lane / 4 * 4 + offsets[lane % 4];
    float4 mine = {sums[t / 32][from][0], sums[t / 32][from][1], sums[t / 32][from][2],
                   sums[t / 32][from][3]};
    mine.x += table.bias[lane];
    reinterpret_cast<float4*>(out)[blockIdx.x * 64 + t] = mine;
    last[t] = __float2half2_rn(mine.x);
    __syncthreads();
    if (t == 0) atomicAdd(&n_calls, 1 + int(__low2float(last[63])));
}

__global__ void histogram(const int* values, unsigned* counts, unsigned* n_blocks, unsigned* total) {
    __shared__ unsigned bins[8];
    __shared__ bool is_last;
    const int t = threadIdx.x;
    if (t < 8) bins[t] = 0;
    __syncthreads();
    atomicAdd(&bins[values[blockIdx.x * 64 + t] % 8], 1u);
    __syncthreads();
    if (t < 8) {
        atomicAdd(counts + t, bins[t]);
        total[blockIdx.x * 8 + t] = bins[t];
    }
    // The block that comes last reads what the others wrote: ordered by fences and the counter.
    __threadfence();
    __syncthreads();
    if (t == 0) is_last = atomicAdd(n_blocks, 1u) == gridDim.x - 1;
    __syncthreads();
    if (is_last && t < 8) {
        for (unsigned i = 1; i < gridDim.x; i++) total[t] += total[i * 8 + t];
    }
}

__global__ void local_arrays(int* out, int n) {
    int local[16];
    uint4 wide[2] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    for (int i = 0; i < n; i++) local[i] = i;
    std::memcpy(local, wide, sizeof(wide));
    int sum = 0;
    for (int i = 0; i < n; i++) sum += local[i];
    out[threadIdx.x] = __shfl_xor_sync(~0u, sum, 1);
}

TEST_CASE("kernels without mistakes") {
    REQUIRE(simt::checks != nullptr);
    const Device<half> a(5 * 256);
    const Device<float> out(3 * 64 * 4, false), bias(32);
    const Table table = {{1, 2, 3, 4}, bias.p};
    CHECK(error_of<pipeline>({.grid = 3, .block = 64, .shared_bytes = 1024}, a.p, out.p, 5, table) ==
          "no error");
    CHECK(n_calls == 3);
    const Device<int> values(5 * 64), sums(32);
    const Device<unsigned> counts(8), n_blocks(1), total(5 * 8);
    CHECK(error_of<histogram>({.grid = 5, .block = 64}, values.p, counts.p, n_blocks.p, total.p) ==
          "no error");
    unsigned zeros = 0;
    cudaMemcpy(&zeros, total.p, sizeof(zeros), cudaMemcpyDeviceToHost);
    CHECK(zeros == 5 * 64);
    CHECK(error_of<local_arrays>({.grid = 1, .block = 32}, sums.p, 16) == "no error");
}

// ----------------------------------------------------------------------------
// Races in shared memory

enum class Barrier { none, warp, block };
template <Barrier kind>
void barrier() {
    if (kind == Barrier::warp) __syncwarp();
    if (kind == Barrier::block) __syncthreads();
}

// Thread t writes, reads what thread t ^ distance wrote, and writes again.
template <Barrier before, Barrier after, int distance>
__global__ void exchange(int* out) {
    int* shared = dynamic_shared<int>();
    const int t = threadIdx.x;
    shared[t] = t;
    barrier<before>();
    out[t] = shared[t ^ distance];
    barrier<after>();
    shared[t] = 0;
}
__global__ void overwrites(int* out) {
    int* shared = dynamic_shared<int>();
    const int t = threadIdx.x;
    shared[t] = t;
    __syncthreads();
    if (t == 5 || t == 6 || t == 40) out[t] = shared[1];
    if (t == 41) shared[1] = 7;
}
__global__ void shuffle_is_no_barrier(int* out) {
    __shared__ int shared[32];
    shared[threadIdx.x] = 1;
    const int x = __shfl_xor_sync(~0u, 1, 1);
    out[threadIdx.x] = x + shared[threadIdx.x ^ 1];
}
__global__ void same_value(int*) { dynamic_shared<int>()[0] = 1; }
__global__ void plain_and_atomic(int*) {
    int* sum = dynamic_shared<int>();
    if (threadIdx.x == 0) *sum = 0;
    atomicAdd(sum, 1);
}

TEST_CASE("threads that use the same shared memory without a barrier") {
    const Device<int> out(128);
    const Launch how = {.grid = 1, .block = 64, .shared_bytes = 256};
    using enum Barrier;
    CHECK(error_of<exchange<block, block, 33>>(how, out.p) == "no error");
    CHECK(error_of<exchange<block, block, 1>>(how, out.p) == "no error");
    CHECK(error_of<exchange<warp, warp, 1>>(how, out.p) == "no error");
    // The last thread to come to a barrier goes on first, then the others in order.
    CHECK(
        error_of<exchange<block, none, 1>>(how, out.p) ==
        "exchange<(simt_checks::Barrier)2, (simt_checks::Barrier)0, 1>, block (0,0,0), thread 1: race: reads "
        "byte 0 of dynamic shared memory, which thread 0 wrote; is a barrier missing?");
    expect(error_of<exchange<block, warp, 32>>(how, out.p),
           "thread 31: race: writes byte 124 of dynamic shared memory, which thread 63 read; is a barrier "
           "missing?");
    expect(error_of<exchange<none, block, 1>>(how, out.p),
           "thread 0: reads byte 4 of dynamic shared memory, which nobody has written");
    expect(error_of<exchange<warp, block, 32>>(how, out.p),
           "thread 31: reads byte 252 of dynamic shared memory, which nobody has written");
    CHECK(error_of<overwrites>(how, out.p) ==
          "overwrites, block (0,0,0), thread 41: race: writes byte 4 of dynamic shared memory, which thread "
          "40 read; is "
          "a barrier missing?");
    CHECK(error_of<shuffle_is_no_barrier>(how, out.p) ==
          "shuffle_is_no_barrier, block (0,0,0), thread 31: race: reads byte 120 of "
          "simt_checks::shuffle_is_no_barrier(int*)::shared, which thread 30 wrote; is a barrier missing?");
    CHECK(error_of<same_value>(how, out.p) ==
          "same_value, block (0,0,0), thread 1: race: writes byte 0 of dynamic shared memory, which thread 0 "
          "wrote; is "
          "a barrier missing?");
    CHECK(error_of<plain_and_atomic>(how, out.p) ==
          "plain_and_atomic, block (0,0,0), thread 1: race: atomically adds to byte 0 of dynamic shared "
          "memory, which "
          "thread 0 wrote; is a barrier missing?");
}

// ----------------------------------------------------------------------------
// Memory that nobody wrote

__global__ void reads_unwritten(int* out, int from) {
    int* shared = dynamic_shared<int>();
    if (threadIdx.x < 16) shared[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = shared[from];
}
__global__ void only_the_first_block_writes(int* out) {
    __shared__ int once;
    if (blockIdx.x == 0 && threadIdx.x == 0) once = 1;
    __syncthreads();
    if (blockIdx.x == 1) out[threadIdx.x] = once;
}
__global__ void row_of_nobody(uint32_t* out) {
    uint4* shared = dynamic_shared<uint4>();
    shared[threadIdx.x] = {1, 2, 3, 4};
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, shared + threadIdx.x + 1);
    out[threadIdx.x] = r[0];
}
__global__ void reads_global(const int* p, int* out, int i) { out[threadIdx.x] = p[i]; }

TEST_CASE("memory that nobody wrote") {
    const Device<int> out(32), unwritten(8, false);
    const Launch how = {.grid = 1, .block = 32, .shared_bytes = 33 * 16};
    CHECK(error_of<reads_unwritten>(how, out.p, 15) == "no error");
    CHECK(error_of<reads_unwritten>(how, out.p, 16) ==
          "reads_unwritten, block (0,0,0), thread 31: reads byte 64 of dynamic shared memory, which nobody "
          "has written");
    expect(error_of<only_the_first_block_writes>({.grid = 2, .block = 32}, out.p),
           "only_the_first_block_writes, block (1,0,0), thread 31: reads byte 0 of "
           "simt_checks::only_the_first_block_writes(int*)::once, which nobody has written");
    CHECK(error_of<row_of_nobody>(how, reinterpret_cast<uint32_t*>(out.p)) ==
          "row_of_nobody, block (0,0,0), thread 31: reads byte 512 of dynamic shared memory, which nobody "
          "has written");
    cudaMemset(unwritten.p, 0, 4);
    CHECK(error_of<reads_global>(how, unwritten.p, out.p, 0) == "no error");
    CHECK(error_of<reads_global>(how, unwritten.p, out.p, 7) ==
          "reads_global, block (0,0,0), thread 0: reads byte 28 of an allocation of 32 bytes, which nobody "
          "has written");
}

// ----------------------------------------------------------------------------
// Addresses outside

__global__ void writes_global(int* p, int i) {
    if (threadIdx.x == 7) p[i] = 1;
}
__global__ void writes_dynamic(int i) {
    if (threadIdx.x == 7) dynamic_shared<int>()[i] = 1;
}
__global__ void writes_static(int* out, int i) {
    __shared__ int shared[32];
    shared[threadIdx.x + i] = 1;
    out[threadIdx.x] = shared[threadIdx.x + i];
}
__global__ void reads_wide(const uint4* p, uint4* out) { out[threadIdx.x] = p[threadIdx.x]; }
__global__ void reads_through_the_cache(const uint4* p, uint4* out) {
    out[threadIdx.x] = __ldg(p + threadIdx.x);
}
__global__ void reads_a_member(const uint2* p, uint2* out) { out[threadIdx.x].x = p[threadIdx.x].y; }
__global__ void borrows_from_a_mate(int* out) {
    __shared__ int* pointers[32];
    int mine = threadIdx.x;
    pointers[threadIdx.x] = &mine;
    __syncthreads();
    out[threadIdx.x] = *pointers[(threadIdx.x + 1) % 32];
}
__global__ void copies_bytes(char* to, const char* from, int n) {
    if (threadIdx.x == 0) std::memcpy(to, from, size_t(n));
}

TEST_CASE("addresses outside of what a thread may touch") {
    const Device<int> p(25), out(128);
    const Launch how = {.grid = 1, .block = 32, .shared_bytes = 128};
    const std::string where = ", block (0,0,0), thread 7: writes 4 bytes ";
    CHECK(error_of<writes_global>(how, p.p, 24) == "no error");
    CHECK(error_of<writes_global>(how, p.p, 25) ==
          "writes_global" + where +
              "outside all allocations, 4 bytes past the end of an allocation of 100 bytes");
    CHECK(error_of<writes_global>(how, p.p, 44) ==
          "writes_global" + where +
              "outside all allocations, 80 bytes past the end of an allocation of 100 bytes");
    CHECK(error_of<writes_global>(how, p.p, -1) ==
          "writes_global" + where + "outside all allocations, 4 bytes before an allocation of 100 bytes");
    int on_the_host = 0;
    expect(error_of<writes_global>(how, &on_the_host, 0), where + "outside all allocations");
    const Device<int>* freed = new Device<int>(1 << 20);
    int* dangling = freed->p;
    delete freed;
    expect(error_of<reads_global>(how, dangling, out.p, 0),
           "thread 0: reads 4 bytes outside all allocations");
    CHECK(error_of<writes_dynamic>(how, 31) == "no error");
    CHECK(error_of<writes_dynamic>(how, 32) ==
          "writes_dynamic" + where + "at byte 128 of dynamic shared memory, which has 128");
    CHECK(error_of<writes_static>(how, out.p, 0) == "no error");
    const std::string index = error_of<writes_static>(how, out.p, 5);
    expect(index, "writes_static, block (0,0,0), thread 27: ");
    expect(index, "simt_checks_test.cpp:");
    expect(index, ": index 32 into 'int");
    expect(error_of<borrows_from_a_mate>(how, out.p),
           "thread 31: reads 4 bytes outside all allocations, on the stack of another thread");
    char* bytes = reinterpret_cast<char*>(p.p);
    CHECK(error_of<copies_bytes>(how, bytes, bytes + 50, 50) == "no error");
    CHECK(error_of<copies_bytes>(how, bytes, bytes + 50, 51) ==
          "copies_bytes, block (0,0,0), thread 0: reads 51 bytes outside all allocations, 1 byte past the "
          "end of an "
          "allocation of 100 bytes");
}

TEST_CASE("misaligned addresses") {
    const Device<int> p(140), out(128);
    const auto wide = [&](int i) { return reinterpret_cast<const uint4*>(p.p + i); };
    const auto narrow = [&](int i) { return reinterpret_cast<const uint2*>(p.p + i); };
    uint4* to = reinterpret_cast<uint4*>(out.p);
    const Launch how = {.grid = 1, .block = 32};
    CHECK(error_of<reads_wide>(how, wide(4), to) == "no error");
    CHECK(error_of<reads_a_member>(how, narrow(2), reinterpret_cast<uint2*>(to)) == "no error");
#ifndef __clang__  // which does not look at copies of whole structures
    const std::string whole = error_of<reads_wide>(how, wide(2), to);
    expect(whole, "reads_wide, block (0,0,0), thread 0: ");
    expect(whole, "simt_checks_test.cpp:");
    expect(whole, ": misaligned 'const struct uint4', 8 bytes past a multiple of 16");
#endif
    const std::string member = error_of<reads_a_member>(how, narrow(1), reinterpret_cast<uint2*>(to));
    expect(member, "reads_a_member, block (0,0,0), thread 0: ");
    expect(member, "simt_checks_test.cpp:");
    expect(member, "uint2', 4 bytes past a multiple of 8");
    CHECK(error_of<reads_through_the_cache>(how, wide(4), to) == "no error");
    CHECK(error_of<reads_through_the_cache>(how, wide(3), to) ==
          "reads_through_the_cache, block (0,0,0), thread 0: __ldg of 16 bytes from an address that is no "
          "multiple of "
          "16");
}

// ----------------------------------------------------------------------------
// cp.async

enum class Mistake { none, no_wait, wait_too_few, no_barrier, overwrites_early };
template <Mistake mistake>
__global__ void stages(const int* from, int* out) {
    int* shared = dynamic_shared<int>();  // two stages of 64
    const int t = threadIdx.x;
    cp_async<4>(shared + t, from + t, true);
    cp_async_commit();
    cp_async<4>(shared + 64 + t, from + t, true);
    cp_async_commit();
    if (mistake == Mistake::wait_too_few) {
        cp_async_wait<2>();
    } else if (mistake != Mistake::no_wait) {
        cp_async_wait<1>();
    }
    if (mistake != Mistake::no_barrier) __syncthreads();
    int sum = shared[63 - t];
    if (mistake != Mistake::overwrites_early) __syncthreads();
    cp_async<4>(shared + t, from + 64 + t, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    out[t] = sum + shared[63 - t] + shared[64 + 63 - t];
}
__global__ void copies_from_outside(const int* from) {
    cp_async<16>(dynamic_shared<uint4>(), from + threadIdx.x * 4, true);
    cp_async_commit();
    cp_async_wait<0>();
}

TEST_CASE("cp.async") {
    const Device<int> from(128), out(64), few(6);
    const Launch how = {.grid = 1, .block = 64, .shared_bytes = 512};
    CHECK(error_of<stages<Mistake::none>>(how, from.p, out.p) == "no error");
    expect(error_of<stages<Mistake::no_wait>>(how, from.p, out.p),
           "thread 63: reads byte 0 of dynamic shared memory, where a cp.async by thread 0 is not yet waited "
           "for");
    expect(error_of<stages<Mistake::wait_too_few>>(how, from.p, out.p),
           "thread 63: reads byte 0 of dynamic shared memory, where a cp.async by thread 0 is not yet waited "
           "for");
    expect(error_of<stages<Mistake::no_barrier>>(how, from.p, out.p),
           "thread 0: reads byte 252 of dynamic shared memory, which nobody has written");
    expect(error_of<stages<Mistake::overwrites_early>>(how, from.p, out.p),
           "thread 0: race: reads byte 252 of dynamic shared memory, which thread 63 wrote; is a barrier");
    CHECK(error_of<copies_from_outside>({.grid = 1, .block = 2, .shared_bytes = 16}, few.p) ==
          "copies_from_outside, block (0,0,0), thread 1: reads 16 bytes outside all allocations, 8 bytes "
          "past the end "
          "of an allocation of 24 bytes");
}

// ----------------------------------------------------------------------------
// Global memory

__global__ void every_block_writes(int* out, int step) { out[blockIdx.x * step + threadIdx.x] = 1; }
__global__ void reads_another_block(int* out) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    out[i] = 1;
    __syncthreads();
    out[64 + i] = out[(i + 1) % 64];
}

TEST_CASE("threads that use the same global memory") {
    const Device<int> out(128);
    CHECK(error_of<every_block_writes>({.grid = 3, .block = 32}, out.p, 32) == "no error");
    const std::string race = error_of<every_block_writes>({.grid = 2, .block = 32}, out.p, 31);
    expect(race, ": race: writes byte 124 of an allocation of 512 bytes, which thread ");
    expect(race, " of another block wrote in the same launch");
    expect(error_of<reads_another_block>({.grid = 2, .block = 32}, out.p), " of another block wrote in the");
    CHECK(error_of<reads_global>({.grid = 1, .block = 32}, out.p, out.p + 64, 0) == "no error");
    CHECK(error_of<reads_global>({.grid = 1, .block = 32}, out.p, out.p, 31) ==
          "no error");  // it is written last: what is read before a write is not kept for global memory
    CHECK(error_of<reads_global>({.grid = 1, .block = 32}, out.p, out.p, 3) ==
          "reads_global, block (0,0,0), thread 4: race: reads byte 12 of an allocation of 512 bytes, which "
          "thread 3 "
          "wrote in the same launch");
}

}  // namespace simt_checks

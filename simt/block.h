// Runs a grid of blocks: each thread of a block is a fiber, with a stack of its own. The threads of a block
// take turns on one thread of the CPU, called a CPU thread here: each runs until it has to wait for others,
// at a barrier or at an operation of its whole warp. CPU threads take blocks dynamically. checks.cpp finds
// races and wrong addresses.
#pragma once

#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    constexpr dim3(unsigned n_x = 1, unsigned n_y = 1, unsigned n_z = 1) : x(n_x), y(n_y), z(n_z) {}
    unsigned x, y, z;
};

// Where the running thread is.
constinit inline thread_local uint3 threadIdx{}, blockIdx{};
constinit inline thread_local dim3 blockDim{}, gridDim{};

// ----------------------------------------------------------------------------
// Memory. What cudaMalloc returns is ordinary memory of the host.

namespace simt {

struct Shadow;  // what the checked build knows of an allocation's bytes
struct Allocation {
    char* begin;
    size_t size;
    Shadow* shadow;
};

class Block;
enum class Access { read, write, atomic };

// The events that the checked build is told of. checks.cpp implements them.
class Checks {
  public:
    virtual void allocated(Allocation& a) = 0;
    virtual void freed(Allocation& a) = 0;
    virtual void filled(const Allocation& a, const char* p, size_t n) = 0;  // by the host
    virtual void block_begins(Block& block) = 0;
    virtual void access(Block& block, const void* p, size_t n, Access how) = 0;  // by the running thread
    virtual void copy_begins(Block& block, const void* p, size_t n) = 0;         // cp.async to here
    virtual void copy_lands(Block& block, const void* p, size_t n) = 0;
    virtual void fence(Block& block) = 0;

  protected:
    ~Checks() = default;
};
inline Checks* checks = nullptr;

// Everything that cudaMalloc has given out, in order of address.
class Memory {
  public:
    bool allocate(void** p, size_t n) {
        const size_t alignment = 256;  // as CUDA's
        const size_t gap = 256;        // to the next allocation
        *p = std::aligned_alloc(alignment, (n + gap + alignment - 1) / alignment * alignment);
        if (*p == nullptr) return false;
        const std::lock_guard lock(mutex_);
        Allocation a{static_cast<char*>(*p), n, nullptr};
        if (checks != nullptr) checks->allocated(a);
        all_.insert(std::upper_bound(all_.begin(), all_.end(), a, before), a);
        return true;
    }
    bool free(void* p) {
        const std::lock_guard lock(mutex_);
        Allocation* a = find(p, 0);
        if (a == nullptr || a->begin != p) return p == nullptr;
        if (checks != nullptr) checks->freed(*a);
        std::free(p);
        all_.erase(all_.begin() + (a - all_.data()));
        return true;
    }
    // For the host: whether n bytes at p lie in one allocation. They are about to be written if `fill`.
    bool contains(const void* p, size_t n, bool fill) {
        const std::lock_guard lock(mutex_);
        const Allocation* a = find(p, n);
        if (a != nullptr && fill && checks != nullptr) checks->filled(*a, static_cast<const char*>(p), n);
        return a != nullptr;
    }
    std::vector<Allocation> all() {
        const std::lock_guard lock(mutex_);
        return all_;
    }

  private:
    static bool before(const Allocation& a, const Allocation& b) { return a.begin < b.begin; }
    Allocation* find(const void* p, size_t n) {
        const Allocation here{static_cast<char*>(const_cast<void*>(p)), n, nullptr};
        const auto next = std::upper_bound(all_.begin(), all_.end(), here, before);
        if (next == all_.begin()) return nullptr;
        Allocation& a = *(next - 1);
        return here.begin + n <= a.begin + a.size ? &a : nullptr;
    }

    std::mutex mutex_;
    std::vector<Allocation> all_;
};
inline Memory memory;

// ----------------------------------------------------------------------------
// Running a grid

// CUDA's warp; or, with SIMT_WARP_SIZE=64, AMD's wavefront on GCN and CDNA.
#ifndef SIMT_WARP_SIZE
#define SIMT_WARP_SIZE 32
#endif
constexpr int warp_size = SIMT_WARP_SIZE;
template <int size>
struct MaskOf {
    using Type = uint32_t;
};
template <>
struct MaskOf<64> {
    using Type = uint64_t;
};
using Mask = MaskOf<warp_size>::Type;  // a bit for each thread of a warp
constexpr Mask all_lanes = ~Mask{0};
constexpr int max_threads = 1024;                // in a block
constexpr size_t max_shared_bytes = 227 * 1024;  // in a block, on sm_90
constexpr size_t stack_bytes = 64 * 1024;        // of a fiber
// From one stack to the next. Were it a power of two, the same variables of all threads would lie in the same
// few sets of the CPU's caches, and each switch between threads would wait for memory.
constexpr size_t stack_stride = stack_bytes + 5 * 64;

// What a thread can wait at, and its name.
enum class At {
    nothing,
    syncthreads,
    syncwarp,
    shfl,
    shfl_xor,
    shfl_down,
    ballot,
    any,
    ldmatrix,
    ldmatrix_trans,
    mma
};
inline std::string name(At at) {
    const char* const names[] = {"nothing",
                                 "__syncthreads",
                                 "__syncwarp",
                                 "__shfl_sync",
                                 "__shfl_xor_sync",
                                 "__shfl_down_sync",
                                 "__ballot_sync",
                                 "__any_sync",
                                 "ldmatrix",
                                 "ldmatrix.trans",
                                 "mma"};
    return names[int(at)];
}

// A stack with its registers. ucontext makes one, but changes the signal mask on each switch, by a system
// call; setjmp and longjmp switch ten times as fast.
extern "C" [[noreturn]] void simt_longjmp(jmp_buf, int) __asm__("_longjmp");  // unchecked by _FORTIFY_SOURCE
struct Fiber {
    ucontext_t start;
    jmp_buf stopped;
    bool started = false;
};
[[noreturn]] inline void go_on(Fiber& fiber) {
    if (fiber.started) simt_longjmp(fiber.stopped, 1);
    fiber.started = true;
    setcontext(&fiber.start);
    std::abort();
}
__attribute__((noinline)) inline void change(Fiber& from, Fiber& to) {
    if (_setjmp(from.stopped) == 0) go_on(to);
}

// A copy that cp.async began.
struct Copy {
    char* to;
    const char* from;  // nullptr: zeros
    size_t bytes;
    int group;  // number of commits before it
};

// A thread of a block.
struct Lane {
    Fiber fiber;
    bool ready = false;  // the fiber waits for the next block
    bool returned = false;
    uint3 index;               // threadIdx
    At at = At::nothing;       // the operation that it waits at,
    Mask mask = 0;             // the threads of the warp that have to arrive there,
    void* operands = nullptr;  // and what it passes to the operation
    std::vector<Copy> copies;  // not waited for yet
    int groups = 0;            // cp.async groups committed
};

inline std::atomic<uint32_t> launches = 0;
struct Run {
    std::string kernel;
    dim3 grid, block;
    size_t shared_bytes;
    void (*call)(const void* args);
    const void* args;
    size_t args_bytes;
    std::vector<Allocation> allocations = memory.all();
    uint32_t serial = ++launches;  // from 1
};

// What this CPU thread runs now.
struct Here {
    Block* block;
    bool in_kernel;  // false: in the emulator, whose own memory accesses are not checked
};
constinit inline thread_local Here here{};
inline Block& block() { return *here.block; }

// As long as one exists, this CPU thread is in the emulator, not in the kernel.
struct Emulating {
    Emulating() { here.in_kernel = false; }
    ~Emulating() { here.in_kernel = was; }
    const bool was = here.in_kernel;
};

// A block of threads, and the memory that a CPU thread reuses to run one block after another.
class Block {
  public:
    Block() : lanes_(new Lane[max_threads]) {
        main_.started = true;
        void* p = mmap(nullptr, max_threads * stack_stride, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::runtime_error("simt: not enough memory for the stacks of a block");
        stacks_ = static_cast<char*>(p);
        shared_ = static_cast<char*>(std::aligned_alloc(128, (max_shared_bytes + 127) / 128 * 128));
        // Static shared memory is thread_local: it lies in this CPU thread's copy of the program's PT_TLS.
        const auto find_tls = [](dl_phdr_info* info, size_t, void* self) {
            Block& b = *static_cast<Block*>(self);
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const ElfW(Phdr)& segment = info->dlpi_phdr[i];
                char* tls = static_cast<char*>(info->dlpi_tls_data);
                if (segment.p_type != PT_TLS || tls == nullptr) continue;
                if (contains(tls, segment.p_memsz, &here, 1)) b.tls_ = tls, b.tls_bytes_ = segment.p_memsz;
            }
            return 0;
        };
        dl_iterate_phdr(find_tls, this);
    }
    ~Block() {
        munmap(stacks_, max_threads * stack_stride);
        std::free(shared_);
    }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    // Runs one block to its end. Returns what went wrong, if anything.
    std::string run(const Run& r, uint3 index) {
        run_ = &r;
        here.block = this;
        blockIdx = index;
        blockDim = r.block;
        gridDim = r.grid;
        n_lanes_ = int(r.block.x * r.block.y * r.block.z);
        n_running_ = n_lanes_;
        n_at_barrier_ = 0;
        std::fill(std::begin(waiting_), std::end(waiting_), 0);
        failure_.clear();
        now_++;
        begin_ = barrier_ = now_;
        std::memset(shared_, 0xff, r.shared_bytes);  // NaN, whether read as fp16 or fp32
        if (checks != nullptr) checks->block_begins(*this);
        for (int i = 0; i < n_lanes_; i++) {
            Lane& lane = lanes_[i];
            lane.index = {i % r.block.x, i / r.block.x % r.block.y, i / (r.block.x * r.block.y)};
            lane.returned = false;
            lane.at = At::nothing;
            lane.copies.clear();
            lane.groups = 0;
            if (!lane.ready) prepare(lane, stack(i));
        }
        lane_ = 0;
        threadIdx = lanes_[0].index;
        change(main_, lanes_[0].fiber);
        here.block = nullptr;
        return failure_;
    }

    const Run& run() const { return *run_; }
    int lane() const { return lane_; }
    Lane& running() { return lanes_[lane_]; }
    char* stack(int lane) const { return stacks_ + lane * stack_stride; }
    char* dynamic_shared() const { return shared_; }
    char* static_shared() const { return tls_; }  // and other thread_local variables
    size_t static_shared_bytes() const { return tls_bytes_; }

    // A clock that advances at each barrier. Accesses before the time barrier() happened before whatever any
    // thread of the block does now; accesses before warp_barrier(warp), before whatever threads of the same
    // warp do now.
    uint32_t now() const { return now_; }
    uint32_t begin() const { return begin_; }
    uint32_t barrier() const { return barrier_; }
    uint32_t warp_barrier(int warp) const { return std::max(warp_barrier_[warp], barrier_); }

    static bool contains(const void* begin, size_t size, const void* p, size_t n) {
        const size_t at = reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(begin);
        return at < size && n <= size - at;
    }
    // Whether all n bytes at p lie in this block's shared memory.
    bool is_shared(const void* p, size_t n) const {
        return contains(shared_, run_->shared_bytes, p, n) || contains(tls_, tls_bytes_, p, n);
    }
    // The allocation that holds all n bytes at p, or nullptr.
    const Allocation* allocation(const void* p, size_t n) {
        const std::vector<Allocation>& all = run_->allocations;
        if (latest_ < all.size() && contains(all[latest_].begin, all[latest_].size, p, n))
            return &all[latest_];
        const auto next = std::upper_bound(all.begin(), all.end(), p,
                                           [](const void* q, const Allocation& a) { return q < a.begin; });
        if (next == all.begin()) return nullptr;
        latest_ = size_t(next - all.begin()) - 1;
        return contains(all[latest_].begin, all[latest_].size, p, n) ? &all[latest_] : nullptr;
    }

    // Ends the launch with a message about a thread.
    [[noreturn]] void fail(const std::string& what) { fail(lane_, what); }
    [[noreturn]] void fail(int lane, const std::string& what) {
        here.in_kernel = false;
        failure_ = "simt: " + run_->kernel;
        failure_ += ", block " + text(blockIdx) + ", thread " + text(lane) + ": " + what;
        for (int i = 0; i < n_lanes_; i++) lanes_[i].ready = false;  // abandons their fibers
        go_on(main_);
    }
    // "5", or "(1,2,0)" in blocks of more than one dimension.
    std::string text(int lane) const {
        return run_->block.y * run_->block.z == 1 ? std::to_string(lane) : text(lanes_[lane].index);
    }

    // Waits until all threads of the block are here.
    void sync_threads() {
        const Emulating emulating;
        if (++n_at_barrier_ < n_lanes_) return wait(At::syncthreads, 0, nullptr);
        n_at_barrier_ = 0;
        barrier_ = ++now_;
        for (int i = 0; i < n_lanes_; i++) lanes_[i].at = At::nothing;
    }

    // Waits until all threads of the warp that `mask` names are here. The last to come calls
    // compute(operands of each lane, nullptr for those not named).
    template <class Operands, class Compute>
    void sync_warp(At at, Mask mask, Operands& mine, Compute compute) {
        const Emulating emulating;
        const int warp = lane_ / warp_size, first = warp * warp_size,
                  n = std::min(n_lanes_ - first, warp_size);
        const Mask bit = Mask{1} << (lane_ - first);
        mask &= all_lanes >> (warp_size - n);
        if (!(mask & bit)) fail(name(at) + " with a mask that leaves out the thread itself");
        waiting_[warp] |= bit;
        if ((waiting_[warp] & mask) != mask) return wait(at, mask, &mine);
        Operands* operands[warp_size] = {};
        for (int i = 0; i < n; i++) {
            const Lane& lane = lanes_[first + i];
            if (!(mask >> i & 1) || first + i == lane_) continue;
            if (lane.at != at || lane.mask != mask) return wait(at, mask, &mine);
            operands[i] = static_cast<Operands*>(lane.operands);
        }
        operands[lane_ - first] = &mine;
        compute(operands);
        if (at == At::syncwarp) warp_barrier_[warp] = ++now_;  // other collectives order no memory
        waiting_[warp] &= ~mask;
        for (int i = 0; i < n; i++) {
            if (mask >> i & 1) lanes_[first + i].at = At::nothing;
        }
    }
    // sync_warp() for what only a whole warp can do.
    template <class Operands, class Compute>
    void sync_whole_warp(At at, Operands& mine, Compute compute) {
        const Emulating emulating;
        const int first = lane_ / warp_size * warp_size;
        if (n_lanes_ - first < warp_size)
            fail(name(at) + " needs 32 threads, and the warp has " + std::to_string(n_lanes_ - first));
        sync_warp(at, all_lanes, mine, compute);
    }

  private:
    // Switches to the next thread that can run. Returns when the operation that this thread waits for is
    // done.
    void wait(At at, Mask mask, void* operands) {
        Lane& lane = running();
        lane.at = at;
        lane.mask = mask;
        lane.operands = operands;
        pass();
    }
    void pass() {
        const int from = lane_;
        int to = from;
        do {
            to = to + 1 < n_lanes_ ? to + 1 : 0;
            if (to == from) deadlock();
        } while (lanes_[to].returned || lanes_[to].at != At::nothing);
        lane_ = to;
        threadIdx = lanes_[to].index;
        change(lanes_[from].fiber, lanes_[to].fiber);
    }

    // A fiber: calls the kernel once for each block.
    static void lane_main() {
        for (;;) {
            Block& b = block();
            const auto call = b.run_->call;
            const void* args = b.run_->args;
            here.in_kernel = true;
            call(args);
            here.in_kernel = false;
            uint64_t guard;
            std::memcpy(&guard, b.stack(b.lane_), sizeof(guard));
            if (guard != stack_guard) b.fail("more than 64 KB on the stack");
            b.running().returned = true;
            if (--b.n_running_ == 0) {
                change(b.running().fiber, b.main_);
            } else {
                b.pass();
            }
        }
    }
    static void prepare(Lane& lane, char* stack) {
        std::memcpy(stack, &stack_guard, sizeof(stack_guard));
        getcontext(&lane.fiber.start);
        lane.fiber.start.uc_stack.ss_sp = stack;
        lane.fiber.start.uc_stack.ss_size = stack_bytes;
        lane.fiber.start.uc_link = nullptr;
        makecontext(&lane.fiber.start, lane_main, 0);
        lane.fiber.started = false;
        lane.ready = true;
    }

    // Every thread waits or has returned. Reports which threads wait for which: operations of a warp first,
    // because a barrier of the block may wait for them.
    [[noreturn]] void deadlock() {
        int waits = 0;
        while (waits < n_lanes_ && lanes_[waits].at <= At::syncthreads) waits++;
        if (waits == n_lanes_) waits = 0;
        while (lanes_[waits].at == At::nothing) waits++;
        const Lane& lane = lanes_[waits];
        const bool all = lane.at == At::syncthreads;
        const int begin = all ? 0 : waits / warp_size * warp_size;
        const int end = all ? n_lanes_ : std::min(begin + warp_size, n_lanes_);
        const auto missing = [&](int i) {
            return i < end && lanes_[i].at != lane.at && (all || (lane.mask >> (i - begin) & 1));
        };
        std::string message;
        for (int i = begin, last; i < end; i = last + 1) {
            last = i;
            if (!missing(i)) continue;
            while (missing(last + 1) && lanes_[last + 1].at == lanes_[i].at) last++;
            message += message.empty() ? " was never reached by " : ", and by ";
            message += i == last ? "thread " + text(i) : "threads " + text(i) + ".." + text(last);
            message += lanes_[i].returned ? ", which returned" : ", waiting at " + name(lanes_[i].at);
        }
        fail(waits, name(lane.at) + (message.empty() ? " was reached with different masks" : message));
    }
    static std::string text(uint3 i) {
        char s[40];
        std::snprintf(s, sizeof(s), "(%u,%u,%u)", i.x, i.y, i.z);
        return s;
    }

    static constexpr uint64_t stack_guard = 0x57ac6ed05afe57ac;  // at the far end of each stack
    const Run* run_ = nullptr;
    std::unique_ptr<Lane[]> lanes_;
    Fiber main_;  // in run()
    char *stacks_, *shared_, *tls_ = nullptr;
    size_t tls_bytes_ = 0, latest_ = 0;
    int n_lanes_ = 0, n_running_ = 0, n_at_barrier_ = 0;
    int lane_ = 0;                                // the running thread
    Mask waiting_[max_threads / warp_size] = {};  // a bit for each thread that waits for its warp
    uint32_t now_ = 0, begin_ = 0, barrier_ = 0, warp_barrier_[max_threads / warp_size] = {};
    std::string failure_;
};

// Runs the i-th block of a grid in this CPU thread. Returns what went wrong, or nothing.
inline std::string run_block(const Run& run, long i) {
    try {
        thread_local Block of_this_thread;
        return of_this_thread.run(run, {unsigned(i % run.grid.x), unsigned(i / run.grid.x % run.grid.y),
                                        unsigned(i / run.grid.x / run.grid.y)});
    } catch (const std::exception& e) {  // there was no memory for a Block
        return e.what();
    }
}

// Calls body(argument, begin, end) for runs of items that together are 0 .. n - 1, in several threads. Null:
// OpenMP's run the blocks, if there are. A program with threads of its own puts here what runs their loops.
using LoopBody = void (*)(void* argument, int64_t begin, int64_t end);
inline void (*run_loop)(int64_t n, LoopBody body, void* argument) = nullptr;

// Calls body(i) for each i below n.
template <class Body>
void for_each_block(long n, Body body) {
    if (run_loop == nullptr) {
#pragma omp parallel for schedule(dynamic) if (n > 1)
        for (long i = 0; i < n; i++) body(i);
        return;
    }
    const auto call = [](void* argument, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) (*static_cast<Body*>(argument))(i);
    };
    run_loop(n, call, &body);
}

inline void run_grid(const Run& run) {
    const long n = long(run.grid.x) * run.grid.y * run.grid.z;
    const long n_threads = long(run.block.x) * run.block.y * run.block.z;
    if (n == 0 || n_threads == 0 || n_threads > max_threads || run.grid.y > 65535 || run.grid.z > 65535 ||
        run.block.z > 64 || run.shared_bytes > max_shared_bytes) {
        throw std::runtime_error(run.kernel + ": invalid configuration argument");
    }
    std::mutex mutex;
    std::string failure;
    std::atomic<bool> failed = false;
    for_each_block(n, [&](long i) {
        if (failed) return;
        const std::string what = run_block(run, i);
        if (what.empty()) return;
        const std::lock_guard lock(mutex);
        if (!failed) failure = what;
        failed = true;
    });
    if (failed) throw std::runtime_error(failure);
}

}  // namespace simt

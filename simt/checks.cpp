// The checked build: looks at every load and store of the kernels.
//
// -fsanitize=thread makes a compiler call __tsan_read4(address) and the like before each of them. Usually
// these functions come with the compiler, and find races between the threads of a CPU. Here they are our own,
// which know what a block's threads may touch: so the .cu file is compiled with that option, this file is
// not, and neither is the linking.
//
//     g++ -std=c++20 -O1 -g -fsanitize=thread,alignment,bounds -DENGINE -x c++ -c program.cu
//     g++ -std=c++20 -O2 -DENGINE -c simt/checks.cpp
//     g++ program.o checks.o -Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset
//
// A thread may read and write its own stack, its block's shared memory, what cudaMalloc returned, and
// variables of the program; and read the arguments of the launch. For each byte of shared memory the last
// writer and two of the last readers are known, and when that was, so that two threads that use the same byte
// without a barrier between them are found in whatever order they ran.
#include "block.h"

#include <cxxabi.h>

#include <fstream>
#include <iterator>

namespace simt {

// What happened to a byte of shared memory. Times are Block::now(); those before Block::begin() are of
// another block, as good as never.
struct Byte {
    uint32_t written, added, read[2], copying;  // when; copying: since when a cp.async may write it
    int16_t writer, adder, reader[2], copier;   // which thread; the adder by an atomic operation
};

// What happened to a byte of global memory.
struct Shadow {
    struct Write {
        uint32_t launch, block, time;  // launch 0: none
        int16_t thread;
        bool atomic;
    };
    bool* initialized;
    Write* writes;
};

namespace {

// Zeroed; costs nothing until it is used.
template <class T>
T* zeros(size_t n) {
    void* p = std::calloc(std::max<size_t>(n, 1), sizeof(T));
    if (p == nullptr) throw std::bad_alloc();
    return static_cast<T*>(p);
}
std::string counted(size_t n, const char* what) {
    return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

// "byte 4 of kernel(int*)::buffer" for an offset into the program's thread_local variables, if its file has
// symbols.
std::string static_variable(size_t offset) {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    const std::string elf(std::istreambuf_iterator<char>(file), {});
    const auto at = [&]<class T>(T, size_t where) {
        T value{};
        if (where <= elf.size() && sizeof(T) <= elf.size() - where)
            std::memcpy(&value, &elf[where], sizeof(T));
        return value;
    };
    const auto header = at(ElfW(Ehdr){}, 0);
    for (size_t i = 0; i < header.e_shnum; i++) {
        const auto table = at(ElfW(Shdr){}, header.e_shoff + i * header.e_shentsize);
        if (table.sh_type != SHT_SYMTAB) continue;
        const auto names = at(ElfW(Shdr){}, header.e_shoff + table.sh_link * header.e_shentsize);
        for (size_t k = 0; k + sizeof(ElfW(Sym)) <= table.sh_size; k += sizeof(ElfW(Sym))) {
            const auto symbol = at(ElfW(Sym){}, table.sh_offset + k);
            const bool is_tls = (symbol.st_info & 15) == STT_TLS;
            if (!is_tls || offset < symbol.st_value || offset - symbol.st_value >= symbol.st_size) continue;
            const size_t name_at = names.sh_offset + symbol.st_name;
            if (name_at >= elf.size()) continue;
            const char* mangled = elf.c_str() + name_at;
            char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr);
            const std::string name = demangled != nullptr ? demangled : mangled;
            std::free(demangled);
            return "byte " + std::to_string(offset - symbol.st_value) + " of " + name;
        }
    }
    return "byte " + std::to_string(offset) + " of static shared memory";
}

class CheckedBuild final : public Checks {
  public:
    CheckedBuild() {
        // The program itself is the first in the list.
        const auto find_image = [](dl_phdr_info* info, size_t, void* self) {
            CheckedBuild& c = *static_cast<CheckedBuild*>(self);
            uintptr_t begin = ~uintptr_t(0), end = 0;
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const ElfW(Phdr)& segment = info->dlpi_phdr[i];
                if (segment.p_type != PT_LOAD) continue;
                begin = std::min<uintptr_t>(begin, info->dlpi_addr + segment.p_vaddr);
                end = std::max<uintptr_t>(end, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
            }
            c.image_ = reinterpret_cast<const void*>(begin);
            c.image_bytes_ = end - begin;
            return 1;
        };
        dl_iterate_phdr(find_image, this);
        checks = this;
    }

    void allocated(Allocation& a) override {
        a.shadow = new Shadow{zeros<bool>(a.size), zeros<Shadow::Write>(a.size)};
    }
    void freed(Allocation& a) override {
        std::free(a.shadow->initialized);
        std::free(a.shadow->writes);
        delete a.shadow;
    }
    void filled(const Allocation& a, const char* p, size_t n) override {
        std::fill_n(a.shadow->initialized + (p - a.begin), n, true);
    }

    void block_begins(Block& b) override {
        SharedBytes& s = shared();
        if (s.dynamic == nullptr) s.dynamic.reset(zeros<Byte>(max_shared_bytes));
        if (s.of_static == nullptr) s.of_static.reset(zeros<Byte>(b.static_shared_bytes()));
    }

    void access(Block& b, const void* p, size_t n, Access how) override {
        if (Block::contains(b.stack(b.lane()), stack_bytes, p, n)) return;
        if (Byte* bytes = shared_bytes(b, p, n)) {
            for (size_t i = 0; i < n; i++) access_shared(b, bytes[i], i, p, n, how);
        } else if (const Allocation* a = b.allocation(p, n)) {
            access_global(b, *a, size_t(static_cast<const char*>(p) - a->begin), n, how);
        } else if (!is_emulators(p) && !Block::contains(b.static_shared(), b.static_shared_bytes(), p, n) &&
                   !Block::contains(image_, image_bytes_, p, n) &&
                   !(how == Access::read && Block::contains(b.run().args, b.run().args_bytes, p, n))) {
            b.fail(verb(how) + counted(n, "byte") + where_outside(b, p, n));
        }
    }

    void copy_begins(Block& b, const void* p, size_t n) override {
        Byte* bytes = shared_bytes(b, p, n);
        for (size_t i = 0; i < n; i++) {
            access_shared(b, bytes[i], i, p, n, Access::write);
            bytes[i].written = bytes[i].added = 0;
            bytes[i].copying = b.now();
            bytes[i].copier = int16_t(b.lane());
        }
    }
    void copy_lands(Block& b, const void* p, size_t n) override {
        Byte* bytes = shared_bytes(b, p, n);
        for (size_t i = 0; i < n; i++) {
            bytes[i].copying = 0;
            bytes[i].written = b.now();
            bytes[i].writer = int16_t(b.lane());
        }
    }
    void fence(Block& b) override { fenced_ = b.run().serial; }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    struct SharedBytes {
        std::unique_ptr<Byte[], Free> dynamic, of_static;
    };
    static SharedBytes& shared() {
        thread_local SharedBytes s;
        return s;
    }

    static std::string verb(Access how) {
        return how == Access::read ? "reads " : how == Access::write ? "writes " : "atomically adds to ";
    }
    // Whether these are variables of the emulator, which lie among static shared memory.
    static bool is_emulators(const void* p) {
        const auto in = [p](auto& variable) { return Block::contains(&variable, sizeof(variable), p, 1); };
        return in(here) || in(threadIdx) || in(blockIdx) || in(blockDim) || in(gridDim);
    }
    // The state of n bytes of shared memory at p; nullptr if they are none.
    static Byte* shared_bytes(Block& b, const void* p, size_t n) {
        const auto offset = [p](const char* begin) { return static_cast<const char*>(p) - begin; };
        if (Block::contains(b.dynamic_shared(), b.run().shared_bytes, p, n))
            return shared().dynamic.get() + offset(b.dynamic_shared());
        if (Block::contains(b.static_shared(), b.static_shared_bytes(), p, n) && !is_emulators(p))
            return shared().of_static.get() + offset(b.static_shared());
        return nullptr;
    }
    static std::string where_shared(Block& b, const void* p) {
        const char* at = static_cast<const char*>(p);
        if (!Block::contains(b.dynamic_shared(), b.run().shared_bytes, p, 1))
            return static_variable(size_t(at - b.static_shared()));
        return "byte " + std::to_string(at - b.dynamic_shared()) + " of dynamic shared memory";
    }
    // Whether what `thread` did at `time` comes before what the running thread does now.
    static bool ordered(const Block& b, int thread, uint32_t time) {
        const int warp = b.lane() / warp_size;
        return thread == b.lane() || time < b.barrier() ||
               (thread / warp_size == warp && time < b.warp_barrier(warp));
    }

    // Byte i of n that are read or written at p.
    static void access_shared(Block& b, Byte& byte, size_t i, const void* p, size_t, Access how) {
        const auto where = [&] { return where_shared(b, static_cast<const char*>(p) + i); };
        const auto race = [&](int thread, const char* did) {
            b.fail("race: " + verb(how) + where() + ", which thread " + b.text(thread) + did +
                   "; is a barrier missing?");
        };
        const uint32_t begin = b.begin();
        if (byte.copying >= begin) {
            b.fail(verb(how) + where() + ", where a cp.async by thread " + b.text(byte.copier) +
                   " is not yet waited for");
        }
        if (byte.written >= begin && !ordered(b, byte.writer, byte.written)) race(byte.writer, " wrote");
        if (how != Access::atomic && byte.added >= begin && !ordered(b, byte.adder, byte.added))
            race(byte.adder, " added to");
        if (how != Access::write && byte.written < begin && byte.added < begin)
            b.fail(verb(how) + where() + ", which nobody has written");
        if (how == Access::read) {
            if (byte.reader[0] != b.lane()) {
                byte.reader[1] = byte.reader[0];
                byte.read[1] = byte.read[0];
                byte.reader[0] = int16_t(b.lane());
            }
            byte.read[0] = b.now();
            return;
        }
        for (int k = 0; k < 2; k++) {
            if (byte.read[k] >= begin && !ordered(b, byte.reader[k], byte.read[k]))
                race(byte.reader[k], " read");
        }
        (how == Access::atomic ? byte.added : byte.written) = b.now();
        (how == Access::atomic ? byte.adder : byte.writer) = int16_t(b.lane());
    }

    // n bytes of an allocation, from its byte `first` on. Blocks have no order. A kernel with fences has one
    // that is not known here.
    void access_global(Block& b, const Allocation& a, size_t first, size_t n, Access how) {
        const Run& run = b.run();
        const uint32_t block = blockIdx.x + run.grid.x * (blockIdx.y + run.grid.y * blockIdx.z);
        for (size_t i = first; i < first + n; i++) {
            const auto where = [&] {
                return "byte " + std::to_string(i) + " of an allocation of " + counted(a.size, "byte");
            };
            Shadow::Write& w = a.shadow->writes[i];
            if (w.launch == run.serial && fenced_ != run.serial && !(w.atomic && how == Access::atomic) &&
                (w.block != block || !ordered(b, w.thread, w.time))) {
                const std::string other = w.block == block ? "" : " of another block";
                b.fail("race: " + verb(how) + where() + ", which thread " + b.text(w.thread) + other +
                       (w.atomic ? " added to" : " wrote") + " in the same launch");
            }
            if (how == Access::read) {
                if (!a.shadow->initialized[i]) b.fail("reads " + where() + ", which nobody has written");
            } else {
                a.shadow->initialized[i] = true;
                w = {run.serial, block, b.now(), int16_t(b.lane()), how == Access::atomic};
            }
        }
    }

    // How far outside of what.
    static std::string where_outside(Block& b, const void* p, size_t n) {
        const char* at = static_cast<const char*>(p);
        if (Block::contains(b.dynamic_shared(), max_shared_bytes, p, 1)) {
            return " at byte " + std::to_string(at - b.dynamic_shared()) +
                   " of dynamic shared memory, which has " + std::to_string(b.run().shared_bytes);
        }
        std::string nearest;
        size_t distance = 1 << 20;  // no use to know more
        for (const Allocation& a : b.run().allocations) {
            const char* end = a.begin + a.size;
            if (at + n > end && at >= a.begin && size_t(at - a.begin) - a.size + n < distance) {
                distance = size_t(at + n - end);
                nearest = ", " + counted(distance, "byte") + " past the end of an allocation of " +
                          counted(a.size, "byte");
            }
            if (at < a.begin && size_t(a.begin - at) < distance) {
                distance = size_t(a.begin - at);
                nearest =
                    ", " + counted(distance, "byte") + " before an allocation of " + counted(a.size, "byte");
            }
        }
        for (int i = 0; nearest.empty() && i < max_threads; i++) {
            if (Block::contains(b.stack(i), stack_bytes, p, 1)) nearest = ", on the stack of another thread";
        }
        return " outside all allocations" + nearest;
    }

    const void* image_ = nullptr;
    size_t image_bytes_ = 0;
    std::atomic<uint32_t> fenced_ = 0;  // the launch in which a fence was seen
};
CheckedBuild checked_build;

void saw(const void* p, size_t n, Access how) {
    if (!here.in_kernel) return;
    const Emulating emulating;
    checked_build.access(block(), p, n, how);
}

// Where in the source, as -fsanitize=alignment and -fsanitize=bounds tell their handlers.
struct Source {
    const char* file;
    uint32_t line, column;
};
struct Type {
    uint16_t kind, info;
    char name[1];  // in quotes
};
std::string text(const Source& at) { return std::string(at.file) + ":" + std::to_string(at.line); }
struct Mismatch {
    Source at;
    const Type* type;
    unsigned char log_alignment, kind;
};
struct OutOfBounds {
    Source at;
    const Type *array, *index;
};
void misaligned(const Mismatch* what, uintptr_t p) {
    if (!here.in_kernel) return;
    const Emulating emulating;
    const unsigned alignment = 1u << what->log_alignment;
    block().fail(text(what->at) + ": misaligned " + what->type->name + ", " + std::to_string(p % alignment) +
                 " bytes past a multiple of " + std::to_string(alignment));
}
void out_of_bounds(const OutOfBounds* what, intptr_t index) {
    if (!here.in_kernel) return;
    const Emulating emulating;
    block().fail(text(what->at) + ": index " + std::to_string(index) + " into " + what->array->name);
}

}  // namespace
}  // namespace simt

// The functions that an instrumented program calls: the names are the compiler's.
extern "C" {

using simt::Access;

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, unsigned long n) { simt::saw(p, n, Access::read); }
void __tsan_write_range(void* p, unsigned long n) { simt::saw(p, n, Access::write); }

#define SIMT_ACCESS(n)                                                                                    \
    void __tsan_read##n(void* p) { simt::saw(p, n, Access::read); }                                       \
    void __tsan_write##n(void* p) { simt::saw(p, n, Access::write); }                                     \
    void __tsan_unaligned_read##n(void* p) { simt::saw(p, n, Access::read); }                             \
    void __tsan_unaligned_write##n(void* p) { simt::saw(p, n, Access::write); }                           \
    void __tsan_read##n##_pc(void* p, void*) { simt::saw(p, n, Access::read); }                           \
    void __tsan_write##n##_pc(void* p, void*) { simt::saw(p, n, Access::write); }                         \
    void __tsan_read_write##n(void* p) { simt::saw(p, n, Access::read), simt::saw(p, n, Access::write); } \
    void __tsan_unaligned_read_write##n(void* p) {                                                        \
        simt::saw(p, n, Access::read), simt::saw(p, n, Access::write);                                    \
    }
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)

// Atomic operations become calls too. Those of kernels are examined where the emulator does them.
#define SIMT_FETCH(T, bits, name)                                       \
    T __tsan_atomic##bits##_fetch_##name(volatile T* p, T value, int) { \
        return __atomic_fetch_##name(p, value, __ATOMIC_SEQ_CST);       \
    }
#define SIMT_ATOMIC(T, bits)                                                                                \
    T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
    void __tsan_atomic##bits##_store(volatile T* p, T value, int) {                                         \
        __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                       \
    }                                                                                                       \
    T __tsan_atomic##bits##_exchange(volatile T* p, T value, int) {                                         \
        return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                             \
    }                                                                                                       \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T value, int, int) {      \
        return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
    }                                                                                                       \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T value, int, int) {        \
        return __atomic_compare_exchange_n(p, expected, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);   \
    }                                                                                                       \
    T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T expected, T value, int, int) {            \
        __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);        \
        return expected;                                                                                    \
    }
#define SIMT_ALL_SIZES(what, ...)                                                             \
    what(uint8_t, 8 __VA_OPT__(, ) __VA_ARGS__) what(uint16_t, 16 __VA_OPT__(, ) __VA_ARGS__) \
        what(uint32_t, 32 __VA_OPT__(, ) __VA_ARGS__) what(uint64_t, 64 __VA_OPT__(, ) __VA_ARGS__)
SIMT_ALL_SIZES(SIMT_ATOMIC)
SIMT_ALL_SIZES(SIMT_FETCH, add)
SIMT_ALL_SIZES(SIMT_FETCH, sub)
SIMT_ALL_SIZES(SIMT_FETCH, and)
SIMT_ALL_SIZES(SIMT_FETCH, or)
SIMT_ALL_SIZES(SIMT_FETCH, xor)
SIMT_ALL_SIZES(SIMT_FETCH, nand)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}

void __ubsan_handle_alignment_assumption(void*, void*, void*, void*) {}
void __ubsan_handle_alignment_assumption_abort(void*, void*, void*, void*) {}
void __ubsan_handle_type_mismatch_v1(simt::Mismatch* what, uintptr_t p) { simt::misaligned(what, p); }
void __ubsan_handle_type_mismatch_v1_abort(simt::Mismatch* what, uintptr_t p) { simt::misaligned(what, p); }
void __ubsan_handle_out_of_bounds(simt::OutOfBounds* what, intptr_t i) { simt::out_of_bounds(what, i); }
void __ubsan_handle_out_of_bounds_abort(simt::OutOfBounds* what, intptr_t i) { simt::out_of_bounds(what, i); }

// Copies of structures may become calls of these; the linker sends them here.
void* __real_memcpy(void* to, const void* from, size_t n);
void* __real_memmove(void* to, const void* from, size_t n);
void* __real_memset(void* p, int value, size_t n);
void* __wrap_memcpy(void* to, const void* from, size_t n) {
    if (simt::here.in_kernel && n > 0) simt::saw(from, n, Access::read), simt::saw(to, n, Access::write);
    return __real_memcpy(to, from, n);
}
void* __wrap_memmove(void* to, const void* from, size_t n) {
    if (simt::here.in_kernel && n > 0) simt::saw(from, n, Access::read), simt::saw(to, n, Access::write);
    return __real_memmove(to, from, n);
}
void* __wrap_memset(void* p, int value, size_t n) {
    if (simt::here.in_kernel && n > 0) simt::saw(p, n, Access::write);
    return __real_memset(p, value, n);
}
void* __tsan_memcpy(void* to, const void* from, size_t n) { return __wrap_memcpy(to, from, n); }
void* __tsan_memmove(void* to, const void* from, size_t n) { return __wrap_memmove(to, from, n); }
void* __tsan_memset(void* p, int value, size_t n) { return __wrap_memset(p, value, n); }

}  // extern "C"

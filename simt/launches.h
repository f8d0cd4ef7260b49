// Writes the launches of a run to the file that SIMT_LAUNCHES names: of each, the kernel, its arguments and
// the device memory that they point to, before and after. `python -m ptx.check` runs what nvcc compiled on
// the same and compares. Records, each a line of text and then bytes:
//
//     launch GRID_X GRID_Y GRID_Z BLOCK_X BLOCK_Y BLOCK_Z SHARED_BYTES N_BYTES KERNEL   the arguments follow
//     memory ADDRESS SIZE                       an allocation that an argument points into
//     bytes OFFSET N                            N bytes of it that have changed since they were last written
//     ran                                       after these, `memory` and `bytes` are the kernel's results
//     end
//
// Memory of which nothing was written yet is zero.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "block.h"

namespace simt {

class LaunchFile {
  public:
    // The file that SIMT_LAUNCHES names, or nullptr.
    static LaunchFile* get() {
        static LaunchFile* const file = [] {
            const char* path = std::getenv("SIMT_LAUNCHES");
            return path == nullptr || *path == 0 ? nullptr : new LaunchFile(path);  // until the process ends
        }();
        return file;
    }

    // Runs the grid between the two halves of its record. args: as a GPU gets them.
    template <class RunGrid>
    void record(const Run& run, const std::string& args, RunGrid run_grid) {
        const std::lock_guard lock(mutex_);
        const dim3 &g = run.grid, &b = run.block;
        print("launch %u %u %u %u %u %u %zu %zu %s\n", g.x, g.y, g.z, b.x, b.y, b.z, run.shared_bytes,
              args.size(), run.kernel.c_str());
        write(args.data(), args.size());
        std::vector<Allocation> used;
        for (const Allocation& a : run.allocations) {
            if (points_into(args, a)) used.push_back(a);
        }
        for (const Allocation& a : used) write_changes(a);
        run_grid();
        write("ran\n", 4);
        for (const Allocation& a : used) write_changes(a);
        write("end\n", 4);
        std::fflush(file_);
    }

  private:
    explicit LaunchFile(const char* path) : file_(std::fopen(path, "wb")) {
        if (file_ == nullptr) throw std::runtime_error(std::string(path) + ": cannot be written");
    }

    // Pointers lie in arguments at multiples of eight bytes.
    static bool points_into(const std::string& args, const Allocation& a) {
        for (size_t at = 0; at + sizeof(void*) <= args.size(); at += sizeof(void*)) {
            const char* p = nullptr;
            std::memcpy(&p, args.data() + at, sizeof(p));
            if (Block::contains(a.begin, a.size, p, 1)) return true;
        }
        return false;
    }
    void write_changes(const Allocation& a) {
        constexpr size_t piece = 256;
        std::vector<char>& known = written_[a.begin];
        if (known.size() != a.size) known.assign(a.size, 0);
        print("memory %zu %zu\n", reinterpret_cast<size_t>(a.begin), a.size);
        const auto differs = [&](size_t at) {
            return at < a.size && std::memcmp(&known[at], a.begin + at, std::min(piece, a.size - at)) != 0;
        };
        for (size_t at = 0; at < a.size; at += piece) {
            size_t end = at;
            while (differs(end)) end += piece;
            end = std::min(end, a.size);
            if (end <= at) continue;
            print("bytes %zu %zu\n", at, end - at);
            write(a.begin + at, end - at);
            std::memcpy(&known[at], a.begin + at, end - at);
            at = end;  // this piece does not differ
        }
    }
    template <class... Args>
    void print(const char* format, Args... args) {
        char line[1024];
        const int n = std::snprintf(line, sizeof(line), format, args...);
        write(line, size_t(std::min(n, int(sizeof(line)) - 1)));
    }
    void write(const void* p, size_t n) {
        if (std::fwrite(p, 1, n, file_) != n) throw std::runtime_error("SIMT_LAUNCHES: the disk is full");
    }

    std::FILE* file_;
    std::mutex mutex_;
    std::map<char*, std::vector<char>> written_;
};

// Arguments as a GPU gets them: converted to the kernel's parameters, each at a multiple of its alignment.
template <class... Parameters, class... Args>
std::string argument_bytes(void (*)(Parameters...), const Args&... args) {
    std::string bytes;
    const auto add = [&](const auto& parameter) {
        bytes.resize((bytes.size() + alignof(decltype(parameter)) - 1) / alignof(decltype(parameter)) *
                     alignof(decltype(parameter)));
        bytes.append(reinterpret_cast<const char*>(&parameter), sizeof(parameter));
    };
    (add(static_cast<const Parameters&>(args)), ...);
    return bytes;
}

}  // namespace simt

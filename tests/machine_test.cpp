// What this process can use of the machine. Control groups are folders of files that the tests write.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/os/memory.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"
#include "own_folder.h"

namespace {

// A root with a /proc and a /sys of its own.
class FakeRoot {
  public:
    explicit FakeRoot(const char* name) : path_(own_folder() / "machine" / name) {
        std::filesystem::remove_all(path_);
    }
    void write(const std::string& path, const std::string& text) const {
        std::filesystem::create_directories((path_ / path).parent_path());
        std::ofstream(path_ / path) << text;
    }
    std::string path() const { return path_; }

  private:
    std::filesystem::path path_;
};

constexpr uint64_t MiB = 1 << 20;

// A machine with 1000 MiB available, its process in the control group /outer/inner.
FakeRoot nested_groups(const char* name) {
    FakeRoot root(name);
    root.write("proc/meminfo", "MemTotal: 4096000 kB\nMemFree: 10240 kB\nMemAvailable: 1024000 kB\n");
    root.write("proc/self/cgroup", "0::/outer/inner\n");
    return root;
}

void group(const FakeRoot& root, const std::string& path, const std::string& max, uint64_t current,
           uint64_t inactive_file = 0, uint64_t active_file = 0, const std::string& high = "max") {
    const std::string at = "sys/fs/cgroup" + path + "/";
    root.write(at + "memory.max", max + "\n");
    root.write(at + "memory.high", high + "\n");
    root.write(at + "memory.current", std::to_string(current) + "\n");
    root.write(at + "memory.stat", "anon 1\nfile 2\ninactive_file " + std::to_string(inactive_file) +
                                       "\nactive_file " + std::to_string(active_file) + "\nslab 3\n");
}

}  // namespace

TEST_CASE("available memory: the machine's, without control groups or with ones that limit nothing") {
    FakeRoot root("none");
    CHECK(available_memory(root.path()) == no_limit);  // a system that does not say
    root.write("proc/meminfo", "MemTotal: 4096000 kB\nMemFree: 10240 kB\nMemAvailable: 1024000 kB\n");
    CHECK(available_memory(root.path()) == 1000 * MiB);
    const FakeRoot free = nested_groups("free");
    CHECK(available_memory(free.path()) == 1000 * MiB);
    group(free, "/outer/inner", "max", 50 * MiB);
    group(free, "/outer", std::to_string(5000 * MiB), 50 * MiB);
    CHECK(available_memory(free.path()) == 1000 * MiB);
}

TEST_CASE("available memory: the smallest that the groups on the way leave") {
    const FakeRoot root = nested_groups("nested");
    group(root, "/outer/inner", std::to_string(300 * MiB), 100 * MiB);
    CHECK(available_memory(root.path()) == 200 * MiB);
    group(root, "/outer", std::to_string(500 * MiB), 450 * MiB);
    CHECK(available_memory(root.path()) == 50 * MiB);
    group(root, "/other", std::to_string(1 * MiB), 1 * MiB);  // not on the way
    CHECK(available_memory(root.path()) == 50 * MiB);
    // memory.high, above which the kernel holds processes up.
    group(root, "/outer", "max", 450 * MiB, 0, 0, std::to_string(460 * MiB));
    CHECK(available_memory(root.path()) == 10 * MiB);
    // More used than allowed: the limit was lowered.
    group(root, "/outer", std::to_string(100 * MiB), 450 * MiB);
    CHECK(available_memory(root.path()) == 0);
}

TEST_CASE("available memory: pages of files do not count as used") {
    const FakeRoot root = nested_groups("cache");
    group(root, "/outer/inner", std::to_string(300 * MiB), 290 * MiB, 150 * MiB, 50 * MiB);
    CHECK(available_memory(root.path()) == 210 * MiB);
}

TEST_CASE("available memory: a container that sees its own group as the root") {
    const FakeRoot root = nested_groups("container");
    group(root, "", std::to_string(256 * MiB), 200 * MiB, 20 * MiB);
    for (const char* line : {"0::/\n", "0::/elsewhere\n", "0::/../elsewhere\n", "4:memory:/v1\n0::/job\n"}) {
        root.write("proc/self/cgroup", line);
        CHECK(available_memory(root.path()) == 76 * MiB);
    }
    group(root, "/job", std::to_string(64 * MiB), 60 * MiB);
    CHECK(available_memory(root.path()) == 4 * MiB);
    root.write("sys/fs/cgroup/cpu.max", "150000 100000\n");
    CHECK(granted_processors(root.path()) == 1.5);
}

TEST_CASE("available memory: no more than is left of the address space") {
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
    if (before.rlim_cur == RLIM_INFINITY) CHECK(address_space_left() == no_limit);
    rlimit limit = before;
    limit.rlim_cur = rlim_t(number_after("VmSize:", "/proc/self/status") * 1024 + 64 * MiB);
    REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
    const uint64_t left = address_space_left(), available = available_memory();
    setrlimit(RLIMIT_AS, &before);
    CHECK(left <= 64 * MiB);
    CHECK(left > 32 * MiB);
    CHECK(available <= 64 * MiB);
}

TEST_CASE("threads: the physical cores, no more than a CPU quota feeds, at least one") {
    const FakeRoot root = nested_groups("quota");
    auto set = [&](const char* outer, const char* inner) {
        root.write("sys/fs/cgroup/outer/cpu.max", outer);
        root.write("sys/fs/cgroup/outer/inner/cpu.max", inner);
    };
    CHECK(default_threads(root.path()) == physical_cores());
    set("max 100000\n", "max 100000\n");
    CHECK(default_threads(root.path()) == physical_cores());
    set("6400000 100000\n", "10000000 10000\n");
    CHECK(granted_processors(root.path()) == 64);
    CHECK(default_threads(root.path()) == std::min(64, physical_cores()));
    set("150000 100000\n", "max 100000\n");
    CHECK(granted_processors(root.path()) == 1.5);
    CHECK(default_threads(root.path()) == 1);
    set("290000 100000\n", "max 100000\n");
    CHECK(default_threads(root.path()) == std::min(2, physical_cores()));
    set("400000 100000\n", "20000 100000\n");
    CHECK(default_threads(root.path()) == 1);
    CHECK(default_threads() >= 1);
    CHECK(default_threads() <= physical_cores());
}

TEST_CASE("machine: cores, memory and bandwidth are plausible") {
    CHECK(physical_cores() >= 1);
    CHECK(physical_cores() <= static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
    CHECK(peak_memory_bytes() > 1000 * 1000);
    CHECK(available_memory() > 1000 * 1000);
    CHECK(available_memory() <= number_after("MemTotal:", "/proc/meminfo") * 1024);
    const ReadBuffer large(1 << 28, 1);
    const double bandwidth = static_cast<double>(large.size()) / large.seconds_to_read();
    CHECK(bandwidth > 1e8);
    CHECK(bandwidth < 1e13);
    const ReadBuffer buffer(1000 * 1000, 3);
    CHECK(buffer.size() % (3 * 4096) == 0);
    CHECK(buffer.size() <= 1000 * 1000);
    CHECK(buffer.size() > 1000 * 1000 - 3 * 4096);
    CHECK(buffer.seconds_to_read() > 0);
    CHECK(ReadBuffer(0, 2).size() == 2 * 4096);
    std::vector<uint32_t> words(1024);
    uint32_t sum = 0;
    for (size_t i = 0; i < words.size(); i++) sum += words[i] = static_cast<uint32_t>(i * 2654435761u);
    CHECK(sum_words(words.data(), words.size()) == sum);
}

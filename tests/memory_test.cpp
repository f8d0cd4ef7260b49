// What is said when a run's memory is not there, and what happens at the end of what is.
#include "engine/app/model.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "engine/cpu/attention_int8.h"
#include "engine/cpu/int8.h"
#include "engine/cpu/kv_cache.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/rows.h"
#include "engine/os/memory.h"
#include "own_folder.h"

TEST_CASE("memory: refused with the sum, what is available, the largest parts and what makes them smaller") {
    const std::vector<MemoryPart> parts = {{"a", 5000000000},
                                           {"b", 0},
                                           kv_part(0, 300, 100000000, "a smaller --ctx takes less"),
                                           {"d", 700000000},
                                           {"e", 7}};
    check_memory(parts, 35700000007);
    CHECK_THROWS_WITH_AS(
        check_memory(parts, 35700000006),
        "needs 35.70 GB of memory, 35.70 GB are available: 30.00 GB for the keys and values of "
        "positions 0 to 299, 5.00 GB for a, 700.0 MB for d; a smaller --ctx takes less",
        std::runtime_error);
    CHECK_THROWS_WITH_AS(check_memory({{"the logits", 2000000}}, 1000000, "device memory"),
                         "needs 2.0 MB of device memory, 1.0 MB are available: 2.0 MB for the logits",
                         std::runtime_error);
    check_memory(parts, no_limit);
    // Small parts are left out.
    CHECK_THROWS_WITH_AS(check_memory({{"little", 9000000}, logits_part(1, 250000000)}, 0),
                         "needs 1.01 GB of memory, 0.0 MB are available: 1.00 GB for the logits",
                         std::runtime_error);
    CHECK(logits_part(3, 5).what == "the logits of 3 tokens");
    CHECK(logits_part(3, 5).bytes == 60);
}

TEST_CASE("memory: what would be taken at once and as it is used is counted, and nothing is taken") {
    std::vector<float> kept(10);
    {
        MemoryCount count;
        std::vector<float> buffer;
        CHECK(scratch(buffer, 1000) == nullptr);
        CHECK(scratch(kept, 10) == kept.data());  // takes no more
        const Rows rows(3, 5);
        CHECK(rows.n_cols == 5);
        CHECK(rows.values.empty());
        CHECK(count.at_once() == 1000 * sizeof(float) + 3 * 5 * sizeof(float));
        const LazyMemory memory(size_t(1) << 60, "more than there is");
        CHECK(memory.as<char>() == nullptr);
        {
            const MemoryCount inner;
            Int8Rows codes;
            codes.resize(2, 64, 32);
            CHECK(inner.at_once() == 2 * 64 + 2 * 2 * (sizeof(float) + sizeof(int32_t)));
            const KvCache cache(KvFormat::q8, 2, 3, 8, 300);  // in pages of 256 positions
            const size_t room = attention_room(size_t(padded(300)), 300) * sizeof(float);  // of each thread
            CHECK(inner.as_used() ==
                  512 * 2 * 3 * 2 * kv_head_bytes(KvFormat::q8, 8) + threads().size() * room);
        }
        {
            const MemoryCount inner;
            const Int8KvCache none(2, 3, 8, 0);
            CHECK(inner.as_used() == 0);
            const Int8KvCache cache(2, 3, 8, 300);
            const size_t bytes = size_t(cache.key_bytes()) + size_t(cache.value_bytes()) + 2 * sizeof(float);
            const size_t room = Int8KvCache::attention_room(300) * (sizeof(float) + 2);  // of each thread
            CHECK(inner.as_used() == 512 * 2 * 3 * bytes + threads().size() * room);
        }
        CHECK(count.at_once() == 1015 * sizeof(float));
        CHECK(count.as_used() == uint64_t(1) << 60);
    }
    CHECK(Rows(3, 5).values.size() == 15);
}

TEST_CASE("lazy memory: all of it can be used, and nothing behind it") {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)) / sizeof(float);
    for (const size_t n : {size_t(1), page, 3 * page - 5, 600 * page}) {
        CAPTURE(n);
        const size_t end = (n + page - 1) / page * page;
        const LazyMemory memory(n * sizeof(float), "a test");
        CHECK(memory.as<float>()[0] == 0);
        memory.as<float>()[n - 1] = 1;
        for (const bool writes : {false, true}) {
            const pid_t child = fork();
            REQUIRE(child >= 0);
            if (child == 0) {
                std::signal(SIGSEGV, SIG_DFL);  // doctest reports it otherwise
                const rlimit none{0, 0};
                setrlimit(RLIMIT_CORE, &none);
                volatile float* behind = memory.as<float>() + end;
                if (writes) *behind = 1;
                _exit(*behind == 0 ? 0 : 1);
            }
            int status = 0;
            REQUIRE(waitpid(child, &status, 0) == child);
            CHECK(WIFSIGNALED(status));
            CHECK(WTERMSIG(status) == SIGSEGV);
        }
    }
}

TEST_CASE("mapped file: what has been packed of it takes no memory, though it is read out of order") {
    constexpr size_t first = (1 << 20) + 300, row_bytes = 512;
    constexpr int n_rows = 1 << 14, rows = 32;
    const std::string path = (own_folder() / "mapped").string();
    std::ofstream(path, std::ios::binary) << std::string(first + n_rows * row_bytes, 1);
    const MappedFile file(path, path);
    const std::byte* table = file.bytes.data() + first;
    std::atomic<int> sum = 0;
    pack_blocks(table, n_rows, row_bytes, rows,
                [&](int b) { sum += int(table[row_bytes * rows * size_t(b)]) + int(table[0]); });
    CHECK(sum == 2 * n_rows / rows);
    // A page of memory has eight bytes here, whose highest bit says whether it is there (man 5 proc).
    std::ifstream pages("/proc/self/pagemap", std::ios::binary);
    pages.seekg(std::streamoff(reinterpret_cast<uintptr_t>(file.bytes.data()) / page_size() * 8));
    std::vector<uint64_t> entries(file.bytes.size() / page_size());
    pages.read(reinterpret_cast<char*>(entries.data()), std::streamsize(8 * entries.size()));
    CHECK(pages.good());
    CHECK(std::ranges::count_if(entries, [](uint64_t entry) { return entry >> 63 != 0; }) == 0);
    std::filesystem::remove(path);
}

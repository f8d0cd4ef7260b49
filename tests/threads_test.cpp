// Threads that share loops.
#include "engine/os/threads.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace {

// Puts back how many threads there are.
struct WithThreads {
    explicit WithThreads(int n) { threads().resize(n); }
    WithThreads(const WithThreads&) = delete;
    WithThreads& operator=(const WithThreads&) = delete;
    ~WithThreads() { threads().resize(before); }
    int before = threads().size();
};

}  // namespace

TEST_CASE("threads: a loop runs every item once") {
    for (const int n_threads : {1, 2, 3, 8}) {
        const WithThreads with(n_threads);
        CHECK(threads().size() == n_threads);
        for (const int n : {0, 1, 2, 3, 7, 100, 12345}) {
            std::vector<int> counts(size_t(n) + 1, 0);
            for (int time = 0; time < 20; time++) parallel_for(n, [&](int i) { counts[size_t(i)]++; });
            CHECK(std::count(counts.begin(), counts.end() - 1, 20) == n);
            CHECK(counts.back() == 0);
        }
    }
}

TEST_CASE("threads: items of several lists, none of another") {
    const WithThreads with(3);
    const std::vector<int> sizes = {5, 0, 1, 700, 3};
    std::vector<std::vector<int>> counts;
    for (const int n : sizes) counts.emplace_back(size_t(n), 0);
    parallel_lists(
        sizes, [](int n) { return n; },
        [&](const int& n, int begin, int end) {
            CHECK(begin < end);
            for (int i = begin; i < end; i++) counts[size_t(&n - sizes.data())][size_t(i)]++;
        });
    for (size_t k = 0; k < sizes.size(); k++) CHECK(counts[k] == std::vector<int>(size_t(sizes[k]), 1));
}

TEST_CASE("threads: a loop in a loop, and loops of two threads that know nothing of each other") {
    const WithThreads with(3);
    std::atomic<int> n = 0;
    parallel_for(10, [&](int) { parallel_for(10, [&](int) { n++; }); });
    CHECK(n == 100);
    auto many_loops = [&] {
        for (int i = 0; i < 1000; i++) parallel_for(10, [&](int) { n++; });
    };
    std::thread other(many_loops);
    many_loops();
    other.join();
    CHECK(n == 20100);
}

TEST_CASE("threads: a helper that stands still keeps what it has in hand and nothing else") {
    const auto here = std::this_thread::get_id();
    for (const int n_threads : {2, 4}) {
        ThreadPool pool(n_threads);
        for (int time = 0; time < 2; time++) {
            std::atomic<int> late_runs = 0, taken = 0, n = 0;
            const double end_of_patience = seconds_now() + 60;  // where a helper's part waits for it
            auto body = [&](int64_t begin, int64_t end) {
                const int n_items = int(end - begin);
                taken += n_items;
                if (std::this_thread::get_id() == here) {
                    while (late_runs == 0) std::this_thread::yield();
                } else {
                    late_runs++;
                    while (taken < 100 && seconds_now() < end_of_patience) std::this_thread::yield();
                }
                n += n_items;  // the loop does not end before that
            };
            pool.run(
                100,
                [](void* argument, int64_t begin, int64_t end) {
                    (*static_cast<decltype(body)*>(argument))(begin, end);
                },
                &body);
            CHECK(n == 100);
            CHECK(late_runs <= n_threads - 1);
        }
    }
}

TEST_CASE("threads: pools come and go") {
    for (int i = 0; i < 200; i++) {
        ThreadPool pool(1 + i % 5);
        std::atomic<int> n = 0;
        auto add = [](void* total, int64_t begin, int64_t end) {
            *static_cast<std::atomic<int>*>(total) += int(end - begin);
        };
        if (i % 3 > 0) pool.run(50, add, &n);
        CHECK(n == (i % 3 > 0 ? 50 : 0));
        pool.resize(1 + i % 3);
        pool.run(50, add, &n);
        CHECK(n == (i % 3 > 0 ? 100 : 50));
    }
}

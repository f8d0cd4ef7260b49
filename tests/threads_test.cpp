// Threads that share loops, and how many of them do.
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

constexpr int any_cores = 1000;

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

namespace {

// A millisecond's work of this thread, half of a loop of 2 n items; the other half's thread is `late`.
void loop(TeamSize& team, double& now, double late) {
    now += 0.001 + late;
    const bool shared = team.size() == 2;
    team.judge(200, shared ? 100 : 200, shared ? 0.001 : 0.002, (shared ? 0.001 : 0.002) + late, now);
}

}  // namespace

TEST_CASE("team: a thread that shares its core goes at once, and is tried again later and later") {
    TeamSize team;
    double now = 100;
    team.reset(2, 1, now);
    auto grows_after = [&](double seconds) {
        team.grow(now + seconds * 0.9, [] { return any_cores; });
        CHECK(team.size() == 1);
        now += seconds * 1.1;
        team.grow(now, [] { return any_cores; });
        return team.size() == 2;
    };
    CHECK(grows_after(0.05));
    for (const double pause : {0.05, 0.2, 0.8, 2.0, 2.0}) {
        CHECK(team.size() == 2);
        loop(team, now, 0.003);
        CHECK(team.size() == 1);
        CHECK(grows_after(pause));
    }
    for (int i = 0; i < 20; i++) loop(team, now, 0);  // it goes well: what was is forgotten
    loop(team, now, 0.004);
    CHECK(team.size() == 2);
    loop(team, now, 0.004);
    CHECK(team.size() == 1);
    CHECK(grows_after(0.05));
}

TEST_CASE("team: that the calling thread stood still is no merit of the others") {
    TeamSize team;
    double now = 0;
    team.reset(2, 1, now);
    now = 0.06;
    team.grow(now, [] { return any_cores; });
    now += 0.004;
    team.judge(200, 10, 0.004, 0.004, now);
    loop(team, now, 0.003);
    CHECK(team.size() == 2);
    loop(team, now, 0.003);
    CHECK(team.size() == 1);
}

TEST_CASE("team: what happens now and then on every machine changes nothing") {
    TeamSize team;
    double now = 0;
    team.reset(2, any_cores, now);
    for (int i = 0; i < 2000; i++) {
        loop(team, now, i % 50 == 49 ? 0.004 : 0);  // 4 ms of every 54
        CHECK(team.size() == 2);
    }
}

TEST_CASE("team: where cores are taken, a thread waits for one, but is tried now and then") {
    TeamSize team;
    int asked = 0, free = 1;
    auto cores = [&] { return asked++, free; };
    team.reset(3, free, 0);
    CHECK(team.size() == 1);
    team.grow(0.01, cores);
    CHECK(asked == 0);
    for (double now = 0.06; now < 1.9; now += 0.06) team.grow(now, cores);
    CHECK(team.size() == 1);
    CHECK(asked > 20);
    team.grow(2.1, cores);
    CHECK(team.size() == 2);
    free = 3;
    team.grow(2.2, cores);
    CHECK(team.size() == 3);
    asked = 0;
    team.grow(9, cores);
    CHECK(team.size() == 3);
    CHECK(asked == 0);
}

TEST_CASE("team: one thread stays one") {
    TeamSize team;
    team.reset(1, any_cores, 0);
    team.judge(10, 10, 1, 1, 1);
    team.grow(100, [] { return any_cores; });
    CHECK(team.size() == 1);
    team.reset(4, 0, 0);
    CHECK(team.size() == 1);
#ifdef __linux__
    CHECK(runnable_threads() >= 1);
#endif
}

TEST_CASE("team: many threads") {
    TeamSize team;
    double now = 0;
    auto judge = [&](int64_t n, int64_t own_items, double own_seconds, double seconds) {
        now += seconds;
        team.judge(n, own_items, own_seconds, seconds, now);
    };
    // Loops of fewer items than threads, of one more, and short ones that end unevenly: nobody stands still.
    team.reset(16, any_cores, now);
    for (int i = 0; i < 1000; i++) {
        judge(8, 1, 0.001, 0.001);
        judge(17, 1, 0.001, 0.002);
        judge(160, 10, 5e-6, 30e-6);
    }
    CHECK(team.size() == 16);
    // One stands still in each loop: all the others do its work.
    for (int i = 0; i < 20; i++) judge(160, 10, 0.001, 0.004);
    CHECK(team.size() < 16);
    // The calling one itself has stood still. That says nothing of the others, who then stand still.
    team.reset(16, any_cores, now);
    judge(160, 10, 0.5, 0.5);
    for (int i = 0; i < 3; i++) judge(160, 10, 0.001, 0.004);
    CHECK(team.size() < 16);
    // Cores that modest programs have are taken faster and faster.
    team.reset(16, 0, now);
    for (const int n : {1, 2, 4, 8, 16, 16}) {
        CHECK(team.size() == n);
        now += 2.1;
        team.grow(now, [] { return 0; });
    }
}

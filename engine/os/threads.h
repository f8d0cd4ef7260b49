// Threads that share a loop: the one that calls it, and helpers that wait for the next.
//
//     parallel_for(n, [&](int i) { ... });                     a call for each i
//     parallel_ranges(n, [&](int begin, int end) { ... });     a call for each run of them
//
// Each thread begins with its own n / threads consecutive items, and takes them in chunks that get smaller. A
// thread that is done takes chunks of the others' parts (work stealing): one that comes late, or that the
// system has stopped, delays the loop only while it holds a chunk.
//
// An idle thread polls for 50 microseconds, in which the next loop nearly always comes, and then sleeps. A
// loop within a loop runs in the thread that calls it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/os/system.h"

// Items begin .. end - 1 of a loop. Must not throw.
using LoopBody = void (*)(void* argument, int64_t begin, int64_t end);

class ThreadPool {
  public:
    explicit ThreadPool(int n_threads) { resize(n_threads); }
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;
    ~ThreadPool() { stop(); }

    // From now on n_threads threads, the calling one among them; fewer, if the system gives no more. Not from
    // within a loop.
    void resize(int n_threads) {
        stop();
        size_ = std::clamp(n_threads, 1, max_threads);
    }
    int size() const { return size_; }

    // Calls body(argument, begin, end) for runs of items that together are 0 .. n - 1, and returns when all
    // are done.
    void run(int64_t n, LoopBody body, void* argument) {
        if (n <= 0) return;
        if (n == 1 || size() == 1 || is_busy_.exchange(true, std::memory_order_acquire))
            return body(argument, 0, n);
        n_ = n, body_ = body, argument_ = argument;
        run_shared();
        is_busy_.store(false, std::memory_order_release);
    }

  private:
    static constexpr int max_threads = 1024;
    static constexpr double spin_seconds = 50e-6;
    static constexpr size_t line = 64;  // bytes of a cache line: threads do not write into each other's

    // What is left of one thread's part of the loop.
    struct alignas(line) Part {
        std::atomic<int64_t> next = 0;
        int64_t end = 0;
    };

    // Helpers begin with the first loop, so that whoever has none takes no threads.
    void start() {
        parts_ = std::make_unique<Part[]>(static_cast<size_t>(size()));
        quit_ = false;
        try {
            for (int t = 1; t < size(); t++) helpers_.emplace_back([this, t] { help(t); });
        } catch (const std::system_error&) {
            size_ = static_cast<int>(helpers_.size()) + 1;
        }
    }

    void run_shared() noexcept {
        if (parts_ == nullptr) start();
        for (int t = 0; t < size(); t++) {
            Part& part = parts_[static_cast<size_t>(t)];
            part.next.store(n_ * t / size(), std::memory_order_relaxed);
            part.end = n_ * (t + 1) / size();
        }
        turn_.fetch_add(1);  // odd: there is a loop
        wake_all(turn_);
        work(0);
        turn_.fetch_add(1);  // even: nobody joins any more
        for (int n; (n = n_inside_.load()) > 0;) wait_while(n_inside_, n);
    }

    // Takes items, first of this thread's part, then of the others'.
    void work(int t) {
        for (int i = 0; i < size(); i++) {
            Part& part = parts_[static_cast<size_t>((t + i) % size())];
            int64_t begin = part.next.load(std::memory_order_relaxed);
            while (begin < part.end) {
                const int64_t end = begin + (part.end - begin + 3) / 4;
                if (!part.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
                body_(argument_, begin, end);
                begin = part.next.load(std::memory_order_relaxed);
            }
        }
    }

    // What helper t does until the pool ends.
    void help(int t) {
        // stop() writes quit_ and then turn_. As they are read in the opposite order, no stop is missed.
        for (uint32_t turn, seen = 0; turn = turn_.load(), !quit_;) {
            if (turn == seen || turn % 2 == 0) {
                wait_while(turn_, turn);
                continue;
            }
            seen = turn;
            // Either run_shared() sees this and waits, or it has closed the loop, and turn_ shows that.
            n_inside_.fetch_add(1);
            if (turn_.load() == turn) work(t);
            if (n_inside_.fetch_sub(1) == 1) wake_all(n_inside_);
        }
    }

    // Waits until `value` is no longer `old`. May return earlier.
    template <class T>
    static void wait_while(const std::atomic<T>& value, T old) {
        const double end = seconds_now() + spin_seconds;
        do {
            for (int i = 0; i < 16; i++) {
                if (value.load() != old) return;
#if defined(__x86_64__)
                __builtin_ia32_pause();
#elif defined(__aarch64__)
                asm volatile("yield");
#endif
            }
        } while (seconds_now() < end);
        sleep_while(value, old);
    }

    void stop() {
        quit_ = true;
        turn_.fetch_add(2);
        wake_all(turn_);
        for (std::thread& helper : helpers_) helper.join();
        helpers_.clear();
        parts_.reset();
    }

    // Helpers wait for turn_, which goes up by one when a loop begins and when it is closed. The loop lies
    // beside it, and is written while no helper is inside.
    alignas(line) std::atomic<uint32_t> turn_ = 0;
    std::unique_ptr<Part[]> parts_;  // one for each thread; null before the first loop
    int64_t n_ = 0;
    LoopBody body_ = nullptr;
    void* argument_ = nullptr;
    std::vector<std::thread> helpers_;
    // The calling thread waits for n_inside_. What lies beside it changes between loops.
    alignas(line) std::atomic<int> n_inside_ = 0;  // helpers that may be at work
    int size_ = 1;                                 // threads, the calling one among them
    std::atomic<bool> is_busy_ = false, quit_ = false;
};

// Cores that threads are worth having on: see system_cores().
inline int physical_cores() {
    const int n = system_cores();
    return std::clamp(n > 0 ? n : static_cast<int>(std::thread::hardware_concurrency()), 1, 1024);
}

// Threads where the command line names none: a physical core each, but no more than the processors' time that
// a container is granted, rounded down. One thread too many and the kernel stops some of them for the rest of
// each period (100 ms) once the quota is used up, while the others spend it waiting for them at the end of
// the loop that they share.
inline int default_threads(const std::string& root = "") {
    const double quota = std::floor(granted_processors(root));
    return static_cast<int>(std::clamp(quota, 1.0, static_cast<double>(physical_cores())));
}

// The threads of this program. Until it says how many: OMP_NUM_THREADS, as where loops are OpenMP's, or else
// as many as there are processors.
inline ThreadPool& threads() {
    static ThreadPool pool([] {
        const char* given = std::getenv("OMP_NUM_THREADS");
        return given != nullptr ? std::atoi(given) : static_cast<int>(std::thread::hardware_concurrency());
    }());
    return pool;
}

// Who runs the loops below: the threads of this program. A back end (engine/backend/), which is a library of
// its own, takes those of the program that loaded it.
inline void (*run_loop)(int64_t n, LoopBody body, void* argument) =
    [](int64_t n, LoopBody body, void* argument) { threads().run(n, body, argument); };

// Calls body(begin, end) for runs of items that together are 0 .. n - 1, in all threads, in any order. body
// must not throw.
template <class Body>
void parallel_ranges(int64_t n, Body body) {
    auto call = [](void* argument, int64_t begin, int64_t end) {
        (*static_cast<Body*>(argument))(begin, end);
    };
    run_loop(n, call, &body);
}

// Calls body(i) for each i of 0 .. n - 1, likewise. One call needs no others: in decode, where every step has
// one row, meeting would cost more than many of the steps.
template <class Body>
void parallel_for(int64_t n, Body body) {
    if (n == 1) return void(body(0));
    parallel_ranges(n, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) body(i);
    });
}

// Calls body(element, begin, end) for runs of the n_items(element) items of each element of a list, likewise.
// Threads do not meet between one element and the next.
template <class List, class Count, class Body>
void parallel_lists(const List& list, Count n_items, Body body) {
    int64_t n = 0;
    for (const auto& element : list) n += n_items(element);
    parallel_ranges(n, [&](int64_t begin, int64_t end) {
        int64_t first = 0;  // of an element's items, counted through
        for (const auto& element : list) {
            const int64_t n_here = n_items(element);
            const int64_t from = std::max(begin, first), to = std::min(end, first + n_here);
            if (from < to) body(element, from - first, to - first);
            first += n_here;
        }
    });
}

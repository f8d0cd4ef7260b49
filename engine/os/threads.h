// Threads that share a loop: the one that calls it, and helpers that wait for the next.
//
//     parallel_for(n, [&](int i) { ... });                     a call for each i
//     parallel_ranges(n, [&](int begin, int end) { ... });     a call for each run of them
//
// Each thread begins with a part of its own, n / threads items one behind the other, and takes some of them
// at a time, fewer and fewer. A thread that is done goes on with what is left of the others' parts: one that
// comes late, or that the system has stopped, is waited for only if it has something in hand.
//
// A thread that has nothing to do looks again and again, for 50 microseconds, whether there is another loop,
// as there nearly always is, and then sleeps. A loop within a loop runs in its own thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/os/system.h"

// How many threads share a loop: fewer while other programs want the cores.
//
// Where a thread shares its core with another program, it stands still for some milliseconds whenever it is
// not its turn, and whoever needs its part of the loop waits. One thread fewer is then faster, although it
// does all the work: on two cores beside a busy process, two threads that always wait for each other are
// several times slower than one (docs/performance.md). So each loop is judged by what it took, and by what
// it would have taken with one thread fewer. Results do not depend on the number of threads.
class TeamSize {
  public:
    // At most n threads, and for now no more than there are cores for.
    void reset(int n, int free_cores, double now) {
        most_ = n, size_ = std::clamp(free_cores, 1, n);
        balance_ = size_ == n ? most_credit : 0, pause_ = shortest_pause;
        changed_at_ = now, try_at_ = now + pause_;
    }

    int size() const { return size_; }
    int most() const { return most_; }

    // Before a loop. free_cores() tells how many cores there are for these threads, as far as is known; it is
    // called only where that matters.
    template <class FreeCores>
    void grow(double now, FreeCores free_cores) {
        if (size_ == most_ || now < try_at_) return;
        const int n = free_cores();
        if (n > size_) {
            size_ = std::min(n, most_);
        } else if (now >= changed_at_ + longest_pause) {
            // Whoever has the cores may be so modest that threads are worth it all the same.
            size_ = std::min(2 * size_, most_);
        } else {
            try_at_ = now + shortest_pause;
            return;
        }
        balance_ = 0;
        try_at_ = now + shortest_pause, changed_at_ = now;
    }

    // After a loop of n items that took `seconds` and ended `now`. The calling thread did own_items of them
    // in own_seconds, and then waited for the others.
    void judge(int64_t n, int64_t own_items, double own_seconds, double seconds, double now) {
        if (size_ == 1 || own_items == 0) return;
        // With one thread fewer, each as fast as this one: as many items one behind the other as the busiest
        // has. No more than if each had saved its share, as this thread may have stood still itself.
        const int64_t most_items = (n + size_ - 2) / (size_ - 1);
        const double fewer =
            std::min(own_seconds / double(own_items) * double(most_items), seconds * size_ / (size_ - 1));
        double gain = fewer - seconds;
        if (seconds - own_seconds < short_wait) gain = std::max(gain, 0.0);
        // Threads that wait for memory together gain less than that, so a gain counts half.
        balance_ = std::min(balance_ + (gain > 0 ? gain / 2 : gain), most_credit);
        if (balance_ == most_credit) pause_ = shortest_pause;
        if (balance_ > -most_loss) return;
        size_--, balance_ = 0;
        try_at_ = now + pause_, changed_at_ = now;
        pause_ = std::min(4 * pause_, longest_pause);
    }

  private:
    // In seconds. Every thread is stopped now and then, for which there is credit after loops that went well;
    // one that shares its core has used it up soon.
    static constexpr double most_credit = 5e-3, most_loss = 0.5e-3;
    // From one thread fewer until more are tried.
    static constexpr double shortest_pause = 0.05, longest_pause = 2;
    static constexpr double short_wait = 50e-6;  // nobody stood still

    int most_ = 1, size_ = 1;
    double balance_ = 0;  // seconds that the last thread has saved lately
    double pause_ = shortest_pause;
    double changed_at_ = 0, try_at_ = 0;
};

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
        reset_team(std::clamp(n_threads, 1, max_threads), max_threads);
    }
    // From now on fewer of them share a loop while other programs want the cores.
    void yield_to_others() {
        yields_ = true;
        reset_team(size(), processors_left(1));
    }
    int size() const { return team_.most(); }

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
        set_team(team_.size());
        try {
            for (int t = 1; t < size(); t++) helpers_.emplace_back([this, t] { help(t); });
        } catch (const std::system_error&) {
            reset_team(static_cast<int>(helpers_.size()) + 1, team_.size());
        }
    }

    void run_shared() noexcept {
        if (parts_ == nullptr) start();
        if (yields_) team_.grow(seconds_now(), [&] { return processors_left(team_.size()); });
        const int n_parts = team_.size();
        if (n_parts != team_size_) set_team(n_parts);
        if (n_parts == 1) return body_(argument_, 0, n_);
        for (int t = 0; t < n_parts; t++) {
            Part& part = parts_[static_cast<size_t>(t)];
            part.next.store(n_ * t / n_parts, std::memory_order_relaxed);
            part.end = n_ * (t + 1) / n_parts;
        }
        const double begin = seconds_now();
        turn_.fetch_add(1);  // odd: there is a loop
        wake_all(turn_);
        const int64_t own_items = work(0);
        turn_.fetch_add(1);  // even: nobody joins any more
        const double own_end = seconds_now();
        for (int n; (n = n_inside_.load()) > 0;) wait_while(n_inside_, n);
        const double end = seconds_now();
        if (yields_) team_.judge(n_, own_items, own_end - begin, end - begin, end);
    }

    // Takes items, first of this thread's part, then of the others'. Returns how many.
    int64_t work(int t) {
        const int n_parts = team_size_;
        int64_t n_done = 0;
        for (int i = 0; i < n_parts; i++) {
            Part& part = parts_[static_cast<size_t>((t + i) % n_parts)];
            int64_t begin = part.next.load(std::memory_order_relaxed);
            while (begin < part.end) {
                const int64_t end = begin + (part.end - begin + 3) / 4;
                if (!part.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
                body_(argument_, begin, end);
                n_done += end - begin;
                begin = part.next.load(std::memory_order_relaxed);
            }
        }
        return n_done;
    }

    // What helper t does until the pool ends.
    void help(int t) {
        // Who ends the pool writes quit_ and then turn_. Read the other way round, no end is slept through.
        for (uint32_t turn, seen = 0; turn = turn_.load(), !quit_;) {
            if (const int n = team_size_.load(); t >= n) {
                sleep_while(team_size_, n);  // not needed now
                continue;
            }
            if (turn == seen || turn % 2 == 0) {
                wait_while(turn_, turn);
                continue;
            }
            seen = turn;
            // Either who closes the loop sees this, and waits; or it is closed, and this sees that.
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

    void reset_team(int most, int free_cores) { team_.reset(most, free_cores, seconds_now()); }

    void set_team(int n) {
        team_size_ = n;
        wake_all(team_size_);
    }

    void stop() {
        quit_ = true;
        set_team(max_threads + 1);
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
    TeamSize team_;
    bool yields_ = false;
    std::atomic<bool> is_busy_ = false, quit_ = false;
    alignas(line) std::atomic<int> team_size_ = 1;  // who shares a loop: helpers from this one on do not
};

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

// Calls body(i) for each i of 0 .. n - 1, likewise.
template <class Body>
void parallel_for(int64_t n, Body body) {
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

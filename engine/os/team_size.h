// How many threads share a loop: fewer while other programs want the cores.
//
// Where a thread shares its core with another program, it stands still for some milliseconds whenever it is
// not its turn, and whoever needs its part of the loop waits. One thread fewer is then faster, although it
// does all the work: on two cores beside a busy process, two threads that always wait for each other are
// several times slower than one (docs/performance.md). So each loop is judged by what it took, and by what
// it would have taken with one thread fewer. Results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/os/clock.h"

class TeamSize {
  public:
    // At most n threads, and for now no more than there are cores for.
    void reset(int n, int free_cores, double now) {
        most_ = n, size_ = std::clamp(free_cores, 1, n);
        balance_ = size_ == n ? most_credit : 0, pause_ = shortest_pause;
        changed_at_ = now, try_at_ = now + pause_;
    }

    int size() const { return size_; }

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

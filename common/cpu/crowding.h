// Fewer threads while other programs want the processor, too.
//
// Threads part and meet several times a layer. Where one of them shares its core with another program, all
// the others wait whenever it is not its turn, some milliseconds at a time; and as they wait by looking again
// and again, they use up their own turns. On two cores beside one busy process, two threads are several times
// slower than one (docs/performance.md has the figures). So a run leaves a core to whoever else wants it,
// and looks every now and then whether it is free again. Results do not depend on the number of threads.
#pragma once

#include <dirent.h>
#include <omp.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <string>

#include "common/cpu/clock.h"

// Seconds that this process's threads, together, have waited for a core since they began: ready to run, while
// others ran (the second number of /proc/PID/task/TID/schedstat, in ns). 0 if the system does not say.
inline double seconds_without_core() {
    double seconds = 0;
    DIR* tasks = opendir("/proc/self/task");
    if (tasks == nullptr) return 0;
    while (const dirent* task = readdir(tasks)) {
        const std::string path = std::string("/proc/self/task/") + task->d_name + "/schedstat";
        std::FILE* file = task->d_name[0] == '.' ? nullptr : std::fopen(path.c_str(), "r");
        if (file == nullptr) continue;
        uint64_t ran = 0, waited = 0;
        if (std::fscanf(file, "%" SCNu64 " %" SCNu64, &ran, &waited) == 2) {
            seconds += static_cast<double>(waited) * 1e-9;
        }
        std::fclose(file);
    }
    closedir(tasks);
    return seconds;
}

class Crowding {
  public:
    // Up to n_threads threads. Until this is called, no number of threads is ever changed.
    void begin(int n_threads) { most_ = n_ = n_threads; }

    // Between two passes: sets the number of threads of those that come.
    void look() {
        if (most_ <= 1) return;
        const double now = seconds_now();
        if (now - since_ >= window && look(now, seconds_without_core())) omp_set_num_threads(n_);
    }

    // The same at a time, with what seconds_without_core() says then. Whether the number of threads changed.
    bool look(double now, double waited) {
        const double share = (waited - waited_) / (now - since_);
        const bool first = since_ < 0;
        since_ = now, waited_ = waited;
        if (first) return false;
        if (share > crowded && n_ > 1) {
            n_--;
        } else if (n_ < most_ && now - changed_ > patience) {
            n_++;
        } else {
            return false;
        }
        changed_ = now;
        return true;
    }

    int threads() const { return n_; }

  private:
    static constexpr double window = 0.05;   // seconds between two looks
    static constexpr double patience = 2.0;  // seconds before a core is tried again
    // Of a core. A thread beside a busy process waits half of the time; on a machine that has nothing else to
    // do, all threads together wait a few hundredths.
    static constexpr double crowded = 0.25;

    int most_ = 0, n_ = 0;
    double since_ = -1, changed_ = -1e9, waited_ = 0;
};

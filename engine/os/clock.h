// The time, and where a program's time goes.
#pragma once

#include <chrono>

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds spent in matrix products and in attention since the process began. What is left of a run is
// everything else.
struct PhaseSeconds {
    double matmul = 0;
    double attention = 0;
};
inline PhaseSeconds phase_seconds;

// Adds the time of its own life to one of these.
class Stopwatch {
  public:
    explicit Stopwatch(double& total) : total_(total) {}
    ~Stopwatch() { total_ += seconds_now() - start_; }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

  private:
    double& total_;
    double start_ = seconds_now();
};

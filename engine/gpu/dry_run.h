// A dry run of allocations: DeviceBuffers count their bytes and take no memory. What a run needs is found out
// by constructing all that it allocates once dry; then it is checked against what is free, and constructed
// again.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/os/memory.h"

class DryRun {
  public:
    // The run in progress; null: DeviceBuffers take memory.
    static DryRun* current() { return current_; }

    // What allocate() would take. Buffers that it makes have no memory: nothing may be copied from them, and
    // no kernel launched on them.
    template <class Allocate>
    static std::vector<MemoryPart> parts_of(Allocate allocate) {
        DryRun run;
        allocate();
        return std::move(run.parts_);
    }

    void begin_part(std::string what, const char* advice) { parts_.push_back({std::move(what), 0, advice}); }
    void count(uint64_t bytes) {
        if (parts_.empty()) begin_part("other memory", "");
        parts_.back().bytes += bytes;
    }

    DryRun(const DryRun&) = delete;
    DryRun& operator=(const DryRun&) = delete;

  private:
    DryRun() { current_ = this; }
    ~DryRun() { current_ = nullptr; }

    static inline DryRun* current_ = nullptr;
    std::vector<MemoryPart> parts_;
};

// Names what is allocated from here on, until the next name. Only a dry run needs it.
inline void name_allocations(std::string what, const char* advice = "") {
    if (DryRun::current() != nullptr) DryRun::current()->begin_part(std::move(what), advice);
}

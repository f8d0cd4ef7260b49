// The RTL's assertions in simulation: for models made with --assert, linked with a runtime of VL_USER_STOP.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "verilated.h"

// The place of the latest assertion that did not hold; "": all did.
inline std::string broken_assertion;

// Verilator calls this where one does not hold. It holds a lock meanwhile, so that nothing is thrown here.
[[gnu::used]] inline void vl_stop(const char* file, int line, const char*) {
    broken_assertion = std::string(file) + ":" + std::to_string(line) + ": an assertion does not hold";
}

// After each clock. Throws std::runtime_error with the place of the assertion.
inline void check_assertions() {
    if (!broken_assertion.empty()) throw std::runtime_error(std::exchange(broken_assertion, {}));
}

// No-op that pins a vector in a register: the compiler has to have v there, and must take its value as new.
//
// g++ 12 otherwise loads a value again for each use, or copies an accumulator before and after each
// instruction that adds to it.
#pragma once

template <class Vector>
inline void pin_register([[maybe_unused]] Vector& v) {
#if defined(RUNQ_SIMDE)  // emulated vectors are no registers: tests/int8_simde_test.cpp
#elif defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
}

// main() of a program that has everything twice or more, once for each level of instructions: mk/desks.mk.
//
// This file is compiled for any processor of the architecture. LEVELS: the levels, the best first, as
// X(avx2) X(portable).
#include "engine/cpu/processor.h"

// A level's main(), and the constructors of its static objects, which would otherwise run before any main()
// and use instructions that may not be there: the linker says where a section begins and ends.
using Constructor = void (*)(int argc, char** argv, char** environment);

int main(int argc, char** argv, char** environment) {
#define X(level)                                                                            \
    if (processor_has(level)) {                                                             \
        int main_##level(int argc, char** argv);                                            \
        extern __attribute__((weak)) const Constructor __start_constructors_##level[];      \
        extern __attribute__((weak)) const Constructor __stop_constructors_##level[];       \
        for (auto* c = __start_constructors_##level; c != __stop_constructors_##level; c++) \
            (*c)(argc, argv, environment);                                                  \
        return main_##level(argc, argv);                                                    \
    }
    LEVELS
#undef X
    return 1;  // the last level is any processor's
}

// The program that a harness is about: PROGRAM is the name of its main source. The others are compiled once
// for all harnesses (LIBRARY_IS_LINKED, mk/fuzz.mk), or with each.
#pragma once

#ifndef PROGRAM
#define PROGRAM "runq.cpp"
#endif
#define RUNQ_NO_MAIN
#ifndef LIBRARY_IS_LINKED
#include "common/app/cli.cpp"
#include "common/app/line_editor.cpp"
#include "common/cpu/attention.cpp"
#include "common/cpu/quant_matmul.cpp"
#endif
#include PROGRAM

// The program that a harness is about: PROGRAM is the name of its main source. The others are compiled once
// for all harnesses (LIBRARY_IS_LINKED, mk/fuzz.mk), or with each.
#pragma once

#ifndef PROGRAM
#define PROGRAM "runq.cpp"
#endif
#define RUNQ_NO_MAIN
#ifndef LIBRARY_IS_LINKED
#include "engine/app/cli.cpp"
#include "engine/app/line_editor.cpp"
#include "engine/cpu/attention.cpp"
#include "engine/cpu/quant_matmul.cpp"
#endif
#include PROGRAM

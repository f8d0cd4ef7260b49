// The program that a harness is about, with all its sources: PROGRAM is the name of the main one.
#pragma once

#ifndef PROGRAM
#define PROGRAM "runq.cpp"
#endif
#define RUNQ_NO_MAIN
#include "common/app/cli.cpp"
#include "common/cpu/attention.cpp"
#include "common/cpu/quant_matmul.cpp"
#include PROGRAM

// The program that a harness is about: PROGRAM is the name of its source.
#pragma once

#ifndef PROGRAM
#define PROGRAM "runq.cpp"
#endif
#define RUNQ_NO_MAIN
#include PROGRAM

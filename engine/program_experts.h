// As program.h, for a program whose feed-forward networks are experts. Experts that lie in a mapped file are
// asked of the disk early by will_read() in cpu/expert_matrix.h.
#pragma once

#include <numeric>

#include "engine/cpu/expert_matrix.h"
#include "engine/cpu/fp64_matmul.h"
#include "engine/program.h"

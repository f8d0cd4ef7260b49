// As program.h, for a program whose feed-forward networks are experts.
#pragma once

#include <numeric>

#include "engine/cpu/expert_matrix.h"
#include "engine/cpu/fp64_matmul.h"
#include "engine/program.h"

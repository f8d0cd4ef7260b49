// How a launch of AWQ's kernels is divided into thread blocks: tiles of output channels, and for each tile
// one block, or several that split its input channels (split-K).
#pragma once

#include <cstddef>

#include "engine/gpu/awq_matrix.cuh"
#include "engine/gpu/device.h"

// Which product a block computes, and from which of its columns on.
struct Tile {
    int product = 0, first_column = 0;
};

// Blocks are numbered over all products: each has ceil(n_out / width) tiles of `width` columns.
__device__ inline Tile find_tile(const AwqProducts& products, int block, int width) {
    Tile tile;
    for (; tile.product < products.n - 1; tile.product++) {
        const int n_tiles = (products.items[tile.product].w.n_out + width - 1) / width;
        if (block < n_tiles) break;
        block -= n_tiles;
    }
    tile.first_column = block * width;
    return tile;
}

inline int count_tiles(const AwqProducts& products, int width) {
    int n = 0;
    for (int i = 0; i < products.n; i++) n += (products.items[i].w.n_out + width - 1) / width;
    return n;
}

// Split-K partial sums; one arrival counter per tile. Where there are too few tiles to occupy the device,
// n_splits blocks compute each tile, from different input channels. Each writes its partial sums; the last to
// arrive adds them up.
struct SplitScratch {
    float* partials = nullptr;     // (n_splits, n_tiles, values of a tile)
    unsigned* arrivals = nullptr;  // (n_tiles,), 0 between launches; see is_last()
};

constexpr int max_splits = 16;            // blocks that share a tile
constexpr int max_tiles = 4096;           // of one launch that is split
constexpr size_t max_partials = 1 << 22;  // values; launches that would need more are split less

// The number of blocks per tile, at most `most`, that gives every multiprocessor a few blocks and fits the
// scratch memory.
inline int splits_for(int n_tiles, int most, size_t tile_values) {
    int n = 1;
    auto more_helps = [&] { return n < most && n < max_splits && n * n_tiles < 4 * device().n_sms; };
    while (more_helps() && n_tiles <= max_tiles && (n + 1) * n_tiles * tile_values <= max_partials) n++;
    return n;
}

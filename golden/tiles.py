"""Matrices in the order in which an array takes them, tile by tile. docs/hardware.md has the picture.

`tile` lays tile behind tile; `untile` undoes it. `interleave` puts the scales of a tile behind its codes, so that one
stream of bytes brings everything that a pass through the array needs.
"""

import math

import numpy as np


def tile_counts(shape: tuple[int, ...], rows: int, cols: int) -> tuple[int, ...]:
    """How many tiles there are along each dimension of matrices (..., m, n): (..., down, across)."""
    *matrices, m, n = shape
    return *matrices, -(-m // rows), -(-n // cols)


def tile(matrices: np.ndarray, rows: int, cols: int, transpose: bool = False) -> np.ndarray:
    """(..., m, n) -> (tiles, rows, cols): tiles of a row of tiles side by side, rows of tiles behind each other.

    Of several matrices, such as experts', the second's tiles follow the first's. Where a matrix does not fill a tile,
    zeros do: they add nothing to a sum. transpose: the same tiles in the same order, each (cols, rows).
    """
    *n_matrices, m, n = matrices.shape
    padded = np.pad(matrices.reshape(-1, m, n), ((0, 0), (0, -m % rows), (0, -n % cols)))
    down, across = tile_counts((m, n), rows, cols)
    tiles = padded.reshape(-1, down, rows, across, cols).transpose(0, 1, 3, *((4, 2) if transpose else (2, 4)))
    return np.ascontiguousarray(tiles).reshape(math.prod(n_matrices) * down * across, *tiles.shape[3:])


def untile(tiles: np.ndarray, shape: tuple[int, ...], transpose: bool = False) -> np.ndarray:
    """The matrices (..., m, n) of which `tile` made these tiles."""
    if transpose:
        tiles = tiles.swapaxes(1, 2)
    rows, cols = tiles.shape[1:]
    *n_matrices, down, across = tile_counts(shape, rows, cols)
    padded = tiles.reshape(-1, down, across, rows, cols).swapaxes(2, 3)
    return padded.reshape(*n_matrices, down * rows, across * cols)[..., : shape[-2], : shape[-1]]


def interleave(codes: np.ndarray, scales: np.ndarray, rows: int) -> bytes:
    """A quantized matrix as one stream: for each tile of `rows` rows and one group of columns, codes, then scales.

    codes: (m, n) int8; scales: (m, n / group_size) fp32, little-endian in the stream. A tile is rows * (group_size + 4)
    bytes. Tiles of the same rows follow each other, so that sums of a row are finished before the next rows begin.
    """
    n_groups = scales.shape[1]
    code_tiles, scale_tiles = tile(codes, rows, codes.shape[1] // n_groups), tile(scales, rows, 1)
    parts = (c.tobytes() + s.astype("<f4").tobytes() for c, s in zip(code_tiles, scale_tiles, strict=True))
    return b"".join(parts)

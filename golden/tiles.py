"""Matrices in the order in which an array of R x C cells takes them.

`tile` lays tile behind tile; `untile` undoes it. `interleave` puts the scales of a tile behind its codes, so that one
stream of bytes brings everything that a pass through the array needs. docs/hardware.md#layouts has an example.
"""

import numpy as np


def tile(matrix: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """(m, n) -> (tiles, rows, cols): tiles of a row of tiles side by side, rows of tiles behind each other.

    Where the matrix does not fill a tile, zeros do: they add nothing to a sum.
    """
    m, n = matrix.shape
    padded = np.pad(matrix, ((0, -m % rows), (0, -n % cols)))
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    return np.ascontiguousarray(tiles.swapaxes(1, 2)).reshape(-1, rows, cols)


def untile(tiles: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The matrix (m, n) of which `tile` made these tiles."""
    rows, cols = tiles.shape[1:]
    down, across = -(-shape[0] // rows), -(-shape[1] // cols)
    padded = tiles.reshape(down, across, rows, cols).swapaxes(1, 2).reshape(down * rows, across * cols)
    return padded[: shape[0], : shape[1]]


def interleave(codes: np.ndarray, scales: np.ndarray, rows: int) -> bytes:
    """A quantized matrix as one stream: for each tile of `rows` rows and one group of columns, codes, then scales.

    codes: (m, n) int8; scales: (m, n / group_size) fp32, little-endian in the stream. A tile is rows * (group_size + 4)
    bytes. Tiles of the same rows follow each other, so that sums of a row are finished before the next rows begin.
    """
    n_groups = scales.shape[1]
    code_tiles, scale_tiles = tile(codes, rows, codes.shape[1] // n_groups), tile(scales, rows, 1)
    parts = (c.tobytes() + s.astype("<f4").tobytes() for c, s in zip(code_tiles, scale_tiles, strict=True))
    return b"".join(parts)

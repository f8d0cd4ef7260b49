"""Codes of 2, 4, 5 and 6 bits in bytes, in the order of GPTQ files (docs/model-files.md).

A row is cut into blocks of 64 bytes; what is left at its end into a block of 32 bytes, then of 16 and of 8. In a block
of B bytes, byte j holds the codes j, j + B, j + 2B, ... from its lowest bits up. So in a full block the i-th group of
64 codes, in order, is (byte >> (i * bits)) & mask: a shift and a mask for a whole vector of them. A row of 5 or 6 bits
is two such rows, or planes: the low 4 bits of all codes, then the upper 1 or 2.
"""

from collections.abc import Iterator

import numpy as np

BLOCK_BYTES = (64, 32, 16, 8)
LOW_PLANE = 4  # bits of the first plane where there are two


def blocks(n_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and size of each block of a row of n_bytes, a multiple of 8."""
    if n_bytes % BLOCK_BYTES[-1]:
        raise ValueError(f"a row of {n_bytes} bytes, expected a multiple of {BLOCK_BYTES[-1]}")
    start = 0
    for size in BLOCK_BYTES:
        while n_bytes - start >= size:
            yield start, size
            start += size


def code_order(n_codes: int, bits: int) -> np.ndarray:
    """Which code of a row lies where, (n_codes * bits / 8, 8 / bits): [b, i] is in bits i * bits and up of byte b."""
    per_byte = 8 // bits
    n_bytes = n_codes // per_byte
    order = np.empty((n_bytes, per_byte), np.int64)
    for start, size in blocks(n_bytes):
        first = start * per_byte
        order[start : start + size] = first + np.arange(size)[:, None] + size * np.arange(per_byte)
    return order


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes below 2^bits, (rows, n) -> (rows, n * bits / 8) uint8. bits: 1, 2, 4, 5, 6; n: whole blocks."""
    if bits > LOW_PLANE:
        low, high = codes & ((1 << LOW_PLANE) - 1), codes >> LOW_PLANE
        return np.concatenate([pack_codes(low, LOW_PLANE), pack_codes(high, bits - LOW_PLANE)], axis=1)
    spread = codes[:, code_order(codes.shape[1], bits)].astype(np.uint8)  # (rows, bytes, 8 / bits)
    packed = np.zeros(spread.shape[:2], np.uint8)
    for i in range(spread.shape[2]):
        packed |= spread[..., i] << np.uint8(i * bits)
    return packed


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """The codes of packed rows, (rows, n_bytes) uint8 -> (rows, n_bytes * 8 / bits) uint8."""
    if bits > LOW_PLANE:
        low, high = np.split(packed, [packed.shape[1] * LOW_PLANE // bits], axis=1)
        return unpack_codes(low, LOW_PLANE) | unpack_codes(high, bits - LOW_PLANE) << np.uint8(LOW_PLANE)
    order = code_order(packed.shape[1] * 8 // bits, bits)
    codes = np.empty((len(packed), order.size), np.uint8)
    for i in range(order.shape[1]):
        codes[:, order[:, i]] = packed >> np.uint8(i * bits) & np.uint8((1 << bits) - 1)
    return codes


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """Two neighbours of a row in a byte, the first in the low half: (rows, n) -> (rows, ceil(n / 2)) uint8."""
    rows, n = values.shape
    padded = np.zeros((rows, n + n % 2), np.uint8)
    padded[:, :n] = values
    return padded[:, ::2] | padded[:, 1::2] << np.uint8(4)


def unpack_nibbles(packed: np.ndarray, n: int) -> np.ndarray:
    """The first n values of packed rows, (rows, ceil(n / 2)) uint8 -> (rows, n) uint8."""
    both = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return both.reshape(len(packed), -1)[:, :n]


def pack_mask(kept: np.ndarray) -> np.ndarray:
    """A bit for each weight, the lowest first: (rows, n) bool -> (rows, n / 8) uint8."""
    return np.packbits(kept, axis=1, bitorder="little")


# Of each byte of a mask, how many ones its first four bits have, and its last four.
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").reshape(256, 2, 4).sum(axis=2)


def why_not_two_of_four(mask: np.ndarray) -> str | None:
    """The first row that does not keep two of each four weights, and what it keeps; None if all rows do."""
    is_bad = (_ONES != 2).any(axis=1)[mask].any(axis=1)
    if not is_bad.any():
        return None
    i = int(np.argmax(is_bad))
    n_kept = _ONES[mask[i]].reshape(-1)
    first = int(np.argmax(n_kept != 2))
    return f"row {i} keeps {n_kept[first]} of columns {4 * first} to {4 * first + 3}, expected 2 of each 4"


def unpack_mask(mask: np.ndarray) -> np.ndarray:
    """Which weights are kept, two of each four, (rows, n_bytes) uint8 -> (rows, 8 * n_bytes) bool."""
    if why := why_not_two_of_four(mask):
        raise ValueError(why)
    return np.unpackbits(np.ascontiguousarray(mask), axis=1, bitorder="little").astype(bool)

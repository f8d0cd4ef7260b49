"""What a launch costs, counted while it runs: no time, but what time is made of.

Instructions are PTX's, once per warp; ptxas turns some into several, others into none. A wavefront is one pass over
shared memory's 32 banks of 4 bytes: a request whose lanes need different words of one bank takes several. A sector is
32 bytes, the least that global memory moves for a warp's request; caches are not looked at.
"""

import re
from collections import Counter

import numpy as np

# By the beginning of the opcode; the first that fits.
KINDS = {
    "mma": r"mma",
    "dp4a": r"dp4a",
    "ldmatrix": r"ldmatrix",
    "cp.async": r"cp\.async\.c",
    "global": r"(ld|st|atom)\.global",
    "shared": r"(ld|st)\.shared",
    "fp16": r".*\.f16x2|(add|sub|mul|fma).*\.f16$",
    "fp32": r"(add|sub|mul|fma|div|neg|abs|min|max|ex2|rsqrt|setp|selp)\S*\.f32$",
    "bits": r"lop3|prmt|bfi|and\.b|or\.b|xor|not|sh[lr]",
    "free": r"mov|cvta|ld\.param",  # mostly no instruction in the end
    "control": r"bra|ret|bar|setp|selp|and\.pred|or\.pred|membar|cp\.async",
    "shuffle": r"shfl",
    "integer": r".*",
}
_KIND: dict[str, str] = {}


def kind_of(opcode: str) -> str:
    """The kind of an opcode, of KINDS."""
    if opcode not in _KIND:
        _KIND[opcode] = next(kind for kind, pattern in KINDS.items() if re.match(pattern, opcode))
    return _KIND[opcode]


class Counters:
    """Of one launch, or of several.

    instructions: by kind, of all warps. wavefronts and least_wavefronts: of shared memory, as (what, bytes per lane).
    sectors: requested from global memory; least_sectors: had the lanes of each request asked for adjacent bytes;
    distinct: sectors that the launch touches at all, each counted once.
    """

    def __init__(self) -> None:
        self.instructions: Counter = Counter()
        self.wavefronts: Counter = Counter()
        self.least_wavefronts: Counter = Counter()
        self.sectors: Counter = Counter()
        self.least_sectors: Counter = Counter()
        self._touched: dict[str, list[np.ndarray]] = {"load": [], "store": []}

    def instruction(self, opcode: str, threads: np.ndarray) -> None:
        self.instructions[kind_of(opcode)] += _n_warps(threads)

    def access(self, space: str, what: str, size: int, address: np.ndarray, threads: np.ndarray) -> None:
        if not len(threads):
            return
        address, warp = address.astype("i8"), threads.astype("i8") // 32
        if space == "global":
            sector = np.unique(warp << 48 | (address & (1 << 48) - 1) // 32)
            self.sectors[what, size] += len(sector)
            unique = np.unique(np.stack([warp, address]), axis=1)  # lanes that ask for the same bytes ask once
            per_warp = np.unique(unique[0], return_counts=True)[1]
            self.least_sectors[what, size] += int(np.sum(-(-per_warp * size // 32)))
            self._touched["store" if what == "store" else "load"].append(np.unique(sector & (1 << 43) - 1))
            return
        # 8 bytes a lane go by half warps, 16 by quarters, so that each pass moves 128 bytes.
        n_words = max(1, size // 4)
        phase = warp * n_words + threads % 32 * n_words // 32
        words = np.concatenate([phase << 32 | address // 4 + j for j in range(n_words)])
        words = np.unique(words)
        phases, bank = words >> 32, words & 31
        _, counts = np.unique(phases * 32 + bank, return_counts=True)
        keys = np.unique(phases * 32 + bank) // 32
        at = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        self.wavefronts[what, size] += int(np.maximum.reduceat(counts, at).sum())
        self.least_wavefronts[what, size] += len(at)

    def distinct(self, what: str) -> int:
        return len(np.unique(np.concatenate(self._touched[what]))) if self._touched[what] else 0


def _n_warps(threads: np.ndarray) -> int:
    warps = threads // 32
    return 1 + int(np.count_nonzero(warps[1:] != warps[:-1]))

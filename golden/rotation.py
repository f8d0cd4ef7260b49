"""Rotation: an orthogonal matrix folded into the weights, after which no channel of the residual stream stands out.

Of QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) this has what costs nothing in the layers. With R orthogonal, x R in
the place of each token's vector x, and g the weights of the norm before a matrix, nothing changes but rounding if

    reads x       q, k, v, gate, up, router, classifier     W -> W diag(g) R,  g -> 1
    adds to x     o, down                                   W -> R^T W
    is x          embedding                                 W -> W R

because RMSNorm without weights commutes with R. Likewise P in each head between v and o: V -> P^T V, O -> O P. R and P
are diag(s) H, with H the Walsh-Hadamard transform in blocks, s random signs over the root of a block.

A tied embedding cannot be both: it and the final norm stay. The program rotates each row after the look-up, and
rotates back before the final norm.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from formats.checkpoint import CLASSIFIER, EMBEDDING, Config
from formats.source import Source

N_SEEDS = 32  # that `best_seed` tries
SAMPLED_ROWS = 64  # of each matrix
BLOCK_VALUES = 1 << 18  # that are rotated at a time: they stay in the cache


def block_of(n: int) -> int:
    """The largest power of two that divides n: how many neighbours the transform mixes."""
    return n & -n


def hadamard(x: np.ndarray, block: int) -> np.ndarray:
    """The Walsh-Hadamard transform of each block along the last axis, not normalized; in the type of x.

    Each pass replaces pairs (a, b) that are h apart by (a + b, a - b), for h = 1, 2, 4, ..., block / 2.
    """
    h = 1
    while h < block:
        a, b = np.moveaxis(x.reshape(*x.shape[:-1], -1, 2, h), -2, 0)
        x = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
        h *= 2
    return x


def rotate(x: np.ndarray, rotation: np.ndarray, block: int) -> np.ndarray:
    """x R of vectors (..., n), in their type. rotation: s (n,), +-1 / sqrt(block)."""
    return hadamard(x * rotation, block)


def rotate_back(x: np.ndarray, rotation: np.ndarray, block: int) -> np.ndarray:
    """x R^T: the inverse of `rotate`."""
    return hadamard(x, block) * rotation


def random_signs(seed: int, n: int, block: int) -> np.ndarray:
    """s (n,) fp64: signs from the bits of PCG64 (O'Neill 2014), whose stream for a seed numpy keeps."""
    words = np.random.PCG64(seed).random_raw(-(-n // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:n]
    return (1 - 2.0 * bits) / np.sqrt(block)


class Rotated:
    """A model with rotated weights, in the place of the Source that it is made from.

    Its config says whether a program has to rotate. untie: the classifier of a tied model becomes a matrix of its own,
    so that none has to. dtype: of the weights.
    """

    def __init__(self, source: Source, seed: int, untie: bool = False, dtype: type = np.float32):
        c = source.config
        self._source, self._dtype = source, dtype
        self._block, self._head_block = block_of(c.dim), block_of(c.head_dim)
        self._signs = random_signs(seed, c.dim, self._block)
        self._head_signs = random_signs(seed, c.head_dim, self._head_block)
        tied = c.tied and not untie
        self.config: Config = replace(c, tied=tied, rotation_block=self._block if tied else 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def stored(self, name: str) -> np.ndarray:
        """The same: there is no other form of it."""
        return self.tensor(name)

    def _of_dim(self, rows: np.ndarray) -> np.ndarray:
        n = max(1, BLOCK_VALUES // rows.shape[1])
        parts = (rows[i : i + n].astype(np.float64) for i in range(0, len(rows), n))
        return np.concatenate([rotate(part, self._signs, self._block) for part in parts])

    def _of_heads(self, rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(len(rows), -1, self.config.head_dim)
        return rotate(heads, self._head_signs, self._head_block).reshape(rows.shape)

    def _reading(self, weight: np.ndarray, norm: str) -> np.ndarray:
        return self._of_dim(weight * self._source.tensor(norm).astype(np.float64))

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by its Hugging Face name, rotated; and `rotation`, what a program rotates by (dim,)."""
        return self._rotated(name).astype(self._dtype)

    def _rotated(self, name: str) -> np.ndarray:
        if name == "rotation":
            return self._signs
        tied = self._source.config.tied
        weight = self._source.tensor(EMBEDDING if name == CLASSIFIER and tied else name)
        if name == "model.norm.weight" or name in (EMBEDDING, CLASSIFIER):
            if self.config.tied:
                return weight
            if name == CLASSIFIER:
                return self._reading(weight, "model.norm.weight")
            return self._of_dim(weight) if name == EMBEDDING else np.ones_like(weight)
        if name.endswith("layernorm.weight"):
            return np.ones_like(weight)
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        if part.endswith(("q_norm.weight", "k_norm.weight")):
            return weight
        if part == "self_attn.o_proj.weight":
            weight = self._of_heads(weight.astype(np.float64))
        if part.endswith(("o_proj.weight", "down_proj.weight")):
            return np.ascontiguousarray(self._of_dim(np.ascontiguousarray(weight.T)).T)
        norm = "input" if part.startswith("self_attn") else "post_attention"
        found = self._reading(weight, f"model.layers.{layer}.{norm}_layernorm.weight")
        if part == "self_attn.v_proj.weight":
            found = np.ascontiguousarray(self._of_heads(np.ascontiguousarray(found.T)).T)
        return found


def best_seed(source: Source) -> int:
    """Of N_SEEDS seeds the one after which the weights have the smallest sum of fourth powers.

    Rotation keeps the sum of squares, so this is the least outlying (OptRot, Gadhikar et al. 2025, arXiv 2512.24124).
    It is taken of some rows of the layers' matrices that read x, and columns of those that add to it.
    """
    samples = []
    for i in range(source.config.n_layers):
        layer = f"model.layers.{i}."
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            name = f"{layer}{part}_proj.weight"
            if part.startswith("mlp.") and source.config.has_experts(i):
                continue
            weight = source.tensor(name)
            if part.endswith((".o", ".down")):
                weight = weight.T
            rows = weight[:: -(-len(weight) // SAMPLED_ROWS)].astype(np.float64)
            if not part.endswith((".o", ".down")):
                norm = "input" if part.startswith("self_attn") else "post_attention"
                rows = rows * source.tensor(f"{layer}{norm}_layernorm.weight")
            samples.append(rows / np.sqrt(np.mean(rows**2) or 1))
    block = block_of(source.config.dim)

    def fourth_powers(seed: int) -> float:
        signs = random_signs(seed, source.config.dim, block)
        return sum(float(np.square(np.square(rotate(rows, signs, block))).sum()) for rows in samples)

    return min(range(N_SEEDS), key=fourth_powers)

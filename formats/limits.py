"""The numbers that the programs run: ranges of the header's fields, as engine/model/model_file.h checks them.

What the exporter writes lies within them, so that a program opens it. tests/test_formats.py holds them equal to what
the programs themselves say. docs/model-files.md has the same table.
"""

from typing import NamedTuple

import numpy as np


class Range(NamedTuple):
    """A field's smallest and largest value."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a number lies within; as fp32, in which files have it, unless all of the range are whole numbers."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return self.low <= value <= self.high
        if not abs(value) <= _LARGEST_FP32:  # also NaN, and whole numbers that no float can be made of
            return False
        return bool(np.float32(self.low) <= np.float32(value) <= np.float32(self.high))

    def __str__(self) -> str:
        """As messages have it: "1 to 1048576"."""
        return " to ".join(str(end) if isinstance(end, int) else f"{end:g}" for end in self)


_LARGEST_FP32 = float(np.finfo(np.float32).max)

# By the names that the programs' messages have for them.
LIMITS = {
    "dim": Range(1, 1 << 20),
    "hidden_dim": Range(1, 1 << 22),
    "n_layers": Range(1, 1 << 12),
    "n_heads": Range(1, 1 << 12),
    "n_kv_heads": Range(1, 1 << 12),  # and a divisor of n_heads
    "vocab_size": Range(1, 1 << 24),
    "max_seq_len": Range(1, 1 << 24),
    "head_dim": Range(2, 1 << 12),  # and even
    "norm_eps": Range(0.0, 1.0),
    "rope_theta": Range(1.0, 1e12),
    "rope_scaling factor": Range(1.0, 1e6),
    "low_freq_factor": Range(1e-6, 1e6),
    "high_freq_factor": Range(1e-6, 1e6),  # and above low_freq_factor
    "original_max_position_embeddings": Range(1, 1 << 24),
    "attention_factor": Range(0.01, 100.0),
    "n_experts": Range(1, 1 << 10),
    "n_active": Range(1, 1 << 10),  # and at most n_experts
    "moe_hidden_dim": Range(1, 5120),  # half of what the operator has for N (golden/grouped.py)
    "n_eos": Range(0, 8),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0),
    "top_k": Range(0, 1 << 24),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.01, 100.0),
}
MAX_GROUP_SIZE = 1 << 16  # weights under one scale: a sum of 65536 products of two codes, 127^2 each, is below 2^31

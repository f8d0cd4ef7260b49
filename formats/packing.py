"""How quantized checkpoints store the matrices of their layers: which tensors stand in the place of each."""

from collections.abc import Iterator
from typing import NamedTuple

FLOATS = ("F32", "F16", "BF16")
INT_QUANTIZED, PACK_QUANTIZED = "int-quantized", "pack-quantized"  # formats of compressed-tensors


class Packing(NamedTuple):
    """What config.json says of the codes of a quantized checkpoint."""

    method: str  # "awq", AutoAWQ's; "gptq"; compressed-tensors' INT_QUANTIZED or PACK_QUANTIZED
    bits: int
    group_size: int  # weights that share a scale; 0: a row
    symmetric: bool = True  # of PACK_QUANTIZED: no zero points are stored, all are the middle code
    static: bool = False  # of INT_QUANTIZED: the activations' scales are stored

    @property
    def is_compressed_tensors(self) -> bool:
        return self.method in (INT_QUANTIZED, PACK_QUANTIZED)

    def parts(self, n_out: int, n_in: int) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], bool]]:
        """Name, shape, types, and whether it has to be there, of each tensor in the place of a matrix."""
        per_word, n_groups = 32 // self.bits, n_in // (self.group_size or n_in)
        if self.method == INT_QUANTIZED:
            yield "weight", (n_out, n_in), ("I8",), True
            yield "weight_scale", (n_out, 1), FLOATS, True
            yield "weight_zero_point", (n_out, 1), ("I8",), False  # of zeros: older versions may have written them
            if self.static:
                yield "input_scale", (1,), FLOATS, True
                yield "input_zero_point", (1,), ("I8",), False
        elif self.method == PACK_QUANTIZED:
            yield "weight_packed", (n_out, -(-n_in // per_word)), ("I32",), True
            yield "weight_scale", (n_out, n_groups), FLOATS, True
            yield "weight_shape", (2,), ("I64", "I32"), True
            if not self.symmetric:
                yield "weight_zero_point", (-(-n_out // per_word), n_groups), ("I32",), True
        else:
            awq = self.method == "awq"
            yield "qweight", (n_in, n_out // per_word) if awq else (n_in // per_word, n_out), ("I32",), True
            yield "qzeros", (n_groups, n_out // per_word), ("I32",), True
            yield "scales", (n_groups, n_out), ("F16",), True
            if not awq:
                yield "g_idx", (n_in,), ("I32",), False
                yield "bias", (n_out,), FLOATS, False  # of zeros: older versions of AutoGPTQ wrote them

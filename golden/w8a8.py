"""W8A8: int8 weights with one fp32 scale a row, int8 activations with one fp32 scale a token.

The arithmetic is that of golden.q8 with the whole row as the group, or groups of 32 (`--block 32`). Static
activations have one scale a place instead, which calibration found (golden.smooth).

`W8A8` runs an exported file, so that a trace shows what the codes in that very file give.
"""

from pathlib import Path

import numpy as np

from export.model_file import HEADER_SIZE, MAGIC_W8A8, VERSION_W8A8, matrix_names, norm_names, read_header
from golden.checkpoint import ModelError, tensor_shapes
from golden.forward import F32, Step, hf_name
from golden.q8 import Quantized, dequantize, matmul, quantize

STATIC_PLACES = ("attn.norm", "attn.mix", "ffn.norm", "ffn.swiglu")  # the order of a layer's static scales


def static_scale(largest: float) -> np.float32:
    """The scale under which the largest calibrated activation has code 127; 0 where `quantize` would say so."""
    return quantize(np.array([[largest]], F32), 1).scales[0, 0]


def quantize_static(x: np.ndarray, scale: np.float32) -> Quantized:
    """Rounds x, (n, k) fp32, with a given scale: rint(x * (1 / scale)), clipped to 127. Scale 0 gives codes 0.

    The scale is repeated for every row, (n, 1).
    """
    with np.errstate(divide="ignore", over="ignore"):
        inv = F32(1) / F32(scale)
        inv = inv if np.isfinite(inv) else F32(0)
        codes = np.clip(np.rint(x.astype(F32) * inv), -127, 127).astype(np.int8)
    return Quantized(codes, np.full((len(x), 1), scale, F32))


class W8A8:
    """The scheme of runq_w8a8.cpp, for golden.forward, from a file that export/w8a8.py wrote (mapped, not read).

    Rows of q and k are in adjacent pairs. Raises ModelError if the file is no W8A8 file.
    """

    interleaved = True

    def __init__(self, path: Path | str):
        path = Path(path)
        head = read_header(path, MAGIC_W8A8, VERSION_W8A8)
        self.config, self.group_size, self.static = head.config, head.group_size, bool(head.activations)
        self._data = np.memmap(path, np.uint8, mode="r")
        self._position, self._end = HEADER_SIZE, head.weights_end
        self._path = path
        c, shapes = self.config, tensor_shapes(self.config)

        self._vectors = {name: self._take(F32, shapes[hf_name(c, name)]) for name in norm_names(c)}
        self.activation_scales: dict[str, np.float32] = {}  # by step name, if static
        if self.static:
            places = [f"layers.{i}.{place}" for i in range(c.n_layers) for place in STATIC_PLACES]
            self.activation_scales = dict(zip([*places, "norm"], self._take(F32, (len(places) + 1,)), strict=True))
        self._matrices: dict[str, Quantized] = {}
        for name in matrix_names(c):
            rows, columns = shapes[hf_name(c, name)]
            if self.group_size < 0 or columns % (self.group_size or columns):
                raise ModelError(f"{path}: group_size {self.group_size} does not divide {name}'s {columns} columns")
            codes = self._take(np.int8, (rows, columns))
            self._matrices[name] = Quantized(codes, self._take(F32, (rows, columns // (self.group_size or columns))))
        if self._position != self._end:
            raise ModelError(f"{path}: weights end at byte {self._position}, the header says {self._end}")
        if c.tied:
            self._matrices["classifier"] = self._matrices["embed"]

    def _take(self, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        """The next array of the file."""
        start, n_bytes = self._position, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._position += n_bytes
        if self._position > self._end:
            raise ModelError(f"{self._path}: weights end at byte {self._end}, too soon")
        array = np.asarray(self._data[start : start + n_bytes])
        return array.view(np.dtype(dtype).newbyteorder("<")).reshape(shape)

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def matrix(self, name: str) -> Quantized:
        """The quantized weight matrix of a step, codes (n_out, n_in)."""
        return self._matrices[name]

    def steps(self, step: Step) -> Step:
        return step

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        table = self.matrix("embed")
        return dequantize(Quantized(table.codes[tokens], table.scales[tokens]))

    def activation(self, step: Step, name: str, x: np.ndarray) -> Quantized:
        if self.static:
            quantized = quantize_static(x, self.activation_scales[name])
        else:
            quantized = quantize(x, self.group_size or x.shape[-1])
        return Quantized(step(name + ".q", quantized.codes), step(name + ".s", quantized.scales))

    def linear(self, x: Quantized, name: str) -> np.ndarray:
        return matmul(x, self.matrix(name))

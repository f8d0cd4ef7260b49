"""A quantized GGUF file as a model in fp32 whose weights lie on no grid.

    python -m models.dither IN.gguf OUT.gguf [--seed N]

Where a model is to be had in 4 bits only, its weights lie on the grid of that type, and whatever stores this grid loses
nothing: a comparison of formats would measure how like the source they are. So each weight w of a block whose scale
is d is moved at random within the cell that rounding maps to it:

    w + d * u        u uniform in -1/2 .. 1/2

The result is one of the models from which the same codes come. Its perplexity is larger than the source's, since
the moves are noise; what a format loses is then measured against the moved model, whose weights are as arbitrary as
trained ones. Types that are read: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (one scale to a block of 32, in fp16, first in the
block); tensors in fp32, fp16 and bf16 stay as they are. Metadata is copied.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from formats.errors import ModelError
from formats.files import check_output
from formats.gguf_file import check_layout

BLOCK = 32  # weights
GRIDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
UNMOVED = ("F32", "F16", "BF16")


def cell_widths(rows: np.ndarray, block_bytes: int) -> np.ndarray:
    """The scale of each block, fp32 (n_rows, n_blocks). rows: the bytes of a tensor, uint8 (n_rows, row_bytes)."""
    blocks = rows.reshape(len(rows), -1, block_bytes)
    return np.abs(np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float32))


def rewrite(source: Path, out: Path, change: Callable[[Any], np.ndarray], extra: dict[str, int] | None = None) -> None:
    """Writes `out`: the tensors of `source` as change(tensor) makes them, fp32; its metadata, and `extra` uint64s.

    change: of a GGUFReader's tensor. Nothing half-written stays. Raises ModelError.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    check_layout(source)
    check_output(out, [source])
    reader = GGUFReader(source)
    writer = GGUFWriter(None, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(key, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    writer.add_file_type(0)  # all fp32
    for key, number in (extra or {}).items():
        writer.add_uint64(key, number)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, change(tensor))
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        whole = Path(folder) / out.name
        writer.write_header_to_file(whole)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        whole.replace(out)


def dither(source: Path, out: Path, seed: int = 0) -> None:
    """Writes `out`. Raises ModelError for a type whose cells are not known; nothing half-written stays."""
    from gguf import GGML_QUANT_SIZES, dequantize

    rng = np.random.default_rng(seed)

    def moved(tensor: Any) -> np.ndarray:
        if tensor.tensor_type.name not in GRIDS + UNMOVED:
            known = ", ".join(GRIDS + UNMOVED)
            raise ModelError(f"{source}: tensor {tensor.name} has type {tensor.tensor_type.name}, expected {known}")
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.tensor_type.name in GRIDS:
            widths = np.repeat(cell_widths(rows, GGML_QUANT_SIZES[tensor.tensor_type][1]), BLOCK, axis=1)
            value = value + widths.reshape(value.shape) * (rng.random(value.shape, np.float32) - np.float32(0.5))
        return value

    rewrite(source, out, moved)


def main() -> int:
    """Exit code 1 with one line for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m models.dither", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="IN.gguf")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    try:
        dither(args.source, args.out, args.seed)
    except (ModelError, OSError) as error:
        print(f"dither: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

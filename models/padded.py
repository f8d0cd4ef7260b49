"""Rows padded to whole blocks of 256, so that llama-quantize gives a small model the type that it is asked for.

    python -m models.padded pad MODEL.gguf PADDED.gguf
    python -m models.padded imatrix MODEL.gguf TEXT OUT.dat [--samples N]
    python -m models.padded cut MODEL.gguf PADDED.gguf TYPE.gguf DEQUANTIZED.gguf OUT.gguf

llama.cpp's K types, and most of ik_llama.cpp's own, have blocks of 256 weights. Where these do not divide a row,
llama-quantize takes another, larger type, and the file says little about the type in its name. `pad` puts zeros behind
each row of a model in fp32. In between, by llama-quantize:

    llama-quantize --pure --token-embedding-type f32 --imatrix OUT.dat PADDED.gguf TYPE.gguf TYPE
    llama-quantize --allow-requantize TYPE.gguf DEQUANTIZED.gguf F32

`cut` takes the zeros off what came back. It says in the metadata (`BYTES`) how many bytes the weights would have: those
of TYPE.gguf in proportion, the embedding in Q8_0, which it also rounds to, norms in fp32.

`imatrix` writes the importance matrix of a text as the tool of that name does, but with the samples that our exporter
calibrates on: the mean square of each input of each matrix, 0 for the padding.
"""

import argparse
import struct
import sys
from pathlib import Path

import numpy as np

from formats.errors import ModelError
from formats.files import check_output, replacing
from formats.gguf_model import GGUFModel
from golden.calibration import read_samples
from golden.forward import F32, F64, Fp32
from models.dither import rewrite
from models.quality import BYTES, InFp32, classifier_inputs

BLOCK = 256
EMBEDDING = "token_embd.weight"
READ_BY = {
    "attn.norm": ("attn_q", "attn_k", "attn_v"),
    "attn.mix": ("attn_output",),
    "ffn.norm": ("ffn_gate", "ffn_up"),
    "ffn.swiglu": ("ffn_down",),
}


def padded(rows: np.ndarray) -> np.ndarray:
    """(n_rows, n) with zeros behind, to a multiple of BLOCK; vectors as they are."""
    return rows if rows.ndim == 1 else np.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK)))


def fp32_of(tensor: object) -> np.ndarray:
    """The values of a GGUFReader's tensor. Raises ModelError if it is not in fp32."""
    if tensor.tensor_type.name != "F32":
        raise ModelError(f"tensor {tensor.name} has type {tensor.tensor_type.name}, expected F32 (models/dither.py)")
    return np.asarray(tensor.data, F32)


def pad(model: Path, out: Path) -> None:
    """Writes the model with padded rows; the embedding's stay."""
    rewrite(model, out, lambda t: fp32_of(t) if t.name == EMBEDDING else padded(fp32_of(t)))


def cut(model: Path, wide: Path, quantized: Path, dequantized: Path, out: Path) -> None:
    """Writes what the padded weights stand for after quantization, without the padding. Raises ModelError."""
    from gguf import GGMLQuantizationType, GGUFReader, dequantize, quantize

    shapes = {t.name: t.data.shape for t in GGUFReader(model).tensors}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1 and name != EMBEDDING}
    n_weights = sum(rows * columns for rows, columns in matrices.values())
    n_padded = sum(rows * (columns + -columns % BLOCK) for rows, columns in matrices.values())
    taken = quantized.stat().st_size - wide.stat().st_size + 4 * n_padded  # by the matrices
    q8_0 = GGMLQuantizationType.Q8_0
    others = sum(4 * np.prod(shape) for shape in shapes.values() if len(shape) == 1)
    others += np.prod(shapes[EMBEDDING]) * 34 // 32
    if not 0 < taken < 4 * n_padded:
        raise ModelError(f"{quantized}: its size is not that of {wide} after quantization")

    def narrow(tensor: object) -> np.ndarray:
        value, shape = fp32_of(tensor), shapes.get(tensor.name, ())
        if tensor.name == EMBEDDING:
            return dequantize(quantize(value, q8_0), q8_0)
        if value.shape != padded(np.empty(shape, F32)).shape:
            raise ModelError(f"{dequantized}: tensor {tensor.name} has shape {value.shape}, expected {shape} padded")
        return np.ascontiguousarray(value[..., : shape[-1]])

    rewrite(dequantized, out, narrow, {BYTES: int(taken * n_weights / n_padded + others)})


def importance(model: Path, text: Path, out: Path, n_samples: int | None) -> None:
    """Writes the mean squares of all inputs, padded, in the layout that llama-quantize reads. Raises ModelError."""
    check_output(out, [model, text])
    source = GGUFModel(model)
    sums: dict[str, np.ndarray] = {}

    def step(name: str, value: np.ndarray) -> np.ndarray:
        layer, _, place = name.removeprefix("layers.").partition(".")
        for part in READ_BY.get(place, ()):
            key = f"blk.{layer}.{part}.weight"
            sums[key] = sums.get(key, 0) + np.square(value, dtype=F64).sum(axis=0)
        return value

    class Watched(InFp32):
        def steps(self, _step: object) -> object:
            return step

    samples = read_samples(source, text, n_samples, None)
    classifier_inputs(source.config, Watched(Fp32(source)), samples, lambda _: None)
    n_tokens = sum(len(ids) for ids in samples)
    with replacing(out) as file:
        file.write(struct.pack("<i", len(sums)))
        for key, squares in sums.items():
            values = padded((squares / n_tokens).astype(F32)[None])[0]
            file.write(struct.pack("<i", len(key)) + key.encode() + struct.pack("<ii", 1, len(values)))
            file.write(values.tobytes())


def main() -> int:
    """Exit code 1 with one line for what cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m models.padded", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, files in (("pad", 2), ("imatrix", 3), ("cut", 5)):
        commands.add_parser(command).add_argument("files", nargs=files, type=Path, metavar="FILE")
    commands.choices["imatrix"].add_argument("--samples", type=int, metavar="N")
    args = parser.parse_args()
    try:
        if args.command == "pad":
            pad(*args.files)
        elif args.command == "cut":
            cut(*args.files)
        else:
            importance(*args.files, args.samples)
    except (ModelError, OSError) as error:
        print(f"padded: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What each part of GPTQ is worth: the error of a layer's outputs on text that was not calibrated on.

    python -m models.gptq_errors MODEL TEXT [--layer N] [--tokens N] [--damping SHARE]

MODEL is a Hugging Face directory or a GGUF file. The first half of TEXT gives H, the second H' (X^T X of a matrix's
inputs in the unquantized model, golden/gptq_quantize.py). A figure is sum of d H' d^T over sum of w H' w^T, in percent,
with the rows w of a matrix and d of what rounding changed: the squared error of the outputs over their square.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from formats.gptq import MatrixFormat
from formats.source import Source, open_model
from golden.calibration import calibration_samples, observe, read_text
from golden.channel_scaling import CONSUMERS
from golden.forward import F64
from golden.gptq import Matrix, stands_for
from golden.gptq_quantize import DAMPING, column_order, curvature, damped, quantize_matrix, round_best, round_matrix
from golden.gptq_refine import refine

FORMS = {
    "4 bits": MatrixFormat(4, 64),
    "nl4": MatrixFormat(4, 32, int8_scales=True),
    "5 bits": MatrixFormat(5, 32, int8_scales=True),
    "6 bits": MatrixFormat(6, 32, int8_scales=True),
    "2 bits": MatrixFormat(2, 64, two_level=True),
}
SAMPLE = 256  # tokens that are seen at a time

Rounded = Callable[[np.ndarray, np.ndarray, MatrixFormat, float], Matrix]  # weight, H, format, damping


def by_columns(weight: np.ndarray, h: np.ndarray, form: MatrixFormat, damping: float) -> Matrix:
    """GPTQ, first to last column."""
    return quantize_matrix(weight, curvature(h, damping=damping), form)


def by_size(weight: np.ndarray, h: np.ndarray, form: MatrixFormat, damping: float) -> Matrix:
    """GPTQ, large inputs first, as the exporter does it."""
    return quantize_matrix(weight, curvature(h, column_order(np.diag(h), form), damping), form)


def searched(weight: np.ndarray, h: np.ndarray, form: MatrixFormat, damping: float) -> Matrix:
    """To nearest, each group's grid chosen with the importance that GPTQ gives a column."""
    return round_best(weight, form, 1 / np.square(np.diag(curvature(h, damping=damping).factor)))


def refined(weight: np.ndarray, h: np.ndarray, form: MatrixFormat, damping: float) -> Matrix:
    """The same, and one round of --refine."""
    return refine(weight, by_size(weight, h, form, damping), damped(h, damping), 1)


WAYS: dict[str, Rounded] = {
    "to nearest": lambda weight, _h, form, _damping: round_matrix(weight, form),
    "searched grids": searched,
    "GPTQ in order": by_columns,
    "GPTQ by size": by_size,
    "refined": refined,
}


def relative_error(weight: np.ndarray, rounded: np.ndarray, h: np.ndarray) -> float:
    """|X (w - q)|^2 / |X w|^2 over all rows, from H = X^T X. weight, rounded: (n_out, n_in)."""
    w, d = weight.astype(F64), (weight - rounded).astype(F64)
    return float(np.sum(d @ h * d) / np.sum(w @ h * w))


def errors(
    source: Source, halves: list[list[np.ndarray]], layer: int, damping: float
) -> dict[tuple[str, str], dict[str, float]]:
    """Percent by format's name and matrix, then by way. halves: token ids, to calibrate on and to measure on."""
    (weights, seen), (_, unseen) = (
        next(islice(observe(source, samples, with_products=True), layer, None)) for samples in halves
    )
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, form in FORMS.items():
        for place, consumers in CONSUMERS.items():
            h, other = seen[f"layers.{layer}.{place}"].products, unseen[f"layers.{layer}.{place}"].products
            assert h is not None and other is not None
            for consumer in consumers:
                w = weights.vector(f"layers.{layer}.{consumer}")
                found[name, consumer] = {
                    way: 100 * relative_error(w, stands_for(rounded(w, h, form, damping)), other)
                    for way, rounded in WAYS.items()
                }
    return found


def main() -> int:
    """Exit code 1 if a file cannot be read, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m models.gptq_errors", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=6144, help="of each half, in samples of 256 (6144)")
    parser.add_argument("--damping", type=float, default=DAMPING, help=f"of H's mean diagonal ({DAMPING})")
    args = parser.parse_args()
    if args.tokens < SAMPLE or args.layer < 0 or not args.damping > 0:
        parser.error(f"expected --tokens of {SAMPLE} and up, --layer of 0 and up, --damping above 0")
    try:
        source, text = open_model(args.model), read_text(args.text)
        if args.layer >= source.config.n_layers:
            raise ValueError(f"--layer {args.layer}: {args.model} has {source.config.n_layers} layers")
        middle, n = len(text) // 2, args.tokens // SAMPLE
        halves = [
            calibration_samples(args.model, source.config, half, n, SAMPLE) for half in (text[:middle], text[middle:])
        ]
        found = errors(source, halves, args.layer, args.damping)
    except (ValueError, OSError) as error:
        print(f"gptq_errors: {error}", file=sys.stderr)
        return 1
    print(f"{'percent':<17}", *(f"{way:>15}" for way in WAYS))
    for (bits, consumer), figures in found.items():
        print(f"{bits:<6} {consumer.split('.')[1]:<10}", *(f"{figures[way]:15.3g}" for way in WAYS))
    return 0


if __name__ == "__main__":
    sys.exit(main())

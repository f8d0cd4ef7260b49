"""W8A8 files for runq_w8a8: smoothed weights as int8 codes, one fp32 scale per row (or per 32 weights).

The order is that of Q8 files, with the static scales of activations, if there are any, behind the norms:
docs/model-files.md. What smoothing does is in golden/smooth.py.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from export.arguments import add_calibration, calibration_options, first_given
from export.compressed_tensors import write_compressed_tensors
from export.hf_directory import add_hf_out, after_model_file, check_destination
from export.int8 import progress_bar, write_tensors
from export.tokenizer import tokenizer_section
from export.writer import finish
from formats.checkpoint import ModelError, input_files
from formats.dimensions import check_group_size, check_rows
from formats.files import replacing
from formats.schemes import W8A8_FILE
from formats.source import generation_of, open_model
from formats.tensors import w8a8_tensors, weights_end
from golden.calibration import read_samples
from golden.channel_scaling import ChannelScaling, describe
from golden.smooth import find_smoothing, load_smoothed
from golden.w8a8 import static_places, static_scale

FORMAT = W8A8_FILE
HELP = "SmoothQuant: int8 weights, one fp32 scale a row, for runq_w8a8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of W8A8."""
    add_calibration(parser)
    parser.add_argument("--alpha", metavar="X", help="how far outliers move to the weights, 0 to 1, or auto (0.5)")
    parser.add_argument("--no-smooth", action="store_true", help="quantize the weights as they are")
    parser.add_argument("--block", type=int, default=0, metavar="N",
                        help="values that share a scale: 32, or 0: a row (0)")  # fmt: skip
    parser.add_argument("--act", choices=("dynamic", "static"), default="dynamic",
                        help="scales of activations: each token's own, or one a place from calibration")  # fmt: skip
    add_hf_out(parser, "compressed-tensors would")
    parser.add_argument("--verbose", action="store_true", help="with --alpha auto: what was chosen for every layer")


def run(args: argparse.Namespace) -> None:
    """Exports as the command line says."""
    if args.no_smooth and args.alpha is not None:
        raise ModelError("--alpha and --no-smooth exclude each other")
    alpha = None if args.no_smooth else parse_alpha(args.alpha or "0.5")
    smoothing = export_w8a8(
        args.hf_dir, args.out, args.calib, alpha, args.samples, args.seq_len, args.block, args.act == "static",
        args.hf_out, not args.no_tokenizer, not args.quiet,
    )  # fmt: skip
    if alpha == "auto" and (not args.quiet or args.verbose):
        print(*describe(smoothing, args.verbose), sep="\n", file=sys.stderr)


def parse_alpha(text: str) -> float | str:
    """`auto` or a number in 0..1. Raises ModelError."""
    if text == "auto":
        return text
    try:
        alpha = float(text)
    except ValueError:
        alpha = -1.0
    if not 0 <= alpha <= 1:
        raise ModelError(f"--alpha is {text}, expected 0 to 1, or auto")
    return alpha


def export_w8a8(
    hf_dir: Path,
    out: Path,
    calibration: Path | None = None,
    alpha: float | str | None = 0.5,
    n_samples: int | None = None,
    seq_len: int | None = None,
    block: int = 0,
    static: bool = False,
    hf_out: Path | None = None,
    with_tokenizer: bool = True,
    progress: bool = True,
) -> ChannelScaling:
    """Writes `out` and returns what calibration chose. Raises ModelError, and writes nothing, for what cannot be done.

    calibration: a text file, needed unless alpha is None (no smoothing) and activations are dynamic, when neither it
    nor n_samples nor seq_len may be given.
    block: 0 for one scale per row, or 32.
    hf_out: a directory that must not exist, for a compressed-tensors checkpoint; not with blocks. It is written when
    `out` is in its place, which then stays; the error or the KeyboardInterrupt says so.
    """
    if block not in (0, 32):
        raise ModelError(f"--block is {block}, expected 0 or 32")
    if static and block:
        raise ModelError(f"--act static has one scale for a whole row, --block {block} has more: use --block 0")
    if hf_out is not None:
        if block:
            raise ModelError(f"--hf-out has one scale for a whole row, --block {block} has more: use --block 0")
        check_destination(hf_out, out, hf_dir)
    calibrates = static or alpha is not None
    if calibrates and calibration is None:
        need = "--act static" if alpha is None else "smoothing"
        raise ModelError(f"{need} needs a text to calibrate with: --calib TEXT")
    if not calibrates and (option := first_given(calibration_options(calibration, n_samples, seq_len))):
        raise ModelError(f"{option} would change nothing with --no-smooth and dynamic activations: leave it out")
    checkpoint = open_model(hf_dir)
    config = checkpoint.config
    if block:
        check_group_size(checkpoint, block, "--block")
    else:
        check_rows(checkpoint)
    generation = generation_of(checkpoint)
    tokenizer = tokenizer_section(checkpoint.path, config.vocab_size) if with_tokenizer else b""
    samples = []
    if calibrates:
        samples = read_samples(checkpoint, calibration, n_samples, seq_len)
    tensors = list(w8a8_tensors(config, block, static))

    with replacing(out, input_files(hf_dir, calibration)) as f:
        smoothing = ChannelScaling()
        if samples:
            smoothing = find_smoothing(checkpoint, samples, alpha, block, static, progress)

        def load(name: str) -> np.ndarray:
            if name == "act_scales":
                return np.array([static_scale(smoothing.largest[place]) for place in static_places(config)])
            return load_smoothed(checkpoint, name, smoothing, interleaved=True)

        with progress_bar(tensors, progress, "writing") as bar:
            write_tensors(f, tensors, load, block, bar)
        finish(f, config, generation, FORMAT, block, weights_end(tensors), tokenizer, activations=int(static))
    if hf_out is not None:
        with after_model_file(hf_out, out):
            write_compressed_tensors(checkpoint, out, hf_out)
    return smoothing

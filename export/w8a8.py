"""W8A8 files for runq_w8a8: smoothed weights as int8 codes, one fp32 scale per row (or per 32 weights).

The order is that of Q8 files, with the static scales of activations, if there are any, behind the norms:
docs/model-files.md. What smoothing does is in golden/smooth.py. Codes and scales of a checkpoint of compressed-tensors
are repacked as they are.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from export.arguments import add_calibration, calibration_options, first_given
from export.compressed_tensors import Int8Matrices, write_compressed_tensors
from export.engines import GPU_AND_CPU, announce
from export.hf_directory import add_hf_out, after_model_file, check_destination, tell_model
from export.int8 import progress_bar, write_tensors
from export.rotation import Rotate, rotated
from export.tokenizer import text_of
from export.writer import finish
from formats.checkpoint import ModelError, input_files, tensor_shapes
from formats.dimensions import check_group_size, check_rows
from formats.files import replacing
from formats.foreign import storage_of
from formats.packing import INT_QUANTIZED
from formats.schemes import W8A8_FILE
from formats.source import is_gguf, open_model
from formats.tensors import w8a8_tensors, weights_end
from golden.calibration import read_samples
from golden.channel_scaling import ChannelScaling, describe
from golden.forward import hf_name, load_weight
from golden.q8 import Quantized
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
    parser.add_argument("--act", choices=("dynamic", "static"),
                        help="scales of activations: each token's own, or one a place from calibration (dynamic; of "
                        "a quantized checkpoint its own)")  # fmt: skip
    add_hf_out(parser, "compressed-tensors would")
    parser.add_argument("--verbose", action="store_true", help="with --alpha auto: what was chosen for every layer")


def run(args: argparse.Namespace) -> None:
    """Exports as the command line says."""
    if is_int8(args.hf_dir):
        given = {"--alpha": args.alpha, "--no-smooth": args.no_smooth, "--block": args.block or None,
                 "--rotate": args.rotate}  # fmt: skip
        if option := first_given(given):
            raise ModelError(f"{args.hf_dir}: is quantized already, {option} would change nothing: leave it out")
        import_w8a8(
            args.hf_dir, args.out, args.act, args.calib, args.samples, args.seq_len, args.hf_out,
            not args.no_tokenizer, not args.quiet,
        )  # fmt: skip
        return
    if args.no_smooth and args.alpha is not None:
        raise ModelError("--alpha and --no-smooth exclude each other")
    alpha = None if args.no_smooth else parse_alpha(args.alpha or "0.5")
    smoothing = export_w8a8(
        args.hf_dir, args.out, args.calib, alpha, args.samples, args.seq_len, args.block, args.act == "static",
        args.hf_out, not args.no_tokenizer, not args.quiet, args.rotate,
    )  # fmt: skip
    if alpha == "auto" and (not args.quiet or args.verbose):
        print(*describe(smoothing, args.verbose), sep="\n", file=sys.stderr)


def is_int8(hf_dir: Path) -> bool:
    """Whether a directory has int8 matrices of compressed-tensors, whose codes a W8A8 file keeps."""
    storage = None if is_gguf(hf_dir) else storage_of(hf_dir)
    return storage is not None and getattr(storage.form(""), "method", None) == INT_QUANTIZED


def import_w8a8(
    hf_dir: Path,
    out: Path,
    act: str | None = None,
    calibration: Path | None = None,
    n_samples: int | None = None,
    seq_len: int | None = None,
    hf_out: Path | None = None,
    with_tokenizer: bool = True,
    progress: bool = True,
) -> None:
    """Writes `out` from a checkpoint of compressed-tensors, code for code; what is not quantized is rounded.

    act: "dynamic" leaves static scales out; None: the checkpoint's own. A file with static scales needs one that the
    checkpoint does not have, of the input of the classifier, which is not quantized there: calibration, a text file,
    is for that alone. hf_out: as of `export_w8a8`. Raises ModelError, and writes nothing, for what cannot be done.
    """
    checkpoint = open_model(hf_dir)
    matrices = [name for name, shape in tensor_shapes(checkpoint.config).items() if len(shape) == 2]
    forms = [checkpoint.forms.get(name) for name in matrices if ".layers." in name]
    has_static = all(form is not None and form.static for form in forms)
    if act == "static" and not has_static:
        raise ModelError(f"{hf_dir}: is quantized for dynamic activations, --act static is not possible: leave it out")
    static = has_static and act != "dynamic"
    if hf_out is not None:
        check_destination(hf_out, out, hf_dir)
    calibrating = calibration_options(calibration, n_samples, seq_len)
    if not static and (option := first_given(calibrating)):
        raise ModelError(f"{hf_dir}: is quantized already, {option} would change nothing: leave it out")
    if static and calibration is None:
        raise ModelError(
            f"{hf_dir}: has static scales, but none for the input of the classifier: --calib TEXT to measure it, "
            "or --act dynamic"
        )
    check_rows(checkpoint)
    config, stored = checkpoint.config, Int8Matrices(checkpoint)
    generation, tokenizer = text_of(checkpoint, with_tokenizer)
    act_scales = [stored.input_scale(place) for place in static_places(config)[:-1]] if static else []
    samples = read_samples(checkpoint, calibration, n_samples, seq_len) if static else []
    tensors = list(w8a8_tensors(config, 0, static))

    def load(name: str) -> np.ndarray | Quantized:
        if name == "act_scales":
            return np.array(act_scales)
        if hf_name(config, name) in checkpoint.forms and name.startswith("layers."):
            return stored.matrix(name)
        return load_weight(checkpoint, name, interleaved=True)

    with replacing(out, input_files(hf_dir, calibration)) as f:
        if static:
            largest = find_smoothing(checkpoint, samples, None, 0, True, progress).largest["norm"]
            act_scales.append(static_scale(largest))
        with progress_bar(tensors, progress, "writing") as bar:
            write_tensors(f, tensors, load, 0, bar)
        finish(f, config, generation, FORMAT, 0, weights_end(tensors), tokenizer, activations=int(static))
    if hf_out is not None:
        with after_model_file(hf_out, out):
            write_compressed_tensors(checkpoint, out, hf_out)


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
    rotate: Rotate = None,
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
    tell_model(checkpoint)
    checkpoint = rotated(checkpoint, rotate, progress)
    config = checkpoint.config
    if block:
        check_group_size(checkpoint, block, "--block")
    else:
        check_rows(checkpoint)
    generation, tokenizer = text_of(checkpoint, with_tokenizer)
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
        if progress:
            announce(hf_out, GPU_AND_CPU)
    return smoothing

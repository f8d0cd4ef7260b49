"""AWQ files for runq_awq: int4 weights in AutoAWQ's packing, norms, embedding and classifier in fp16.

The layout is version 5 of KuiperLLama's `ak48` files: docs/model-files.md. Rows of q and k stay in Hugging Face's
order: runq_awq rotates halves. How scales are found is in golden/awq_search.py. Each tensor's place in the file is
known before the first is there, so a layer is calibrated, quantized and written before the next one is read.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from export.arguments import add_calibration, calibration_options, first_given
from export.autoawq import read_group_size, stored_name, write_autoawq
from export.engines import GPU_AND_CPU, announce
from export.hf_directory import add_hf_out, after_model_file, check_destination, tell_model, unquantized
from export.rotation import Rotate, rotated
from export.tokenizer import text_of
from export.writer import Writer, finish
from formats.checkpoint import ModelError, input_files
from formats.dimensions import check_group_size
from formats.files import replacing
from formats.schemes import AWQ_FILE
from formats.source import Source, open_model
from formats.tensors import awq_tensors
from golden.awq import (
    F16,
    GROUP_SIZES,
    HEAD_DIMS,
    Packed,
    fits_half,
    group_range,
    largest_weights,
    pack_matrix,
    quantize,
    unpack,
)
from golden.awq_search import SEARCH_ROWS, choose_scales, quantize_scaled
from golden.calibration import Inputs, observe, read_samples
from golden.channel_scaling import ChannelScaling, describe, describe_errors, largest_scaled
from golden.forward import Fp32, hf_name

FORMAT = AWQ_FILE
HELP = "int4 weights, an fp16 scale and a zero point a group, for runq_awq"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of AWQ."""
    add_calibration(parser)
    parser.add_argument("--group-size", type=int, metavar="N", help="weights that share a scale: 64 or 128 (128)")
    parser.add_argument("--rtn", action="store_true",
                        help="plain rounding to nearest: no calibration, for comparison")  # fmt: skip
    add_hf_out(parser, "AutoAWQ would")
    parser.add_argument(
        "--verbose", action="store_true", help="what was chosen for every layer, and the error of every matrix"
    )


def run(args: argparse.Namespace) -> None:
    """Exports as the command line says."""
    scaling = export_awq(
        args.hf_dir, args.out, args.calib, args.group_size, args.samples, args.seq_len, args.rtn, args.hf_out,
        not args.no_tokenizer, not args.quiet, args.rotate,
    )  # fmt: skip
    if scaling.strength and (not args.quiet or args.verbose):
        print(
            *describe(scaling, args.verbose, "ratio"),
            *describe_errors(scaling, args.verbose),
            sep="\n",
            file=sys.stderr,
        )


def check_dimensions(checkpoint: Source, group_size: int, option: str) -> None:
    """Refuses groups and heads of sizes that runq_awq does not run, and matrices that are not whole groups."""
    if group_size not in GROUP_SIZES:
        raise ModelError(f"{option} is {group_size}, expected {' or '.join(map(str, GROUP_SIZES))}")
    check_group_size(checkpoint, group_size, option, GROUP_SIZES)
    head_dim = checkpoint.config.head_dim
    if head_dim not in HEAD_DIMS:
        *some, last = HEAD_DIMS
        raise ModelError(
            f"{checkpoint.config_path}: head_dim is {head_dim}, expected {', '.join(map(str, some))} or {last}"
        )


def check_activations(checkpoint: Source, largest: dict[str, float]) -> None:
    """Refuses activations beyond fp16, in which runq_awq keeps them: max|x| by place, as calibration saw them.

    These are the inputs of products. Keys, queries and values, which go into attention as fp16, are not observed.
    """
    for place, value in largest.items():
        if not fits_half(value):
            raise ModelError(f"{checkpoint.path}: activations of {place} come to {value:.6g}, fp16 ends at 65504")


def beyond(checkpoint: Source, name: str, what: object) -> ModelError:
    """The error for a tensor that fp16 cannot hold."""
    stored = stored_name(checkpoint.config, name)
    return ModelError(f"{checkpoint.path}: tensor {stored} comes to {what}, fp16 ends at 65504")


def in_half(checkpoint: Source, name: str, values: np.ndarray) -> np.ndarray:
    """A norm or a table (fp32, bf16, fp16) in fp16. Raises ModelError if a value is beyond."""
    if values.dtype == F16:
        return values
    with np.errstate(over="ignore"):
        half = values.astype(F16)
    if not np.isfinite(half).all():
        raise beyond(checkpoint, name, f"a value of {float(np.abs(values).max()):.6g}")
    return half


def repack(writer: Writer, checkpoint: Source, group_size: int, progress: bool) -> None:
    """Writes the tensors of an AutoAWQ checkpoint as they are; matrices that it skips are rounded to nearest.

    Raises ModelError if weights are beyond fp16.
    """
    rounded: dict[str, np.ndarray] = {}
    for name in tqdm(writer.names, unit="tensor", disable=not progress):
        stem, _, part = name.rpartition(".")
        if part in Packed._fields and hf_name(checkpoint.config, stem) not in checkpoint.forms:
            if part == Packed._fields[0]:
                weight = checkpoint.tensor(hf_name(checkpoint.config, stem))
                try:
                    rounded = pack_matrix(quantize(weight, *group_range(weight, group_size)))._asdict()
                except OverflowError as error:
                    raise beyond(checkpoint, stem, error) from None
            writer.write(name, rounded[part])
            continue
        value = unquantized(checkpoint, stored_name(checkpoint.config, name))
        if part == "scales":
            zeros = unpack(checkpoint.stored(stored_name(checkpoint.config, stem + ".qzeros")))
            largest = largest_weights(value, zeros)
            if not fits_half(largest):
                raise beyond(checkpoint, name, f"weights of {largest.max():.6g}")
        writer.write(name, value if part in Packed._fields else in_half(checkpoint, name, value))


def quantize_model(
    writer: Writer, checkpoint: Source, samples: list[np.ndarray], group_size: int, progress: bool
) -> ChannelScaling:
    """Quantizes and writes layer by layer, and returns the scales; without samples by plain rounding."""
    config, found = checkpoint.config, ChannelScaling()
    matrices = [name.removesuffix(".qweight") for name in writer.names if name.endswith(".qweight")]
    layers = observe(checkpoint, samples, SEARCH_ROWS, with_products=True) if samples else None

    def quantize_layer(i: int, weights: Fp32, seen: dict[str, Inputs], bar: tqdm) -> None:
        layer = f"layers.{i}."
        if samples:
            bar.set_postfix_str(layer + "scales")
            choose_scales(config, i, seen, weights, group_size, found)
        for name in (n for n in writer.names if n.startswith(layer) and n.endswith("norm")):
            writer.write(name, in_half(checkpoint, name, found.weight(config, name, weights.vector(name))))
        for name in (n for n in matrices if n.startswith(layer)):
            bar.set_postfix_str(name)
            weight = found.weight(config, name, weights.vector(name))
            try:
                packed = pack_matrix(quantize_scaled(config, name, weight, seen, found, group_size))
            except OverflowError as error:
                raise beyond(checkpoint, name, error) from None
            for part, values in zip(Packed._fields, packed, strict=True):
                writer.write(f"{name}.{part}", values)
            bar.update()
        check_activations(checkpoint, found.largest)

    with tqdm(total=len(matrices), unit="matrix", disable=not progress) as bar:
        for i in range(config.n_layers):
            if layers:
                bar.set_postfix_str("calibrating")
            weights, seen = next(layers) if layers else (Fp32(checkpoint), {})
            quantize_layer(i, weights, seen, bar)
            del weights, seen  # before the next layer's are read
    if layers:
        _, seen = next(layers)
        found.largest["norm"] = largest_scaled(config, "norm", seen["norm"].largest, None)
        check_activations(checkpoint, found.largest)
    for name in ("norm", "embed", *([] if config.tied else ["classifier"])):
        writer.write(name, in_half(checkpoint, name, unquantized(checkpoint, hf_name(config, name))))
    return found


def export_awq(
    hf_dir: Path,
    out: Path,
    calibration: Path | None = None,
    group_size: int | None = None,
    n_samples: int | None = None,
    seq_len: int | None = None,
    rtn: bool = False,
    hf_out: Path | None = None,
    with_tokenizer: bool = True,
    progress: bool = True,
    rotate: Rotate = None,
) -> ChannelScaling:
    """Writes `out` and returns the scales that were chosen. Raises ModelError, and writes nothing, if it cannot.

    calibration: a text file. It is needed unless rtn (plain rounding, neither scaling nor clipping), or unless hf_dir
    is an AutoAWQ checkpoint, whose tensors are copied as they are. group_size: 64 or 128, which is the default.
    hf_out: a directory that must not exist, for an AutoAWQ checkpoint with the same tensors. It is written when `out`
    is in its place, which then stays; the error or the KeyboardInterrupt says so.
    """
    checkpoint = open_model(hf_dir)
    stored = read_group_size(checkpoint)
    if stored is None:
        tell_model(checkpoint)
    calibrating = calibration_options(calibration, n_samples, seq_len)
    if stored is not None:
        given = {
            **calibrating,
            "--rtn": rtn,
            "--rotate": rotate,
            "--group-size": None if group_size == stored else group_size,
        }
        if option := first_given(given):
            raise ModelError(f"{hf_dir}: is quantized already, {option} would change nothing: leave it out")
    elif rtn:
        if option := first_given(calibrating):
            raise ModelError(f"{option} and --rtn exclude each other")
    elif calibration is None:
        raise ModelError("AWQ needs a text to calibrate with: --calib TEXT (or --rtn for plain rounding)")
    if hf_out is not None:
        check_destination(hf_out, out, hf_dir)
    if rotate is not None and checkpoint.config.tied:
        raise ModelError(f"{hf_dir}: its embedding is its classifier, --rotate is not possible in AWQ")
    checkpoint = rotated(checkpoint, rotate, progress)
    config, group_size = checkpoint.config, stored or (128 if group_size is None else group_size)
    check_dimensions(checkpoint, group_size, "--group-size" if stored is None else "group_size")
    generation, tokenizer = text_of(checkpoint, with_tokenizer)
    samples = []
    if calibration is not None:
        samples = read_samples(checkpoint, calibration, n_samples, seq_len)

    with replacing(out, input_files(hf_dir, calibration)) as f:
        writer, found = Writer(f, awq_tensors(config, group_size)), ChannelScaling()
        if stored is None:
            found = quantize_model(writer, checkpoint, samples, group_size, progress)
        else:
            repack(writer, checkpoint, group_size, progress)
        finish(f, config, generation, FORMAT, group_size, writer.end, tokenizer)
    if hf_out is not None:
        with after_model_file(hf_out, out):
            write_autoawq(checkpoint.path, out, hf_out)
        if progress:
            announce(hf_out, GPU_AND_CPU)
    return found

"""MoE files for runq_moe: Qwen3-MoE with its experts in A8W8, A8W4 or MXFP8, all else int8, or as experts; or a ladder.

docs/model-files.md has the layout. Experts are read, quantized and written one at a time. Smoothing (golden/smooth.py)
is that of W8A8 where it costs nothing at run time: around attention, in dense layers, and, with A8W8 experts, at the
input that router and experts share. 4-bit weights and MXFP8 do without it there: it would move what is hard to quantize
into weights that have fewer codes, or between values that have exponents of their own. Nor has a pure file any. A
ladder has the formats of export/gptq.py and is quantized as there, experts by golden/gptq_experts.py.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from export.arguments import add_calibration, calibration_options, first_given
from export.compressed_tensors import Int8Matrices, write_compressed_tensors
from export.engines import INT8_EXPERTS, warn_refused
from export.gptq import Options, write_quantized, write_repacked
from export.gptq_layout import (
    PLACES_WITH_EXPERTS,
    TABLES,
    Bits,
    check_dimensions,
    choose_expert_layout,
    describe_sizes,
    parse_bits,
)
from export.hf_directory import add_hf_out, after_model_file, check_destination, tell_model
from export.hf_gptq import Repacker, can_repack
from export.int8 import BLOCK_VALUES, progress_bar
from export.rotation import Rotate, rotated
from export.tokenizer import text_of
from export.w8a8 import parse_alpha
from export.writer import Writer, finish
from formats.checkpoint import SPARSE, Config, ModelError, input_files
from formats.dimensions import check_rows
from formats.files import replacing
from formats.low_bits import pack_codes
from formats.model_file import write_array
from formats.moe import (
    DENSE_LAYERS,
    EXPERT_FORMATS,
    LADDER,
    MoeLayout,
    check_layout,
    moe_tensors,
    pack_layout,
    router_shapes,
)
from formats.packing import INT_QUANTIZED
from formats.schemes import MOE_FILE
from formats.source import open_model
from formats.tensors import HEADER_SIZE, Tensor, norm_shapes, weights_end, with_offsets
from golden.calibration import read_samples
from golden.channel_scaling import ChannelScaling, describe
from golden.forward import load_expert, load_weight
from golden.gptq_experts import describe_tokens
from golden.grouped import assist_matrix
from golden.int4 import quantize_int4
from golden.mx import quantize_mx
from golden.q8 import Quantized, quantize
from golden.smooth import find_smoothing, load_smoothed

FORMAT = MOE_FILE
HELP = "Qwen3-MoE: experts in int8, int4 or MXFP8, all else int8 or the same; or a ladder; for runq_moe"
OTHERS = MoeLayout("a8w8", 0)  # how all matrices but the experts' are stored, unless a file is pure
DEFAULT_GROUP = {"a8w8": 0, "a8w4": 64, "mxfp8": 32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of MoE."""
    parser.add_argument("--format", choices=EXPERT_FORMATS, default="a8w8", help="of the experts (a8w8)")
    parser.add_argument("--group", type=int, metavar="N",
                        help="weights of a row that share a scale; 0: all (a8w4: 64, mxfp8: 32, "
                             "ladder: 128, or 64)")  # fmt: skip
    parser.add_argument("--bits", metavar="BITS",
                        help="ladder: 2, 4, nl4, 5, 6 or 8 for all, or by place "
                             "(embed=8,attn=4,ffn=4,experts=2,classifier=4)")  # fmt: skip
    parser.add_argument("--sparse", choices=("2:4",), help="ladder: two of each four weights at 4 bits are zero")
    parser.add_argument("--rtn", action="store_true", help="ladder: plain rounding to nearest, no calibration")
    parser.add_argument(
        "--pure", action="store_true", help="all other matrices as the experts, too; without it they are a8w8"
    )
    add_calibration(parser)
    parser.add_argument("--alpha", metavar="X", help="how far outliers move to the weights, 0 to 1 (0.5)")
    parser.add_argument("--no-smooth", action="store_true", help="quantize the weights as they are")
    add_hf_out(parser, "compressed-tensors would, with --format a8w8")


def run(args: argparse.Namespace) -> None:
    """Exports as the command line says."""
    of_ladder = {"--bits": args.bits, "--sparse": args.sparse, "--rtn": args.rtn}
    others = {"--pure": args.pure, "--alpha": args.alpha, "--no-smooth": args.no_smooth, "--hf-out": args.hf_out}
    if option := first_given(others if args.format == LADDER else of_ladder):
        raise ModelError(f"{option} does not go with --format {args.format}: leave it out")
    if args.format == LADDER:
        config, layout, seen = export_ladder(
            args.hf_dir, args.out, args.calib, args.samples, args.seq_len, parse_bits(args.bits, PLACES_WITH_EXPERTS),
            args.group, args.sparse is not None, args.rtn, not args.no_tokenizer, not args.quiet, args.rotate,
        )  # fmt: skip
        if not args.quiet:
            tokens = describe_tokens(config, seen) if seen else ()
            print(*describe_sizes(config, layout), *tokens, sep="\n", file=sys.stderr)
        return
    if args.no_smooth and args.alpha is not None:
        raise ModelError("--alpha and --no-smooth exclude each other")
    if args.pure and (option := first_given({"--alpha": args.alpha, "--no-smooth": args.no_smooth})):
        raise ModelError(f"{option} would change nothing with --pure: leave it out")
    alpha = None if args.no_smooth or args.pure else parse_alpha(args.alpha or "0.5")
    group = DEFAULT_GROUP[args.format] if args.group is None else args.group
    smoothing = export_moe(
        args.hf_dir, args.out, MoeLayout(args.format, group, args.pure), args.calib, alpha, args.samples, args.seq_len,
        args.hf_out, not args.no_tokenizer, not args.quiet, args.rotate,
    )  # fmt: skip
    if smoothing.strength and not args.quiet:
        print(*describe(smoothing), sep="\n", file=sys.stderr)


def export_moe(
    hf_dir: Path,
    out: Path,
    layout: MoeLayout,
    calibration: Path | None = None,
    alpha: float | str | None = 0.5,
    n_samples: int | None = None,
    seq_len: int | None = None,
    hf_out: Path | None = None,
    with_tokenizer: bool = True,
    progress: bool = True,
    rotate: Rotate = None,
) -> ChannelScaling:
    """Writes `out` and returns what calibration chose. Raises ModelError, and writes nothing, for what cannot be done.

    calibration: a text file, needed unless alpha is None (no smoothing), when neither it nor n_samples nor seq_len may
    be given.
    rotate: as of `export.rotation.rotated`.
    hf_out: a directory that must not exist, for a compressed-tensors checkpoint; with a8w8 alone. It is written when
    `out` is in its place, which then stays; the error or the KeyboardInterrupt says so.
    """
    if layout.pure and layout.format == "a8w8":
        raise ModelError("--pure would change nothing with --format a8w8, which is int8 everywhere: leave it out")
    if alpha == "auto":
        raise ModelError("--alpha is auto, which moe has not: expected 0 to 1")
    if alpha is not None and calibration is None:
        raise ModelError("smoothing needs a text to calibrate with: --calib TEXT")
    if alpha is None and (option := first_given(calibration_options(calibration, n_samples, seq_len))):
        why = "--pure" if layout.pure else "--no-smooth"
        raise ModelError(f"{option} would change nothing with {why}: leave it out")
    if hf_out is not None:
        if layout.format != "a8w8":
            raise ModelError(f"--hf-out has int8 experts, --format {layout.format} has others: use --format a8w8")
        check_destination(hf_out, out, hf_dir)
    checkpoint = open_model(hf_dir, archs=SPARSE)
    # Codes of int8 are kept where a matrix is int8 and smoothing leaves it as it is.
    forms = {getattr(form, "method", "") for form in checkpoint.forms.values()}
    int8 = Int8Matrices(checkpoint) if forms == {INT_QUANTIZED} and alpha is None and rotate is None else None
    if int8 is None or layout.format != "a8w8":
        tell_model(checkpoint)
    checkpoint = rotated(checkpoint, rotate, progress)
    config = checkpoint.config
    check_rows(checkpoint)
    check_layout(checkpoint.config_path, config, layout, "--group")
    generation, tokenizer = text_of(checkpoint, with_tokenizer)
    samples = [] if alpha is None else read_samples(checkpoint, calibration, n_samples, seq_len)
    if hf_out is not None:
        warn_refused(INT8_EXPERTS)
    tensors = list(moe_tensors(config, layout))
    end = weights_end(tensors, FORMAT.alignment)

    with replacing(out, input_files(hf_dir, calibration)) as f:
        smoothing = ChannelScaling()
        if samples:
            smoothing = find_smoothing(checkpoint, samples, alpha, progress=progress)
            drop_experts(config, layout, smoothing)
        load = partial(load_smoothed, checkpoint, smoothing=smoothing, interleaved=True)
        with progress_bar(tensors, progress, "writing") as bar:
            write_moe(f, tensors, load, config, layout, bar, int8)
        finish(f, config, generation, FORMAT, 0, end, tokenizer, own=pack_layout(config, layout))
    if hf_out is not None:
        with after_model_file(hf_out, out):
            write_compressed_tensors(checkpoint, out, hf_out)
    return smoothing


def export_ladder(
    hf_dir: Path,
    out: Path,
    calibration: Path | None = None,
    n_samples: int | None = None,
    seq_len: int | None = None,
    bits: Bits | None = None,
    group: int | None = None,
    sparse: bool = False,
    rtn: bool = False,
    with_tokenizer: bool = True,
    progress: bool = True,
    rotate: Rotate = None,
) -> tuple[Config, MoeLayout, dict[str, np.ndarray]]:
    """Writes `out` in the formats of a ladder; returns what its header says, and the tokens that each expert saw.

    Raises ModelError, and writes nothing, for what cannot be done. calibration: a text file, needed unless rtn, or
    unless hf_dir is quantized already in integers that the file has room for: they are repacked code for code. bits,
    group, sparse: see export/gptq_layout.py. rotate: as of `export.rotation.rotated`.
    """
    calibrating = calibration_options(calibration, n_samples, seq_len)
    checkpoint, bits = open_model(hf_dir, archs=SPARSE), bits or {}
    config = checkpoint.config
    check_dimensions(checkpoint)
    repacker = Repacker(checkpoint) if can_repack(checkpoint) else None
    if repacker is not None and repacker.has_order:
        why = "its groups are scattered over the inputs (desc_act), which a file with experts cannot say"
        warnings.warn(f"{hf_dir}: {why}", stacklevel=2)
        repacker = None
    if repacker is not None:
        layers = {f"--bits {place}": n for place, n in bits.items() if place not in TABLES}
        if option := first_given(
            {**calibrating, "--rtn": rtn, "--group": group, "--sparse": sparse, "--rotate": rotate, **layers}
        ):
            raise ModelError(f"{hf_dir}: is quantized already, {option} would change nothing: leave it out")
        bits = {"embed": 8, "classifier": 8} | bits
    elif rtn and (option := first_given(calibrating)):
        raise ModelError(f"{option} and --rtn exclude each other")
    elif not rtn and calibration is None:
        raise ModelError("GPTQ needs a text to calibrate with: --calib TEXT (or --rtn for plain rounding)")
    if config.tied and bits.get("classifier", bits.get("embed", 8)) != bits.get("embed", 8):
        raise ModelError("--bits: the classifier is the embedding and has its bits")
    layout = choose_expert_layout(config, bits, group, sparse)
    if repacker is not None:
        layout = repacker.layout(layout)
    else:
        tell_model(checkpoint)
        checkpoint = rotated(checkpoint, rotate, progress)
        config = checkpoint.config
    samples = [] if calibration is None else read_samples(checkpoint, calibration, n_samples, seq_len)
    generation, tokenizer = text_of(checkpoint, with_tokenizer)
    with replacing(out, input_files(hf_dir, calibration)) as f:
        writer = Writer(f, moe_tensors(config, layout), FORMAT.alignment)
        writer.write(DENSE_LAYERS, dense_layers(config))
        for name, _ in (*norm_shapes(config), *router_shapes(config)):
            writer.write(name, load_weight(checkpoint, name, interleaved=True))
        seen: dict[str, np.ndarray] = {}
        if repacker is not None:
            write_repacked(writer, checkpoint, config, layout, repacker, progress)
        else:
            options = Options(rtn=rtn)
            seen = write_quantized(writer, checkpoint, config, layout, samples, options, progress)
        own = pack_layout(config, layout)
        finish(f, config, generation, FORMAT, layout.activation_group, writer.end, tokenizer, own=own)
    return config, layout, seen


def dense_layers(config: Config) -> np.ndarray:
    """The first tensor of a file, (n_layers,) uint8."""
    return np.array([not config.has_experts(i) for i in range(config.n_layers)], np.uint8)


def drop_experts(config: Config, layout: MoeLayout, smoothing: ChannelScaling) -> None:
    """Takes the factors of the experts' input out, unless experts are int8."""
    if layout.format != "a8w8":
        for i in range(config.n_layers):
            if config.has_experts(i):
                smoothing.s.pop(f"layers.{i}.ffn.norm", None)
                smoothing.strength.pop(f"layers.{i}.ffn.norm", None)


def quantized_rows(weight: np.ndarray, layout: MoeLayout) -> Iterator[np.ndarray]:
    """What a file has of rows (n, n_in) fp32 of a matrix: codes, scales, and of a8w4 the assist matrix's part."""
    if layout.format == "a8w8":
        codes, scales = quantize(weight, weight.shape[1])
        yield from (codes, scales[:, 0])
    elif layout.format == "mxfp8":
        yield from quantize_mx(weight, layout.group)[:2]
    else:
        codes, scales = quantize_int4(weight, layout.group)
        yield pack_codes((codes + np.int8(8)).astype(np.uint8), 4)
        yield scales if layout.group else scales[:, 0]
        yield assist_matrix(codes[None], scales[None])[0]


def write_stored(f: BinaryIO, weights: Iterable[np.ndarray | Quantized], layout: MoeLayout) -> dict[str, np.ndarray]:
    """Appends the codes of matrices (n_out, n_in) fp32 or int8, one behind the other; what else a file has of them."""
    others: list[list[np.ndarray]] = []
    for weight in weights:
        if isinstance(weight, Quantized):
            write_array(f, weight.codes, "i1")
            others.append([weight.scales[:, 0]])
            continue
        rows = max(1, BLOCK_VALUES // weight.shape[1])
        for start in range(0, len(weight), rows):
            codes, *rest = quantized_rows(weight[start : start + rows], layout)
            write_array(f, codes, codes.dtype.str)
            others.append(rest)
    return {
        name: np.concatenate(parts)
        for name, parts in zip(("scales", "assist"), zip(*others, strict=True), strict=False)
    }


def write_moe(
    f: BinaryIO,
    tensors: list[Tensor],
    load: Callable[[str], np.ndarray],
    config: Config,
    layout: MoeLayout,
    bar: tqdm,
    int8: Int8Matrices | None = None,
) -> None:
    """Writes every tensor at its place, behind room for the header. load(name): the values of a weight, fp32.

    int8: matrices whose codes are kept where the file has them.
    """

    def load_stored(name: str, how: MoeLayout) -> np.ndarray | Quantized:
        return int8.matrix(name) if int8 is not None and how.format == "a8w8" and int8.has(name) else load(name)

    assert config.moe is not None
    f.write(bytes(HEADER_SIZE))
    waiting: dict[str, np.ndarray] = {}  # what a matrix has besides its codes
    for tensor in with_offsets(tensors, alignment=FORMAT.alignment):
        f.write(bytes(tensor.offset - f.tell()))
        stem, _, part = tensor.name.rpartition(".")
        if tensor.name == DENSE_LAYERS:
            write_array(f, dense_layers(config), tensor.dtype)
        elif part != "codes":
            values = waiting.pop(tensor.name) if tensor.name in waiting else load(tensor.name)
            write_array(f, values.reshape(tensor.shape), tensor.dtype)
        else:
            bar.set_postfix_str(stem)
            how = layout if ".moe." in stem or layout.pure else OTHERS
            by_name = partial(load_stored, how=how)
            experts = (load_expert(by_name, stem, expert) for expert in range(config.moe.n_experts))
            weights = experts if ".moe." in stem else [by_name(stem)]
            waiting |= {f"{stem}.{name}": values for name, values in write_stored(f, weights, how).items()}
        if part not in ("scales", "assist"):
            bar.update()

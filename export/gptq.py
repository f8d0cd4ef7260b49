"""GPTQ files for runq_gptq: a ladder of 8, 4 and 2 bits, dense or 2:4 sparse.

The layout is in formats/gptq.py and docs/model-files.md, the formats are in golden/gptq.py, the quantizer is in
golden/gptq_quantize.py. Rows of q and k (and Qwen3's head norms) are in adjacent pairs, as in Q8 files. Each tensor's
place in the file is known before the first is there, so matrices are written as soon as they are quantized.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from export.arguments import add_calibration, calibration_options, first_given
from export.engines import GPU_AND_CPU, announce, gptq_refused, warn_refused
from export.gptq_layout import Bits, budget_forms, check_dimensions, choose_layout, describe_sizes, parse_bits
from export.hf_directory import add_hf_out, after_model_file, check_destination, tell_model
from export.hf_gptq import Repacker, can_repack, check_expressible, write_gptq_checkpoint
from export.rotation import Rotate, rotated
from export.tokenizer import text_of
from export.writer import Writer, finish
from formats.checkpoint import Config, ModelError, input_files
from formats.files import replacing
from formats.gptq import GptqLayout, MatrixFormat, gptq_tensors, pack_layout
from formats.moe import MoeLayout, expert_shapes
from formats.schemes import GPTQ_FILE
from formats.source import Source, open_model
from formats.tensors import matrix_shapes, norm_shapes
from golden.calibration import read_samples
from golden.forward import expert_steps, load_expert, load_weight
from golden.gptq import Matrix, joined, pack_matrix, stands_for
from golden.gptq_budget import choose, kinds_of, measure_losses
from golden.gptq_calibration import quantize_model
from golden.gptq_matching import classifier_hessian, quantize_matching
from golden.gptq_quantize import Curvature, column_order, damped, factored, quantize_matrix, round_best, round_matrix
from golden.gptq_refine import refine
from golden.parallel import in_parallel

FORMAT = GPTQ_FILE
HELP = "GPTQ: 8, 4 and 2 bits by component, for runq_gptq"
MAX_ROUNDS = 100  # of --refine; after a few nothing changes
ROWS = 384  # of a matrix, at most, that are quantized at a time


class Options(NamedTuple):
    """How weights are quantized."""

    rtn: bool = False  # plain rounding, no calibration
    symmetric: bool | None = None  # at 4 bits: zero point 8. None: with hf_out, as engines want it
    act_order: bool = True  # groups and columns with large inputs go first
    first_zero: int = 0  # the smallest zero point at 4 bits
    refine: int = 0  # rounds of golden.gptq_refine after GPTQ; the tied embedding then gets GPTQ, too
    match: bool = False  # matrices make up for the error before them (golden.gptq_matching)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of GPTQ."""
    add_calibration(parser)
    parser.add_argument("--bits", metavar="BITS",
                        help="2, 4, nl4, 5, 6, 8 for all, or by place (embed=8,attn=4,ffn=2,classifier=4)")  # fmt: skip
    parser.add_argument("--group", type=int, metavar="N",
                        help="weights that share a scale at 4 to 6 bits: 32, 64, 128 (128, or 64)")  # fmt: skip
    parser.add_argument("--sparse", choices=("2:4",), help="two of each four weights of layers at 4 bits are zero")
    parser.add_argument("--sym", action=argparse.BooleanOptionalAction,
                        help="zero point 8 at 4 bits (with --hf-out, as vLLM takes no other)")  # fmt: skip
    parser.add_argument("--act-order", action=argparse.BooleanOptionalAction, default=True,
                        help="groups and channels with large activations are rounded first (they are)")  # fmt: skip
    parser.add_argument("--rtn", action="store_true",
                        help="plain rounding to nearest: no calibration, for comparison")  # fmt: skip
    parser.add_argument("--refine", type=int, default=0, metavar="N",
                        help="rounds of improving scales and codes after GPTQ (0; 2 gain most)")  # fmt: skip
    parser.add_argument("--match", action="store_true",
                        help="matrices also make up for the error of those before them")  # fmt: skip
    parser.add_argument("--budget", type=float, metavar="BITS",
                        help="bits per weight of the whole file; --bits by measured losses")  # fmt: skip
    add_hf_out(parser, "GPTQModel would")
    parser.add_argument("--untie", action="store_true",
                        help="where the embedding is the classifier, store the classifier on its own, too")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Exports as the command line says."""
    config, layout = export_gptq(
        args.hf_dir, args.out, args.calib, args.samples, args.seq_len, parse_bits(args.bits), args.group,
        args.sparse is not None,
        Options(args.rtn, args.sym, args.act_order, int(args.hf_out is not None), args.refine, args.match), args.untie,
        args.hf_out, not args.no_tokenizer, not args.quiet, args.budget, args.rotate,
    )  # fmt: skip
    if not args.quiet:
        print(*describe_sizes(config, layout), sep="\n", file=sys.stderr)


class MatrixWriter:
    """Writes the tensors of matrices; those of experts, which come one after the other, when all are there."""

    def __init__(self, writer: Writer, config: Config):
        self._writer, self._experts = writer, dict(expert_shapes(config))
        self._waiting: list[dict[str, np.ndarray]] = []  # of experts

    def put(self, name: str, matrix: Matrix) -> None:
        """Writes a matrix, or takes that of the next expert."""
        parts = pack_matrix(matrix)
        if name in self._experts:
            self._waiting.append(parts)
            if len(self._waiting) < self._experts[name][0]:
                return
            parts = {part: np.stack([expert[part] for expert in self._waiting]) for part in parts}
            self._waiting = []
        for part, values in parts.items():
            self._writer.write(f"{name}.{part}", values)


Rounding = Callable[[np.ndarray], Matrix]  # of rows (n, n_in) of a matrix, which do not depend on each other


def by_rows(path: Path, jobs: Sequence[tuple[str, np.ndarray, Rounding]]) -> list[Matrix]:
    """What each job makes of its matrix: (name, weight, rounding), some hundred rows at a time, side by side.

    Raises ModelError, naming the matrix of the file `path`, if fp16 cannot hold a scale.
    """
    counts = [-(-len(weight) // ROWS) for _, weight, _ in jobs]
    calls = [
        partial(_named, f"{path}: {name}", call, rows)
        for (name, weight, call), n in zip(jobs, counts, strict=True)
        for rows in np.array_split(weight, n)
    ]
    found = iter(in_parallel(calls))
    return [joined(list(islice(found, n))) for n in counts]


def _named(name: str, rounding: Rounding, rows: np.ndarray) -> Matrix:
    try:
        return rounding(rows)
    except OverflowError as error:
        raise ModelError(f"{name} has {error}") from None


def gptq(rows: np.ndarray, inputs: Curvature, form: MatrixFormat, options: Options, hessian: np.ndarray) -> Matrix:
    """GPTQ, and as many rounds of refining as the options say. hessian: damped."""
    found = quantize_matrix(rows, inputs, form, options.symmetric, options.first_zero)
    return refine(rows, found, hessian, options.refine)


class Quantizer:
    """Quantizes the matrices of one model as the options say, and names the matrix that fp16 cannot hold."""

    def __init__(self, path: Path, layout: GptqLayout | MoeLayout, options: Options):
        self._path, self._layout, self._options = path, layout, options
        self._hessian: np.ndarray | None = None  # of the last place, so that q, k and v share its factors
        self._curvature: dict[MatrixFormat, Curvature] = {}
        self._damped, self._inverse = np.empty(0), np.empty(0)

    def _gptq(self, hessian: np.ndarray, form: MatrixFormat) -> Rounding:
        if self._hessian is not hessian:
            self._hessian, self._curvature, self._damped = hessian, {}, damped(hessian)
            self._inverse = np.linalg.inv(self._damped)
        if form not in self._curvature:
            diagonal = np.diag(hessian)
            order = column_order(diagonal, form) if self._options.act_order else np.arange(len(diagonal))
            self._curvature[form] = factored(self._inverse, order)
        return partial(gptq, inputs=self._curvature[form], form=form, options=self._options, hessian=self._damped)

    def calibrated(self, name: str, weight: np.ndarray, hessian: np.ndarray) -> Matrix:
        """By GPTQ. weight: (n_out, n_in) fp32; hessian: (n_in, n_in) fp64."""
        return by_rows(self._path, [(name, weight, self._gptq(hessian, self._layout.of(name)))])[0]

    def candidates(
        self, weights: Mapping[str, np.ndarray], hessian: np.ndarray, forms: Mapping[str, Sequence[MatrixFormat]]
    ) -> list[tuple[str, Matrix]]:
        """By GPTQ, matrices that read the same, each in several formats: name and matrix of each. forms: by name."""
        jobs = [(name, weights[name], self._gptq(hessian, form)) for name in weights for form in forms[name]]
        return list(zip((name for name, *_ in jobs), by_rows(self._path, jobs), strict=True))

    def embedding(self, weight: np.ndarray, hessian: np.ndarray | None) -> Matrix:
        """The embedding: to nearest, on searched grids; by GPTQ if it is the classifier and is to be refined.

        hessian: of the classifier's inputs, if the embedding is the classifier.
        """
        if hessian is not None and self._options.refine:
            return self.calibrated("embed", weight, hessian)
        return self.rounded("embed", weight, None if hessian is None else np.diag(hessian))

    def rounded(self, name: str, weight: np.ndarray, importance: np.ndarray | None = None) -> Matrix:
        """By rounding to nearest; on searched grids unless the options say plain."""
        form, o = self._layout.of(name), self._options
        call = partial(round_matrix) if o.rtn else partial(round_best, importance=importance)
        settings = {"form": form, "symmetric": o.symmetric, "first_zero": o.first_zero}
        return by_rows(self._path, [(name, weight, partial(call, **settings))])[0]


def write_quantized(
    writer: Writer,
    checkpoint: Source,
    config: Config,
    layout: GptqLayout | MoeLayout,
    samples: Sequence[np.ndarray],
    options: Options,
    progress: bool,
) -> dict[str, np.ndarray]:
    """Quantizes and writes every matrix; by plain rounding without samples. config, layout: of the file.

    Returns how many tokens of the samples each expert saw, (E,) by the step of its layer's router.
    """
    seen: dict[str, np.ndarray] = {}
    quantizer, matrices = Quantizer(checkpoint.path, layout, options), MatrixWriter(writer, config)
    names = [name for name, _ in matrix_shapes(config)]
    experts = [(name, expert) for name, (n_experts, *_) in expert_shapes(config) for expert in range(n_experts)]
    with tqdm(total=len(names) + len(experts), unit="matrix", disable=not progress) as bar:

        def put(name: str, matrix: Matrix) -> None:
            matrices.put(name, matrix)
            bar.set_postfix_str(name)
            bar.update()

        def load(name: str) -> np.ndarray:
            return load_weight(checkpoint, name, interleaved=True)

        if not samples:
            for name in names:
                put(name, quantizer.rounded(name, load(name)))
            for name, expert in experts:
                put(name, quantizer.rounded(name, load_expert(load, name, expert)))
            return seen
        hessian, embedding = None, None
        if options.match:
            if config.tied:
                hessian = classifier_hessian(checkpoint, config, list(samples))
            embed = quantizer.embedding(load("embed"), hessian)
            put("embed", embed)
            embedding = stands_for(embed).__getitem__
            found_matrices = quantize_matching(checkpoint, config, list(samples), quantizer.calibrated, embedding)
        else:
            found_matrices = quantize_model(checkpoint, config, list(samples), quantizer.calibrated)
        for name, found in found_matrices:
            if name == "norm":
                hessian = found
            elif isinstance(found, Matrix):
                put(name, found)
            else:
                seen[name] = found
        if "classifier" in names:
            put("classifier", quantizer.calibrated("classifier", load("classifier"), hessian))
        if not options.match:
            put("embed", quantizer.embedding(load("embed"), hessian if config.tied else None))
    return seen


def write_repacked(
    writer: Writer,
    checkpoint: Source,
    config: Config,
    layout: GptqLayout | MoeLayout,
    repacker: Repacker,
    progress: bool,
) -> None:
    """Writes the matrices of a quantized checkpoint, code for code; those that are not quantized are rounded."""
    quantizer, matrices = Quantizer(checkpoint.path, layout, Options()), MatrixWriter(writer, config)
    for place, order in repacker.orders.items():
        writer.write(place + ".order", order)

    def stored(name: str) -> Matrix:
        weight = repacker.plain(name)
        return repacker.matrix(name) if weight is None else quantizer.rounded(name, weight)

    steps = [(name, [name]) for name, _ in matrix_shapes(config)]
    steps += [(name, expert_steps(name, i)) for name, (n, *_) in expert_shapes(config) for i in range(n)]
    for name, parts in tqdm(steps, unit="matrix", disable=not progress):
        matrices.put(name, joined([stored(part) for part in parts]))
    if repacker.n_rounded:
        warnings.warn(
            f"{checkpoint.path}: {repacker.n_rounded} scales below 2^-14 are rounded to fp16, by at most 2^-25",
            stacklevel=2,
        )


def spend(
    checkpoint: Source,
    config: Config,
    samples: list[np.ndarray],
    bits: float,
    group: int | None,
    options: Options,
    progress: bool,
) -> GptqLayout:
    """The layout for a file of at most so many bits per weight, by measured losses. group: the only one at 4 bits."""
    layout = choose_layout(config, {}, group, sparse=False)  # refuses a group that does not divide
    quantizer = Quantizer(checkpoint.path, layout, options._replace(refine=0))
    forms = {kind: budget_forms(config, kind, group) for kind in kinds_of(config)}
    losses = measure_losses(checkpoint, config, samples, forms, quantizer.candidates, progress)
    if progress:
        for kind, of_kind in losses.items():
            for form, loss in of_kind.items():
                print(f"{kind:<10} {loss:.5f} nats  {form}", file=sys.stderr)
    return choose(config, losses, bits)


def export_gptq(
    hf_dir: Path,
    out: Path,
    calibration: Path | None = None,
    n_samples: int | None = None,
    seq_len: int | None = None,
    bits: Bits | None = None,
    group: int | None = None,
    sparse: bool = False,
    options: Options = Options(),  # noqa: B008  (a tuple)
    untie: bool = False,
    hf_out: Path | None = None,
    with_tokenizer: bool = True,
    progress: bool = True,
    budget: float | None = None,
    rotate: Rotate = None,
) -> tuple[Config, GptqLayout]:
    """Writes `out`, and returns what its header says. Raises ModelError, and writes nothing, for what cannot be done.

    calibration: a text file, needed unless options.rtn, or unless hf_dir is quantized already in integers that the file
    has room for (GPTQ, AutoAWQ, compressed-tensors): they are repacked code for code. bits: by place, LADDER's for
    those that are missing.
    rotate: as of `export.rotation.rotated`.
    budget: bits per weight of the file, in the place of bits: what each kind of matrix loses is measured first
    (golden/gptq_budget.py). hf_out: a directory that must not exist, for a GPTQ checkpoint; options.first_zero is 1
    then, and a warning says what vLLM refuses of it. It is written when `out` is in its place, which then stays; the
    error or the KeyboardInterrupt says so.
    """
    checkpoint = open_model(hf_dir)
    packed = can_repack(checkpoint)
    if hf_out is not None:
        check_destination(hf_out, out, hf_dir)
    calibrating = calibration_options(calibration, n_samples, seq_len)
    if packed:
        given = {
            **calibrating, "--rtn": options.rtn, "--sym": options.symmetric, "--no-sym": options.symmetric is False,
            "--group": group, "--sparse": sparse, "--refine": options.refine or None, "--match": options.match,
            "--budget": budget, "--rotate": rotate,
            "--bits attn": (bits or {}).get("attn"), "--bits ffn": (bits or {}).get("ffn"),
        }  # fmt: skip
        if option := first_given(given):
            raise ModelError(f"{hf_dir}: is quantized already, {option} would change nothing: leave it out")
    elif options.rtn:
        calibrated = {"--refine": options.refine or None, "--match": options.match, "--budget": budget}
        if option := first_given({**calibrating, **calibrated}):
            raise ModelError(f"{option} and --rtn exclude each other")
    elif calibration is None:
        raise ModelError("GPTQ needs a text to calibrate with: --calib TEXT (or --rtn for plain rounding)")
    if not 0 <= options.refine <= MAX_ROUNDS:
        raise ModelError(f"--refine is {options.refine}, expected 0 to {MAX_ROUNDS}")
    if budget is not None and (option := first_given({"--bits": bits or None, "--sparse": sparse})):
        raise ModelError(f"{option} and --budget exclude each other")
    if budget is not None and not budget > 0:
        raise ModelError(f"--budget is {budget:g}, expected a positive number of bits")
    if options.symmetric is None:
        options = options._replace(symmetric=hf_out is not None)
    config, bits = checkpoint.config, bits or {}
    check_dimensions(checkpoint)
    if untie and not config.tied:
        raise ModelError(f"{hf_dir}: its classifier is a matrix of its own, --untie would change nothing: leave it out")
    checkpoint = rotated(checkpoint, rotate, progress, untie)
    config = replace(checkpoint.config, tied=False) if untie else checkpoint.config
    if config.tied and bits.get("classifier", bits.get("embed", 8)) != bits.get("embed", 8):
        raise ModelError("--bits: the classifier is the embedding and has its bits; --untie stores it on its own")
    repacker = None
    if packed:
        repacker = Repacker(checkpoint)
        bits = {"embed": 8, "classifier": 8} | bits
        layout = repacker.layout(choose_layout(config, bits, None, False))
    else:
        tell_model(checkpoint)
        layout = choose_layout(config, bits, group, sparse)
    samples = []
    if calibration is not None:
        samples = read_samples(checkpoint, calibration, n_samples, seq_len)
    if budget is not None:
        layout = spend(checkpoint, config, samples, budget, group, options, progress)
    if hf_out is not None:
        form = check_expressible(layout, repacked=packed)
        if not packed:  # of a checkpoint's codes, zero points say it: as soon as they are read
            warn_refused(gptq_refused(form, options.symmetric or form.bits == 8, has_order=False))
    generation, tokenizer = text_of(checkpoint, with_tokenizer)
    with replacing(out, input_files(hf_dir, calibration)) as f:
        writer = Writer(f, gptq_tensors(config, layout), FORMAT.alignment)
        for name, _ in norm_shapes(config):
            writer.write(name, load_weight(checkpoint, name, interleaved=True))
        if repacker:
            write_repacked(writer, checkpoint, config, layout, repacker, progress)
        else:
            write_quantized(writer, checkpoint, config, layout, samples, options, progress)
        group_size, own = layout.activation_group, pack_layout(layout)
        finish(f, config, generation, FORMAT, group_size, writer.end, tokenizer, own=own)
    if hf_out is not None:
        with after_model_file(hf_out, out):
            symmetric = write_gptq_checkpoint(checkpoint, out, hf_out)
        refused = gptq_refused(form, symmetric, layout.has_order)
        if packed:
            warn_refused(refused)
        if progress and not refused:
            announce(hf_out, GPU_AND_CPU)
    return config, layout

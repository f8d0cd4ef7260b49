"""Held-out perplexity and recall under each quantization scheme, of models with outlier channels.

    python -m models.compare_schemes [HF_DIR ...] [--plain] [--all-places] [--json FILE]
    python -m models.compare_schemes MODEL --text TEXT [--tokens N] [--window N] [--keep FOLDER] [--bench P,N]
                                     [--samples N] [--rows PATTERN ...] [--weights-only] [--gguf FILE ...]
                                     [--json FILE] [--page FILE]

The first is for the tiny models, the second for a real one. Without directories, of tiny-llama and tiny-qwen3. Each
model first gets outlier channels (models/outliers.py); with --plain it stays as it is. What is measured is
models/evaluate.py's, by the reference forward pass of golden/:

    fp32                        the weights as they are
    Q8, groups of 64            weights and activations in groups (golden/q8.py)
    W8A8, no smoothing          a scale for each row of weights and each token (golden/w8a8.py)
    W8A8, alpha 0.5 and auto    the same after SmoothQuant, calibrated on models/calibration.txt
    AWQ, plain rounding         int4 weights in groups of 128, activations in fp16 (golden/awq.py)
    AWQ; AWQ, groups of 64      the same after the search of scales and clipping (golden/awq_search.py)

A mixture of experts gets no outliers (--plain). It is measured in fp32 and in what `python -m export moe` makes of it:
A8W8, A8W4 in groups of 64, MXFP8 in blocks of 32, these two also in all matrices (golden/moe.py), and ladders with
experts of 8, 4 and 2 bits.

Models with outliers and the W8A8 and AWQ files, made by `python -m export`, go to a temporary directory.

With --text, all schemes and their variants on a model as it is, a directory or a GGUF file: calibrated on the first
of the text, measured on up to N tokens of the second, in windows of N. Sizes, perplexity and the divergence from the
unquantized model are models/quality.py's. With --keep FOLDER, model files and figures stay there, some ten times the
room of the model in int8, and what is there is not measured again. --bench measures the speed of each file anew, by its
program: P tokens of a prompt, N generated ones. Programs that are emulated here have none. --page puts the table into
a page of Markdown that has one. --rows takes the schemes whose names match a pattern, such as 'GPTQ*'; --samples N
calibrates them on as many samples. --weights-only leaves activations in fp32 and counts the bytes of weights alone, so
that a row says what its format of weights is worth; --gguf does so, too, and adds GGUF files of the same model that
llama-quantize made.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from formats.checkpoint import DENSE, SPARSE, Checkpoint, Config, ModelError
from golden.calibration import read_text
from golden.forward import Fp32, Scheme, forward
from golden.q8 import Q8
from golden.schemes import read_file
from models import quality
from models.evaluate import evaluate_directory
from models.outliers import copy_with_outliers

HERE = Path(__file__).parent
CALIBRATION = ["--calib", str(HERE / "calibration.txt"), "--samples", "16", "--seq-len", "256"]
VARIANTS = {  # sub-command and options of the exporter
    "W8A8, no smoothing": ["w8a8", "--no-smooth"],
    "W8A8, alpha 0.5": ["w8a8", *CALIBRATION, "--alpha", "0.5"],
    "W8A8, alpha auto": ["w8a8", *CALIBRATION, "--alpha", "auto"],
    "AWQ, plain rounding": ["awq", "--rtn"],
    "AWQ": ["awq", *CALIBRATION],
    "AWQ, groups of 64": ["awq", *CALIBRATION, "--group-size", "64"],
}

MOE_VARIANTS = {
    "A8W8": ["moe", *CALIBRATION, "--format", "a8w8"],
    "A8W4, groups of 64": ["moe", *CALIBRATION, "--format", "a8w4"],
    "A8W4, pure": ["moe", "--pure", "--format", "a8w4"],
    "MXFP8, blocks of 32": ["moe", *CALIBRATION, "--format", "mxfp8"],
    "MXFP8, pure": ["moe", "--pure", "--format", "mxfp8"],
}
LADDERS = {  # of experts, by their bits
    "8 bits everywhere": ["--bits", "8"],
    "4 bits, groups of 64": ["--bits", "experts=4", "--group", "64"],
    "4 bits, 2:4": ["--bits", "experts=4", "--group", "64", "--sparse", "2:4"],
    "2 bits": [],
}
MOE_VARIANTS |= {
    f"Ladder, {name}{how}": ["moe", "--format", "ladder", *options, *calibration]
    for name, options in LADDERS.items()
    for how, calibration in (("", CALIBRATION), (", plain rounding", ["--rtn"]))
}


def schemes(hf_dir: Path, folder: Path) -> Iterator[tuple[str, Config, Scheme]]:
    """Each scheme with its name; exports go to `folder`."""
    checkpoint = Checkpoint(hf_dir, archs=(*DENSE, *SPARSE))
    is_dense = checkpoint.config.moe is None
    yield "fp32", checkpoint.config, Fp32(checkpoint)
    if is_dense:
        yield "Q8, groups of 64", checkpoint.config, Q8(checkpoint, 64)
    for i, (name, options) in enumerate((VARIANTS if is_dense else MOE_VARIANTS).items()):
        out = folder / f"{i}.bin"
        quality.export(hf_dir, out, options)
        scheme = read_file(out)
        yield name, scheme.config, scheme


def compare(hf_dir: Path, folder: Path) -> dict[str, dict]:
    """models.evaluate's figures by scheme."""
    figures = {}
    for name, config, scheme in schemes(hf_dir, folder):
        figures[name] = evaluate_directory(hf_dir, partial(forward, config, scheme))
    return figures


def table(title: str, figures: dict[str, dict]) -> str:
    """Markdown: perplexity, how much more it is than the first scheme's, recall."""
    lines = [
        f"| {title} | perplexity | | recall, first token | all tokens | of the reachable |",
        "|---|---|---|---|---|---|",
    ]
    base = next(iter(figures.values()))["perplexity"]
    for name, f in figures.items():
        more = "" if not lines[2:] else f"{100 * (f['perplexity'] / base - 1):+.2f} %"
        recalls = " | ".join(
            f"{100 * f[key]:.1f} %" for key in ("recall_first_token", "recall_all_tokens", "recall_reachable")
        )
        lines.append(f"| {name} | {f['perplexity']:.4f} | {more} | {recalls} |")
    return "\n".join(lines)


def compare_real(args: argparse.Namespace) -> int:
    """With --text."""
    (model,) = args.directories
    try:
        text = read_text(args.text)
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep or Path(temporary)
            found = quality.compare(
                model, text, folder, args.tokens, args.window, args.bench, not args.quiet,
                args.rows, args.weights_only, args.gguf, args.samples,
            )  # fmt: skip
        heading = "weights" if args.weights_only else "scheme"
        print(quality.table(found.rows, heading))
        print(f"\n{found.model}: {found.tokens} tokens in windows of {found.window}")
        if found.left_out:
            print(f"Groups do not divide the rows of the model: {'; '.join(found.left_out)}")
        if args.json:
            args.json.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
        if args.page:
            page = quality.put_table(args.page.read_text(encoding="utf-8"), found.rows, heading)
            args.page.write_text(page, encoding="utf-8")
    except (ModelError, OSError, ValueError) as error:
        print(f"compare_schemes: {error}", file=sys.stderr)
        return 1
    return 0


def bench_sizes(text: str) -> str:
    """`P,N` as it is. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]+,[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text}, expected P,N")
    return text


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m models.compare_schemes", description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="*", type=Path, metavar="MODEL")
    parser.add_argument("--plain", action="store_true", help="without outliers")
    parser.add_argument("--all-places", action="store_true", help="outliers also in the inputs of o and down")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    real = parser.add_argument_group("for a real model")
    real.add_argument("--text", type=Path, metavar="TEXT", help="a text to calibrate on and to measure with")
    real.add_argument("--tokens", type=int, default=20000, metavar="N", help="how many to measure on (20000)")
    real.add_argument("--window", type=int, metavar="N", help="tokens that are seen at a time (1024)")
    real.add_argument("--keep", type=Path, metavar="FOLDER", help="where model files and figures stay")
    real.add_argument(
        "--rows",
        nargs="*",
        default=["*"],
        metavar="PATTERN",
        help="which schemes, by name (all); none if there is no pattern",
    )
    real.add_argument("--weights-only", action="store_true", help="activations in fp32; sizes of the weights alone")
    real.add_argument("--gguf", nargs="+", type=Path, default=[], metavar="FILE",
                      help="GGUF files of the model to compare with; implies --weights-only")  # fmt: skip
    real.add_argument("--samples", type=int, metavar="N", help="of the text to calibrate with (16)")
    real.add_argument("--bench", type=bench_sizes, metavar="P,N", help="measure speed: P tokens of prompt, N generated")
    real.add_argument("--page", type=Path, metavar="FILE", help="a page of Markdown to put the table in")
    real.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if args.plain and args.all_places:
        parser.error("--plain and --all-places exclude each other")
    if args.text and (args.plain or args.all_places or len(args.directories) != 1):
        parser.error("--text goes with one model, and without outliers")
    args.weights_only |= bool(args.gguf)
    if not args.text and (args.keep or args.bench):
        parser.error("--keep and --bench go with --text")
    if not args.text and (args.weights_only or args.samples is not None or args.rows != ["*"]):
        parser.error("--rows, --samples, --weights-only and --gguf go with --text")
    if args.bench and args.weights_only:
        parser.error("--bench measures programs, --weights-only and --gguf compare weights")
    if args.text:
        return compare_real(args)
    results = {}
    try:
        for directory in args.directories or [HERE / "tiny-llama", HERE / "tiny-qwen3"]:
            with tempfile.TemporaryDirectory() as folder:
                hf_dir = directory
                if not args.plain:
                    hf_dir = Path(folder) / "model"
                    copy_with_outliers(directory, hf_dir, all_places=args.all_places)
                name = directory.resolve().name
                results[name] = compare(hf_dir, Path(folder))
            print(table(name + ("" if args.plain else ", outliers"), results[name]), end="\n\n", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except (ModelError, OSError) as error:
        print(f"compare_schemes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

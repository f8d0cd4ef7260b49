"""Command line of the exporters: python -m export {q8,w8a8,awq} HF_DIR OUT.bin"""

import argparse
import sys
import time
import warnings
from pathlib import Path

from export.awq import export_awq
from export.q8 import export_q8
from export.w8a8 import export_w8a8, parse_alpha
from golden.checkpoint import ModelError
from golden.smooth import describe


def run(args: argparse.Namespace) -> None:
    """Exports as the command line says."""
    tokenizer, progress = not args.no_tokenizer, not args.quiet
    if args.scheme == "q8":
        export_q8(args.hf_dir, args.out, args.group_size, tokenizer, progress)
        return
    if args.scheme == "awq":
        scaling = export_awq(
            args.hf_dir, args.out, args.calib, args.group_size, args.samples, args.seq_len, args.rtn, args.hf_out,
            tokenizer, progress,
        )  # fmt: skip
        if scaling.alphas and (progress or args.verbose):
            print(*describe(scaling, args.verbose, "ratio"), sep="\n", file=sys.stderr)
        return
    if args.no_smooth and args.alpha is not None:
        raise ModelError("--alpha and --no-smooth exclude each other")
    alpha = None if args.no_smooth else parse_alpha(args.alpha or "0.5")
    smoothing = export_w8a8(
        args.hf_dir, args.out, args.calib, alpha, args.samples, args.seq_len, args.block, args.act == "static",
        tokenizer, progress,
    )  # fmt: skip
    if alpha == "auto" and (progress or args.verbose):
        print(*describe(smoothing, args.verbose), sep="\n", file=sys.stderr)


def main() -> int:
    """Exit code 0, 1 for what cannot be exported, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m export", description="Turn a Hugging Face directory into one model file."
    )
    schemes = parser.add_subparsers(dest="scheme", required=True)
    q8 = schemes.add_parser("q8", help="int8 weights, one fp32 scale a group, for runq")
    w8a8 = schemes.add_parser("w8a8", help="SmoothQuant: int8 weights, one fp32 scale a row, for runq_w8a8")
    awq = schemes.add_parser("awq", help="int4 weights, an fp16 scale and a zero point a group, for runq_awq")
    for p in (q8, w8a8, awq):
        p.add_argument("hf_dir", type=Path, metavar="HF_DIR")
        p.add_argument("out", type=Path, metavar="OUT.bin")
        p.add_argument("--no-tokenizer", action="store_true", help="leave it out: the file runs on token ids alone")
        p.add_argument("--quiet", action="store_true", help="no progress bar")
    q8.add_argument("--group-size", type=int, default=64, metavar="N", help="weights that share a scale (64)")
    for p in (w8a8, awq):
        p.add_argument("--calib", type=Path, metavar="TEXT",
                       help="a text to calibrate with, of the kind the model is for")  # fmt: skip
        p.add_argument("--samples", type=int, metavar="N", help="pieces of the text to calibrate with (16)")
        p.add_argument("--seq-len", type=int, metavar="N", help="tokens in each (min(512, the model's context))")
    p = w8a8
    p.add_argument("--alpha", metavar="X", help="how far outliers move to the weights, 0 to 1, or auto (0.5)")
    p.add_argument("--no-smooth", action="store_true", help="quantize the weights as they are")
    p.add_argument("--block", type=int, default=0, metavar="N", help="values that share a scale: 32, or 0: a row (0)")
    p.add_argument("--act", choices=("dynamic", "static"), default="dynamic",
                   help="scales of activations: each token's own, or one a place from calibration")  # fmt: skip
    p.add_argument("--verbose", action="store_true", help="with --alpha auto: what was chosen for every layer")
    p = awq
    p.add_argument("--group-size", type=int, metavar="N", help="weights that share a scale: 64 or 128 (128)")
    p.add_argument("--rtn", action="store_true", help="plain rounding to nearest: no calibration, for comparison")
    p.add_argument("--hf-out", type=Path, metavar="DIR", help="also write a Hugging Face directory as AutoAWQ would")
    p.add_argument("--verbose", action="store_true", help="what was chosen for every layer")
    args = parser.parse_args()

    start = time.monotonic()
    warnings.showwarning = lambda message, *_: print(f"export: warning: {message}", file=sys.stderr)
    try:
        run(args)
    except (ModelError, OSError, ValueError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"export: interrupted, {str(interrupt) or f'{args.out} was not written'}", file=sys.stderr)
        return 130
    seconds = time.monotonic() - start
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB in {seconds:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Command line of the exporters: python -m export q8 HF_DIR OUT.bin"""

import argparse
import sys
import time
import warnings
from pathlib import Path

from export.q8 import export_q8
from golden.checkpoint import ModelError


def main() -> int:
    """Exit code 0, 1 for what cannot be exported, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m export", description="Turn a Hugging Face directory into one model file."
    )
    schemes = parser.add_subparsers(dest="scheme", required=True)
    p = schemes.add_parser("q8", help="int8 weights, one fp32 scale a group, for runq")
    p.add_argument("hf_dir", type=Path, metavar="HF_DIR")
    p.add_argument("out", type=Path, metavar="OUT.bin")
    p.add_argument("--group-size", type=int, default=64, metavar="N", help="weights that share a scale (64)")
    p.add_argument("--no-tokenizer", action="store_true", help="leave it out: the file then runs on token ids alone")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()

    start = time.monotonic()
    warnings.showwarning = lambda message, *_: print(f"export: warning: {message}", file=sys.stderr)
    try:
        export_q8(args.hf_dir, args.out, args.group_size, not args.no_tokenizer, progress=not args.quiet)
    except (ModelError, OSError, ValueError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"export: interrupted, {args.out} was not written", file=sys.stderr)
        return 130
    seconds = time.monotonic() - start
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB in {seconds:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

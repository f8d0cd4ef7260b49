"""--rotate, as every exporter takes it: golden/rotation.py says what it does, docs/gptq.md what it gains."""

import argparse
import sys

from export.arguments import first_given
from formats.errors import ModelError
from formats.source import Source
from golden.rotation import Rotated, best_seed, block_of

BEST = "best"  # of the seeds that are tried
Rotate = int | str | None  # a seed, BEST, or not at all


def add_rotation(parser: argparse.ArgumentParser) -> None:
    """The options --rotate and --rotate-seed."""
    parser.add_argument("--rotate", action="store_true",
                        help="spread outliers over channels by a rotation (docs/gptq.md)")  # fmt: skip
    parser.add_argument("--rotate-seed", type=int, metavar="N", help="of its signs (the best of 0 to 31)")


def rotation_of(args: argparse.Namespace) -> Rotate:
    """What the command line says. Raises ModelError for options that exclude each other."""
    if not args.rotate:
        if args.rotate_seed is not None:
            raise ModelError("--rotate-seed would change nothing without --rotate: leave it out")
        return None
    out = {"--gguf-out": args.gguf_out, "--hf-out": getattr(args, "hf_out", None)}
    if option := first_given(out):
        raise ModelError(f"{option} and --rotate exclude each other: what is written would be another model")
    if args.rotate_seed is not None and args.rotate_seed < 0:
        raise ModelError(f"--rotate-seed is {args.rotate_seed}, expected 0 or more")
    return BEST if args.rotate_seed is None else args.rotate_seed


def rotated(source: Source, rotate: Rotate, progress: bool = True, untie: bool = False) -> Source:
    """The model to quantize: the source itself, or rotated. Raises ModelError if its dimensions have no pairs."""
    if rotate is None:
        return source
    if block_of(source.config.dim) == 1:
        raise ModelError(f"{source.config_path}: hidden_size is {source.config.dim}, --rotate needs an even number")
    seed = best_seed(source) if rotate == BEST else int(rotate)
    if progress:
        print(f"rotation: seed {seed}, blocks of {block_of(source.config.dim)}", file=sys.stderr)
    return Rotated(source, seed, untie)

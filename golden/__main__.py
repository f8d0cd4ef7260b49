"""Command line of the reference: python -m golden {make,diff,ppl}."""

import argparse
import sys
from functools import partial
from pathlib import Path

from golden.checkpoint import Checkpoint, ModelError
from golden.forward import Fp32, forward
from golden.make import make
from golden.perplexity import encode, perplexity
from golden.q8 import Q8
from golden.trace import compare, read_trace, replay, summarize

ROOT = Path(__file__).resolve().parent.parent


def scheme_of(name: str, checkpoint: Checkpoint, group_size: int):  # noqa: ANN201
    """The scheme object and whether its q and k rows are in adjacent pairs."""
    return (Fp32(checkpoint), False) if name == "fp32" else (Q8(checkpoint, group_size), True)


def main() -> int:
    """Exit code 0, 1 if traces part or a file cannot be read, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("make", help="write the golden vectors")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the tiny models")
    p.add_argument("--out", type=Path, default=ROOT / "golden" / "data")

    p = commands.add_parser("diff", help="compare two traces step by step; exit code 1 if they part")
    p.add_argument("a", type=Path, help="the reference's trace")
    p.add_argument("b", type=Path, help="the trace to judge")
    p.add_argument("-v", "--verbose", action="store_true", help="list every step")
    p.add_argument("--model", type=Path, metavar="HF_DIR", help="judge each operation of B alone, from B's own inputs")
    p.add_argument("--group-size", type=int, default=64)

    p = commands.add_parser("ppl", help="perplexity of a text file")
    p.add_argument("hf_dir", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("--scheme", choices=("fp32", "q8"), default="fp32")
    p.add_argument("--group-size", type=int, default=64)
    p.add_argument("--ctx", type=int, help="context length (min(4096, the model's))")

    args = parser.parse_args()
    try:
        if args.command == "make":
            make(args.models, args.out)
            return 0
        if args.command == "diff":
            a, b = read_trace(args.a), read_trace(args.b)
            reports = compare(a, b)
            if args.model:
                checkpoint = Checkpoint(args.model)
                scheme, interleaved = scheme_of("q8", checkpoint, args.group_size)

                def run(tokens, step):  # noqa: ANN001, ANN202
                    return forward(checkpoint.config, scheme, tokens, step, interleaved)

                reports = replay(run, b)
            text, ok = summarize(reports, args.verbose)
            print(text)
            return 0 if ok else 1
        checkpoint = Checkpoint(args.hf_dir)
        scheme, interleaved = scheme_of(args.scheme, checkpoint, args.group_size)
        ids, bos = encode(args.hf_dir, args.text.read_text(encoding="utf-8"))
        context = args.ctx or min(4096, checkpoint.config.max_seq_len)
        logits = partial(forward, checkpoint.config, scheme, interleaved=interleaved)
        value, n = perplexity(logits, ids, bos, context)
        print(f"perplexity {value:.4f} over {n} tokens (windows of {context})")
        return 0
    except (ModelError, ValueError, OSError) as error:
        print(f"golden: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""Command line of the reference: python -m golden {make,diff,ppl}."""

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path

from formats.checkpoint import Checkpoint, Config, ModelError
from golden.forward import Fp32, Scheme, forward
from golden.make import make
from golden.perplexity import encode, perplexity
from golden.q8 import Q8
from golden.schemes import SCHEMES, read_file
from golden.trace import compare, read_trace, replay, summarize

ROOT = Path(__file__).resolve().parent.parent


def model_of(path: Path, scheme: str, group_size: int) -> tuple[Config, Scheme]:
    """Config and scheme of a model file, or of a Hugging Face directory."""
    if path.is_file():
        model = read_file(path)
        return model.config, model
    checkpoint = Checkpoint(path)
    return checkpoint.config, Fp32(checkpoint) if scheme == "fp32" else Q8(checkpoint, group_size)


def main() -> int:
    """Exit code 0, 1 if traces part or a file cannot be read, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("make", help="write the golden vectors")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the tiny models")
    p.add_argument("--files", type=Path, default=ROOT / "build" / "models", help="folder of their exported files")
    p.add_argument("--out", type=Path, default=ROOT / "golden" / "data")
    p.add_argument("--only", choices=SCHEMES, help="the operations, and this scheme's models")

    p = commands.add_parser("diff", help="compare two traces step by step; exit code 1 if they part")
    p.add_argument("a", type=Path, help="the reference's trace")
    p.add_argument("b", type=Path, help="the trace to judge")
    p.add_argument("-v", "--verbose", action="store_true", help="list every step")
    p.add_argument("--model", type=Path, metavar="HF_DIR|FILE.bin",
                   help="judge each operation of B alone, from B's own inputs; a directory means Q8")  # fmt: skip
    p.add_argument("--group-size", type=int, default=64, help="of Q8 (64)")

    p = commands.add_parser("ppl", help="perplexity of a text file")
    p.add_argument("hf_dir", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("--scheme", choices=("fp32", "q8"), default="fp32")
    p.add_argument("--group-size", type=int, default=64, help="of Q8 (64)")
    p.add_argument("--file", type=Path, metavar="FILE.bin", help="run this file; the directory gives the tokenizer")
    p.add_argument("--ctx", type=int, help="context length (min(4096, the model's))")

    args = parser.parse_args()
    warnings.showwarning = lambda message, *_: print(f"golden: warning: {message}", file=sys.stderr)
    try:
        if args.command == "make":
            make(args.models, args.files, args.out, args.only)
            return 0
        if args.command == "diff":
            a, b = read_trace(args.a), read_trace(args.b)
            reports = compare(a, b)
            if args.model:
                config, scheme = model_of(args.model, "q8", args.group_size)
                reports = replay(partial(forward, config, scheme), b)
            text, ok = summarize(reports, args.verbose)
            print(text)
            return 0 if ok else 1
        config, scheme = model_of(args.file or args.hf_dir, args.scheme, args.group_size)
        tokenizer = args.hf_dir / "tokenizer.json"
        if not tokenizer.is_file():
            raise ModelError(f"{tokenizer}: no such file")
        ids, bos = encode(args.hf_dir, args.text.read_text(encoding="utf-8"))
        if ids and max(ids) >= config.vocab_size:
            raise ModelError(f"{tokenizer}: gives id {max(ids)}, the model has {config.vocab_size}")
        context = args.ctx or min(4096, config.max_seq_len)
        logits = partial(forward, config, scheme)
        value, n = perplexity(logits, ids, bos, context)
        print(f"perplexity {value:.4f} over {n} tokens (windows of {context})")
        return 0
    except (ModelError, ValueError, OSError) as error:
        print(f"golden: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

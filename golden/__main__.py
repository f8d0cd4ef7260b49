"""Command line of the reference: python -m golden {make,real,diff,accept,hex,passes,ppl}."""

import argparse
import os
import re
import runpy
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

if (
    not __package__
):  # `python golden` is `python -m golden`: sys.path needs the folder that has the packages, not this one
    sys.path[0], sys.argv[0] = str(Path(__file__).resolve().parent.parent), "-m"
    runpy.run_module("golden", run_name="__main__", alter_sys=True)

import numpy as np

from formats.checkpoint import DENSE, SPARSE, Config
from formats.dimensions import check_group_size
from formats.errors import ModelError, one_line
from formats.source import is_gguf, open_model
from golden.accept import judge_logits
from golden.attention_int8 import attention_int8
from golden.calibration import read_text
from golden.digests import compare_digests
from golden.forward import Fp32, Scheme, finite_forward, forward
from golden.fp32 import digest
from golden.hex_files import FORMATS, Options, write_text
from golden.make import make
from golden.op_cases import read_cases
from golden.op_check import judge_ops
from golden.passes import write_passes
from golden.perplexity import Logits, encode, perplexity
from golden.q8 import Q8
from golden.real import make_real
from golden.schemes import DENSE_MODELS, MOE_MODELS, RANDOM_MODELS, SCHEMES, read_file
from golden.trace import check_positions, check_tokens, compare, read_tolerances, read_trace, replay, summarize
from golden.w8a8 import W8A8

ROOT = Path(__file__).resolve().parent.parent


def model_of(path: Path, scheme: str, group_size: int, attn: str = "fp32") -> tuple[Config, Scheme]:
    """Config and scheme of a model file, or of a Hugging Face directory or GGUF file.

    attn: "fp32", or "int8", which a W8A8 file alone can have.
    """
    if attn == "int8":
        model = W8A8(path, attention_int8)
        return model.config, model
    if path.is_file() and path.suffix != ".gguf":
        model = read_file(path)
        return model.config, model
    checkpoint = open_model(path, archs=(*DENSE, *SPARSE) if scheme == "fp32" else DENSE)
    if scheme == "fp32":
        return checkpoint.config, Fp32(checkpoint)
    check_group_size(checkpoint, group_size)
    return checkpoint.config, Q8(checkpoint, group_size)


def accept(path: Path, config: Config, reference: Logits, limit: float) -> int:
    """Prints how a port's logits do beside the reference's, and returns the exit code."""
    trace = read_trace(path)
    try:
        if "tokens" in trace:
            check_tokens(path, trace, config, (1, 2))
        verdict = judge_logits(reference, trace["tokens"], trace["logits"])
    except KeyError as error:
        raise ValueError(f"{path}: has no tensor {error}") from None
    except ModelError:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    v, ok = verdict, verdict.loss <= limit
    print(f"perplexity {v.perplexity:.4f} over {v.n_scored} tokens, the reference's {v.reference:.4f}: {v.loss:+.2%}")
    print(f"KL divergence {v.kl:.2e} per token, the same most probable token {v.same_top:.1%} of the time")
    print(f"{'within' if ok else 'above'} the limit of {limit:.2%}")
    return 0 if ok else 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("make", help="write the golden vectors")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the tiny models")
    p.add_argument("--files", type=Path, default=ROOT / "build" / "models", help="folder of their exported files")
    p.add_argument("--out", type=Path, default=ROOT / "golden" / "data")
    p.add_argument("--only", choices=SCHEMES, help="the operations, and this scheme's models")
    p.add_argument("--model", choices=(*DENSE_MODELS, *MOE_MODELS, *RANDOM_MODELS), help="this model alone")
    p.add_argument("--traces", action="store_true", help="no greedy generations and perplexities, which take long")

    p = commands.add_parser("real", help="write the goldens of a real model (make smollm2 first)")
    p.add_argument("--files", type=Path, default=ROOT / "build" / "models", help="folder of its files")
    p.add_argument("--out", type=Path, default=ROOT / "golden" / "real")
    p.add_argument("--only", metavar="VARIANT", help="one of them, such as q8 or w8a8-block32")

    p = commands.add_parser("diff", help="judge a port's trace, or its outputs of the op vectors, step by step",
                            epilog="exit code 0: all is within the contract; 1: a step is outside, or there is none; "
                            "3: what is there is within, but steps are missing")  # fmt: skip
    p.add_argument("a", type=Path, help="the reference's trace, digests (golden/sizes.json), or op vectors")
    p.add_argument("b", type=Path, help="the port's: the steps, digests or outputs that it has")
    p.add_argument("-v", "--verbose", action="store_true", help="list every step")
    p.add_argument("--model", type=Path, metavar="MODEL|FILE.bin",
                   help="judge each operation of B alone, from B's own inputs; a MODEL means Q8")  # fmt: skip
    p.add_argument("--case", help="of digests")
    p.add_argument("--group-size", type=int, default=64, help="of Q8 (64)")
    p.add_argument("--tolerance", action="append", default=[], metavar="STEP=VALUE",
                   help="a limit of its own for a step (pattern: ffn.swiglu, layers.3.*), relative by norm; "
                   "for codes the share that may differ")  # fmt: skip
    p.add_argument("--profile", type=Path, metavar="FILE.json", help="such limits, as a JSON object")

    p = commands.add_parser("accept", help="compare the perplexity of a port's logits with the reference's",
                            epilog="exit code 0: no more than the limit above the reference's; 1: more")  # fmt: skip
    p.add_argument("logits", type=Path, metavar="TRACE",
                   help="safetensors with tokens (n,) or (windows, n) and logits (..., n, vocab_size)")  # fmt: skip
    p.add_argument("--model", type=Path, required=True, metavar="MODEL|FILE.bin", help="a MODEL means Q8")
    p.add_argument("--group-size", type=int, default=64, help="of Q8 (64)")
    p.add_argument("--limit", type=float, default=0.01, metavar="SHARE",
                   help="by how much its perplexity may be higher (0.01: a hundredth)")  # fmt: skip

    p = commands.add_parser("hex", help="write tensors as text for hardware: $readmemh, memory files, a C header")
    p.add_argument("names", nargs="+", metavar="NAME", help="a tensor, or a pattern: quantize.64.*, layers.1.*.acc")
    p.add_argument("--file", type=Path, default=ROOT / "golden" / "data" / "ops.safetensors",
                   help="op vectors, a trace or a model file (golden/data/ops.safetensors)")  # fmt: skip
    p.add_argument("--format", choices=FORMATS, default="hex")
    p.add_argument("--lanes", type=int, default=1, help="values in a word (1)")
    p.add_argument("--scale-lanes", type=int, default=1, help="scales and zero points in a word (1)")
    p.add_argument("--tile", metavar="MxK", help="matrices tile by tile: M outputs by K inputs, such as 64x64")
    p.add_argument("--transpose", action="store_true", help="a row of words for an input instead of an output")
    p.add_argument("--unpack", action="store_true", help="codes of 4 and 2 bits one by one, not as the file packs them")
    p.add_argument("--out", type=Path, metavar="DIR", help="a file for each tensor, and a manifest; otherwise printed")

    p = commands.add_parser("passes", help="write a product as an array of cells computes it, pass by pass, as text")
    p.add_argument("case", metavar="CASE", help="NxMxKgG: N tokens, M outputs, K inputs in groups of G, drawn from "
                   "random numbers; or a case of the op vectors, such as matmul.2x9x384g64")  # fmt: skip
    p.add_argument("--file", type=Path, default=ROOT / "golden" / "data" / "ops.safetensors",
                   help="op vectors (golden/data/ops.safetensors)")  # fmt: skip
    p.add_argument("--format", choices=[f for f in FORMATS if f != "c"], default="hex")
    p.add_argument("--tile", metavar="MxK", required=True, help="outputs and inputs of a pass, such as 16x16")
    p.add_argument("--transpose", action="store_true", help="a word of weights for an input instead of an output")
    p.add_argument("--out", type=Path, metavar="DIR", required=True)

    p = commands.add_parser("ppl", help="perplexity of a text file")
    p.add_argument("hf_dir", type=Path, metavar="MODEL", help="a Hugging Face directory or a GGUF file")
    p.add_argument("text", type=Path)
    p.add_argument("--scheme", choices=("fp32", "q8"), default="fp32")
    p.add_argument("--group-size", type=int, default=64, help="of Q8 (64)")
    p.add_argument("--file", type=Path, metavar="FILE.bin", help="run this file; MODEL gives the tokenizer")
    p.add_argument("--ctx", type=int, help="context length (min(4096, the model's))")
    p.add_argument(
        "--digest", action="store_true", help="also a hash of the logits that score: as the programs' --digest"
    )

    for name in ("diff", "accept", "ppl"):
        commands.choices[name].add_argument("--attn", choices=("fp32", "int8"), default="fp32",
                                            help="of a W8A8 file: how attention multiplies (fp32)")  # fmt: skip

    args = parser.parse_args(argv)
    if args.command in ("hex", "passes"):
        tile = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", args.tile or "1x1", re.ASCII)
        if tile is None:
            parser.error(f"--tile: {args.tile!r}, expected MxK")
        args.tile = (int(tile[1]), int(tile[2])) if args.tile else None
    if args.command == "hex":
        for option, lanes in (("--lanes", args.lanes), ("--scale-lanes", args.scale_lanes)):
            if not 1 <= lanes <= 1024:
                parser.error(f"{option}: {lanes} is not 1 to 1024")
    return args


def run(args: argparse.Namespace) -> int:
    """Does what the command line says and returns the exit code. Raises what is wrong with a file."""
    if args.command == "make":
        make(args.models, args.files, args.out, args.only, args.model, args.traces)
        return 0
    if args.command == "real":
        make_real(args.files, args.out, args.only)
        return 0
    if args.command == "hex":
        options = Options(args.format, args.lanes, args.scale_lanes, args.tile, args.transpose)
        sys.stdout.write(write_text(args.file, args.names, options, args.unpack, args.out))
        return 0
    if args.command == "passes":
        sys.stdout.write(write_passes(args.case, args.file, args.tile, args.transpose, args.format, args.out))
        return 0
    if args.command == "diff":
        if args.case:
            text, code = summarize(compare_digests(args.a, args.b, args.case), args.verbose)
            print(text)
            return code
        tolerances = read_tolerances(args.profile, args.tolerance)
        a, b = read_trace(args.a), read_trace(args.b)
        check_positions(args.a, a)
        check_positions(args.b, b)
        cases = read_cases(args.a)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # what comes of bad values is in the report
            if cases:
                reports = judge_ops(cases, a, b, tolerances)
            elif args.model:
                config, scheme = model_of(args.model, "q8", args.group_size, args.attn)
                check_tokens(args.b, b, config)
                reports = replay(partial(forward, config, scheme), b, tolerances)
            else:
                reports = compare(a, b, tolerances)
        text, code = summarize(reports, args.verbose)
        print(text)
        return code
    if args.command == "accept":
        config, scheme = model_of(args.model, "q8", args.group_size, args.attn)
        return accept(args.logits, config, partial(finite_forward, args.model, config, scheme), args.limit)
    path = args.file or args.hf_dir
    config, scheme = model_of(path, args.scheme, args.group_size, args.attn)
    tokenizer = args.hf_dir if is_gguf(args.hf_dir) else args.hf_dir / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"{tokenizer}: no such file")
    ids, bos = encode(args.hf_dir, read_text(args.text))
    largest = max([*ids, *([] if bos is None else [bos])], default=0)
    if largest >= config.vocab_size:
        raise ModelError(f"{tokenizer}: gives id {largest}, the model has {config.vocab_size}")
    context = min(4096, config.max_seq_len) if args.ctx is None else args.ctx
    if not 2 <= context <= config.max_seq_len:
        raise ModelError(f"--ctx is {context}, expected 2 to the model's {config.max_seq_len}")
    found = [digest(np.empty(0))]

    def logits_of(window: np.ndarray) -> np.ndarray:
        logits = finite_forward(path, config, scheme, window)
        if args.digest:
            found.append(digest(logits[:-1], found[-1]))
        return logits

    value, n = perplexity(logits_of, ids, bos, context)
    print(f"perplexity {value:.4f} over {n} tokens (windows of {context})")
    if args.digest:
        print(f"digest {found[-1]:016x}")
    return 0


def flush_output() -> None:
    """Writes what has been printed. If that fails, drops it, as Python itself would try again, and raises OSError."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if traces part or a file cannot be read, 2 for a wrong command line. argv: without the name."""
    args = parse_arguments(argv)
    warnings.showwarning = lambda message, *_: print(f"golden: warning: {one_line(message)}", file=sys.stderr)
    try:
        code = run(args)
        flush_output()
        return code
    except (ValueError, OSError, MemoryError, RecursionError) as error:  # ModelError is a ValueError
        print(f"golden: {one_line(error)}", file=sys.stderr)
        with suppress(OSError):
            flush_output()
        return 1
    except KeyboardInterrupt:
        print("golden: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

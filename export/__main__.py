"""Command line of the exporters: python -m export SCHEME MODEL OUT.bin"""

import argparse
import runpy
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

if (
    not __package__
):  # `python export` is `python -m export`: sys.path needs the folder that has the packages, not this one
    sys.path[0], sys.argv[0] = str(Path(__file__).resolve().parent.parent), "-m"
    runpy.run_module("export", run_name="__main__", alter_sys=True)

from export.arguments import add_common
from export.hf_directory import after_model_file
from export.rotation import add_rotation, rotation_of
from export.termination import Terminated, termination
from formats.errors import one_line
from formats.schemes import FORMATS

# A module per scheme, export/q8.py and so on: FORMAT, HELP, add_arguments(parser) and run(args).
EXPORTERS = [import_module(f"export.{scheme}") for scheme in FORMATS]
FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143  # exit codes; the last two as shells give them for signals


def is_model(path: Path) -> bool:
    """Whether a model's directory or a GGUF file is there."""
    if not path.is_file():
        return (path / "config.json").exists()
    with path.open("rb") as f:
        return f.read(4) == b"GGUF"


def with_gguf(args: argparse.Namespace) -> None:
    """Exports as the command line says, then writes --gguf-out, whose metadata are made first."""
    from export import gguf_out  # what it imports takes as long as all else

    writer = gguf_out.prepare(args.hf_dir, args.out, args.gguf_out, not args.no_tokenizer)
    args.run(args)
    with after_model_file(args.gguf_out, args.out):
        gguf_out.write_gguf(writer, args.hf_dir, args.out, args.gguf_out)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 for what cannot be exported, 2 for a wrong command line. argv: without the program's name."""
    parser = argparse.ArgumentParser(
        prog="python -m export", description="Turn a Hugging Face directory or a GGUF file into one model file."
    )
    schemes = parser.add_subparsers(dest="scheme", required=True)
    for exporter in EXPORTERS:
        p = schemes.add_parser(exporter.FORMAT.scheme, help=exporter.HELP)
        add_common(p)
        add_rotation(p)
        exporter.add_arguments(p)
        p.set_defaults(run=exporter.run)
    args = parser.parse_args(argv)
    start = time.monotonic()
    # numpy's, of numbers that are not finite: those are refused in a line that says where they are.
    warnings.simplefilter("ignore", RuntimeWarning)
    warnings.showwarning = lambda message, *_: print(f"export: warning: {one_line(message)}", file=sys.stderr)
    try:
        if is_model(args.out) and not args.hf_dir.is_dir() and not is_model(args.hf_dir):
            exchanged = f"{args.out} is a model, {args.hf_dir} is none: they seem exchanged, expected MODEL OUT.bin"
            print(f"export: {one_line(exchanged)}", file=sys.stderr)
            return USAGE
        with termination():
            args.rotate = rotation_of(args)
            if args.gguf_out is None:
                args.run(args)
            else:
                with_gguf(args)
    except (OSError, ValueError, MemoryError, RecursionError) as error:  # ModelError is a ValueError
        print(f"export: {one_line(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as interrupt:
        how, code = ("terminated", TERMINATED) if isinstance(interrupt, Terminated) else ("interrupted", INTERRUPTED)
        print(f"export: {how}, {one_line(interrupt) or f'{args.out} was not written'}", file=sys.stderr)
        return code
    seconds = time.monotonic() - start
    for out in (args.out, *([] if args.gguf_out is None else [args.gguf_out])):
        print(f"{one_line(out)}: {out.stat().st_size / 1e6:.1f} MB in {seconds:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

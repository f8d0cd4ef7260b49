"""Command line of the exporters: python -m export SCHEME MODEL OUT.bin"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence

from export import awq, gptq, moe, q8, w8a8
from export.arguments import add_common
from export.termination import Terminated, termination
from formats.errors import one_line

# Modules with FORMAT, HELP, add_arguments(parser) and run(args), in the order of --help.
EXPORTERS = (q8, w8a8, awq, gptq, moe)
FAILED, INTERRUPTED, TERMINATED = 1, 130, 143  # exit codes; shells give the last two for SIGINT and SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 for what cannot be exported, 2 for a wrong command line. argv: without the program's name."""
    parser = argparse.ArgumentParser(
        prog="python -m export", description="Turn a Hugging Face directory or a GGUF file into one model file."
    )
    schemes = parser.add_subparsers(dest="scheme", required=True)
    for exporter in EXPORTERS:
        p = schemes.add_parser(exporter.FORMAT.scheme, help=exporter.HELP)
        add_common(p)
        exporter.add_arguments(p)
        p.set_defaults(run=exporter.run)
    args = parser.parse_args(argv)

    start = time.monotonic()
    # numpy's, of numbers that are not finite: those are refused in a line that says where they are.
    warnings.simplefilter("ignore", RuntimeWarning)
    warnings.showwarning = lambda message, *_: print(f"export: warning: {one_line(message)}", file=sys.stderr)
    try:
        with termination():
            args.run(args)
    except (OSError, ValueError, MemoryError, RecursionError) as error:  # ModelError is a ValueError
        print(f"export: {one_line(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as interrupt:
        how, code = ("terminated", TERMINATED) if isinstance(interrupt, Terminated) else ("interrupted", INTERRUPTED)
        print(f"export: {how}, {one_line(interrupt) or f'{args.out} was not written'}", file=sys.stderr)
        return code
    seconds = time.monotonic() - start
    print(f"{one_line(args.out)}: {args.out.stat().st_size / 1e6:.1f} MB in {seconds:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

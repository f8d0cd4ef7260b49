"""Command line of the exporters: python -m export {q8,w8a8,awq} MODEL OUT.bin"""

import argparse
import sys
import time
import warnings

from export import awq, q8, w8a8
from export.arguments import add_common
from formats.checkpoint import ModelError

# Modules with FORMAT, HELP, add_arguments(parser) and run(args), in the order of --help.
EXPORTERS = (q8, w8a8, awq)


def main() -> int:
    """Exit code 0, 1 for what cannot be exported, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m export", description="Turn a Hugging Face directory or a GGUF file into one model file."
    )
    schemes = parser.add_subparsers(dest="scheme", required=True)
    for exporter in EXPORTERS:
        p = schemes.add_parser(exporter.FORMAT.scheme, help=exporter.HELP)
        add_common(p)
        exporter.add_arguments(p)
        p.set_defaults(run=exporter.run)
    args = parser.parse_args()

    start = time.monotonic()
    warnings.showwarning = lambda message, *_: print(f"export: warning: {message}", file=sys.stderr)
    try:
        args.run(args)
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

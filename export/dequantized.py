"""A GGUF file as an unquantized Hugging Face directory: for tools that quantize or run such directories.

    python -m export.dequantized MODEL.gguf DIR

Each tensor is what the file's codes stand for, in fp32; those in F16 and BF16 stay as they are. Rows of q and k are in
Hugging Face's order. The other files are those of `--hf-out` (export/gguf_files.py).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from export.hf_directory import Content, check_destination, read_source_config, write_directory
from export.termination import termination
from formats.checkpoint import ModelError, tensor_shapes
from formats.errors import one_line
from formats.gguf_model import GGUFModel
from formats.source import is_gguf, open_gguf
from formats.tensors import Tensor


def contents(model: GGUFModel) -> Iterator[Content]:
    """Every tensor of the directory, dequantized when it is written."""
    for name, shape in tensor_shapes(model.config).items():
        yield Tensor(name, model.dtype(name), shape), partial(model.stored, name)


def write_dequantized(gguf: Path, out: Path) -> None:
    """Writes `out`, which must not exist. Raises ModelError, and writes nothing, for what cannot be done."""
    if not is_gguf(gguf):
        raise ModelError(f"{gguf}: expected a GGUF file")
    model = open_gguf(gguf)
    check_destination(out, source=gguf)
    write_directory(gguf, out, read_source_config(gguf, model.config.tied), contents(model))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 with one line for what cannot be written. argv: without the program's name."""
    parser = argparse.ArgumentParser(prog="python -m export.dequantized", description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, metavar="MODEL.gguf")
    parser.add_argument("out", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    try:
        with termination():
            write_dequantized(args.gguf, args.out)
    except (OSError, ValueError, MemoryError, RecursionError) as error:  # ModelError is a ValueError
        print(f"dequantized: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"dequantized: interrupted, {one_line(args.out)} was not written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

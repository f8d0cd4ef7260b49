"""Q8 files for runq: every matrix as int8 codes with one fp32 scale per group along a row.

The order is that of llama2.c's version 2: fp32 norms, then the embedding, then each projection over all layers,
then the classifier if it has its own weights. Rows of q and k (and Qwen3's head norms) go from Hugging Face's order
of halves to adjacent pairs, the order in which runq rotates.
"""

import argparse
from functools import partial
from pathlib import Path

from export.hf_directory import tell_model
from export.int8 import progress_bar, write_tensors
from export.rotation import Rotate, rotated
from export.tokenizer import text_of
from export.writer import finish
from formats.checkpoint import input_files
from formats.dimensions import check_group_size
from formats.files import replacing
from formats.schemes import Q8_FILE
from formats.source import open_model
from formats.tensors import q8_tensors, weights_end
from golden.forward import load_weight

FORMAT = Q8_FILE
HELP = "int8 weights, one fp32 scale a group, for runq"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that Q8 alone has."""
    parser.add_argument("--group-size", type=int, default=64, metavar="N", help="weights that share a scale (64)")


def run(args: argparse.Namespace) -> None:
    """Exports as the command line says."""
    export_q8(args.hf_dir, args.out, args.group_size, not args.no_tokenizer, not args.quiet, args.rotate)


def export_q8(
    hf_dir: Path,
    out: Path,
    group_size: int = 64,
    with_tokenizer: bool = True,
    progress: bool = True,
    rotate: Rotate = None,
) -> None:
    """Writes `out`. Raises ModelError, before anything is written, for what cannot be exported.

    A file without a tokenizer runs on token ids alone.
    """
    checkpoint = open_model(hf_dir)
    tell_model(checkpoint)
    checkpoint = rotated(checkpoint, rotate, progress)
    config = checkpoint.config
    check_group_size(checkpoint, group_size)
    generation, tokenizer = text_of(checkpoint, with_tokenizer)
    tensors = list(q8_tensors(config, group_size))

    with replacing(out, input_files(hf_dir)) as f, progress_bar(tensors, progress) as bar:
        write_tensors(f, tensors, partial(load_weight, checkpoint, interleaved=True), group_size, bar)
        finish(f, config, generation, FORMAT, group_size, weights_end(tensors), tokenizer)

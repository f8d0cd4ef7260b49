"""Options of the command line that several exporters have."""

import argparse
from collections.abc import Mapping
from pathlib import Path


def add_common(parser: argparse.ArgumentParser) -> None:
    """What every exporter takes."""
    parser.add_argument("hf_dir", type=Path, metavar="MODEL",
                        help="a Hugging Face directory, or a GGUF file (docs/gguf.md)")  # fmt: skip
    parser.add_argument("out", type=Path, metavar="OUT.bin")
    parser.add_argument("--no-tokenizer", action="store_true", help="leave it out: the file runs on token ids alone")
    parser.add_argument("--gguf-out", type=Path, metavar="FILE",
                        help="also write a GGUF file for llama.cpp (docs/serving.md)")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def calibration_options(calibration: Path | None, n_samples: int | None, seq_len: int | None) -> dict[str, object]:
    """What was given of the options of `add_calibration`, by their names; None where one was not."""
    return {"--calib": calibration, "--samples": n_samples, "--seq-len": seq_len}


def first_given(options: Mapping[str, object]) -> str | None:
    """The name of the first option that was given, that is, neither None nor False; None if none was."""
    return next((name for name, value in options.items() if value is not None and value is not False), None)


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """What exporters take that calibrate on a text."""
    parser.add_argument("--calib", type=Path, metavar="TEXT",
                        help="a text to calibrate with, of the kind the model is for")  # fmt: skip
    parser.add_argument("--samples", type=int, metavar="N", help="pieces of the text to calibrate with (16)")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens in each (min(512, the model's context))")

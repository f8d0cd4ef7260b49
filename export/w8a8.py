"""W8A8 files for runq_w8a8: smoothed weights as int8 codes, one fp32 scale a row (or for 32 weights).

The order is that of Q8 files, with the static scales of activations, if there are any, behind the norms:
docs/model-files.md. What smoothing does is in golden/smooth.py.
"""

from pathlib import Path

import numpy as np
from tqdm import tqdm

from export.model_file import (
    HEADER_SIZE,
    MAGIC_W8A8,
    VERSION_W8A8,
    check_group_size,
    check_rows,
    header,
    matrix_names,
    norm_names,
    read_generation,
    replacing,
    write_array,
    write_matrix,
)
from export.tokenizer import tokenizer_section
from golden.checkpoint import Checkpoint, ModelError
from golden.smooth import Smoothing, calibration_samples, find_smoothing, load_smoothed
from golden.w8a8 import STATIC_PLACES, static_scale

N_SAMPLES = 16  # for calibration, unless the caller says how many
SEQ_LEN = 512  # ids of each, if the model's context has room for as many


def parse_alpha(text: str) -> float | str:
    """`auto` or a number in 0..1. Raises ModelError."""
    if text == "auto":
        return text
    try:
        alpha = float(text)
    except ValueError:
        alpha = -1.0
    if not 0 <= alpha <= 1:
        raise ModelError(f"--alpha is {text}, expected 0 to 1, or auto")
    return alpha


def read_calibration(path: Path) -> str:
    """The calibration text. Raises ModelError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 at byte {error.start}") from None


def read_samples(
    checkpoint: Checkpoint, calibration: Path, n_samples: int | None, seq_len: int | None
) -> list[np.ndarray]:
    """The samples to calibrate with. None: as many as usual, or as long. Raises ModelError."""
    n_samples = N_SAMPLES if n_samples is None else n_samples
    seq_len = min(SEQ_LEN, checkpoint.config.max_seq_len) if seq_len is None else seq_len
    return calibration_samples(checkpoint.path, checkpoint.config, read_calibration(calibration), n_samples, seq_len)


def export_w8a8(
    hf_dir: Path,
    out: Path,
    calibration: Path | None = None,
    alpha: float | str | None = 0.5,
    n_samples: int | None = None,
    seq_len: int | None = None,
    block: int = 0,
    static: bool = False,
    with_tokenizer: bool = True,
    progress: bool = True,
) -> Smoothing:
    """Writes `out` and returns what calibration chose. Raises ModelError, and writes nothing, for what cannot be done.

    calibration: a text file, needed unless alpha is None (no smoothing) and activations are dynamic, when neither it
    nor n_samples nor seq_len may be given.
    block: 0 for one scale a row, or 32.
    """
    if block not in (0, 32):
        raise ModelError(f"--block is {block}, expected 0 or 32")
    if static and block:
        raise ModelError(f"--act static has one scale for a whole row, --block {block} has more: use --block 0")
    calibrates = static or alpha is not None
    if calibrates and calibration is None:
        need = "--act static" if alpha is None else "smoothing"
        raise ModelError(f"{need} needs a text to calibrate with: --calib TEXT")
    for option, value in {"--calib": calibration, "--samples": n_samples, "--seq-len": seq_len}.items():
        if value is not None and not calibrates:
            raise ModelError(f"{option} would change nothing with --no-smooth and dynamic activations: leave it out")
    checkpoint = Checkpoint(hf_dir)
    config = checkpoint.config
    if block:
        check_group_size(checkpoint, block, "--block")
    else:
        check_rows(checkpoint)
    generation = read_generation(checkpoint.path, config.vocab_size)
    tokenizer = tokenizer_section(checkpoint.path, config.vocab_size) if with_tokenizer else b""
    samples = []
    if calibrates:
        samples = read_samples(checkpoint, calibration, n_samples, seq_len)
    norms, matrices = list(norm_names(config)), list(matrix_names(config))

    with replacing(out) as f:
        smoothing = find_smoothing(checkpoint, samples, alpha, block, static, progress) if samples else Smoothing()
        with tqdm(total=len(norms) + len(matrices), unit="tensor", desc="writing", disable=not progress) as bar:
            f.write(bytes(HEADER_SIZE))
            for name in norms:
                write_array(f, load_smoothed(checkpoint, name, smoothing, interleaved=True), "f4")
                bar.update()
            if static:
                places = [f"layers.{i}.{place}" for i in range(config.n_layers) for place in STATIC_PLACES]
                write_array(f, np.array([static_scale(smoothing.largest[p]) for p in [*places, "norm"]]), "f4")
            for name in matrices:
                bar.set_postfix_str(name)
                write_matrix(f, load_smoothed(checkpoint, name, smoothing, interleaved=True), block)
                bar.update()
        tokenizer_offset = f.tell()
        f.write(tokenizer)
        f.seek(0)
        f.write(header(config, generation, MAGIC_W8A8, VERSION_W8A8, block, tokenizer_offset, tokenizer, int(static)))
    return smoothing

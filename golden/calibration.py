"""Calibration: what the unquantized model's activations look like on a sample text.

SmoothQuant (golden/smooth.py) and AWQ (golden/awq_search.py) choose their factors from it. A text becomes samples of
token ids; the forward pass runs over them layer by layer; an `Observer` keeps what quantized matrices read.
"""

import warnings
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from formats.checkpoint import Config, ModelError
from formats.source import Source, is_gguf
from golden.channel_scaling import PLACES
from golden.forward import F32, F64, Fp32, embed, forward_layer, last_norm, rope_table
from golden.perplexity import encode, windows

N_SAMPLES = 16  # unless the caller says how many
SEQ_LEN = 512  # ids of each, if the model's context has room for as many


# ----------------------------------------------------------------------------
# Samples


def read_text(path: Path) -> str:
    """A text for perplexity or calibration, by the rule of the programs (docs/tokenizer.md). Raises ModelError.

    It is UTF-8, CR LF is LF, and a byte order mark in front is no part of it.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        wide = data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in data
        hint = "; it looks like UTF-16" if wide else ""
        raise ModelError(f"{path}: not UTF-8 at byte {error.start}{hint}") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_samples(checkpoint: Source, calibration: Path, n_samples: int | None, seq_len: int | None) -> list[np.ndarray]:
    """The samples to calibrate with. None: as many as usual, or as long. Raises ModelError."""
    n_samples = N_SAMPLES if n_samples is None else n_samples
    seq_len = min(SEQ_LEN, checkpoint.config.max_seq_len) if seq_len is None else seq_len
    return calibration_samples(checkpoint.path, checkpoint.config, read_text(calibration), n_samples, seq_len)


def calibration_samples(hf_dir: Path, config: Config, text: str, n_samples: int, seq_len: int) -> list[np.ndarray]:
    """Up to n_samples pieces of the text, each of at most seq_len ids, the model's first token in front if it has one.

    Raises ModelError if there is no tokenizer or no text; warns if the text is too short for so many.
    """
    if n_samples < 1:
        raise ModelError(f"--samples is {n_samples}, expected 1 or more")
    if not 2 <= seq_len <= config.max_seq_len:
        raise ModelError(f"--seq-len is {seq_len}, expected 2 to the model's {config.max_seq_len}")
    path = Path(hf_dir) if is_gguf(hf_dir) else Path(hf_dir) / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path}: no such file, and calibration needs the model's tokenizer")
    ids, bos = encode(hf_dir, text)
    if not ids:
        raise ModelError("the calibration text is empty")
    largest = max(ids) if bos is None else max(*ids, bos)
    if largest >= config.vocab_size:
        raise ModelError(f"{path}: gives id {largest}, vocab_size is {config.vocab_size}")
    samples = list(windows(ids, bos, seq_len))[:n_samples]
    found = sum(len(sample) for sample in samples)
    if found < n_samples * seq_len:
        warnings.warn(
            f"the calibration text gives {found} ids, {n_samples} samples of {seq_len} would take "
            f"{n_samples * seq_len}; going on with what there is",
            stacklevel=2,
        )
    return samples


# ----------------------------------------------------------------------------
# What activations look like


@dataclass
class Inputs:
    """What calibration saw at one place.

    largest, mean: (width,) fp32, of each channel's |x|; rows: some rows of x, fp32; products: X^T X of all rows,
    (width, width) fp64, if it was asked for.
    """

    largest: np.ndarray
    mean: np.ndarray
    rows: np.ndarray
    products: np.ndarray | None = None


class Observer:
    """A step that keeps of what quantized matrices read each channel's maximum and mean magnitude, and some rows.

    with_products: and X^T X, but for the classifier's input, which no scheme searches for.
    """

    def __init__(self, with_products: bool = False) -> None:
        self._with_products = with_products
        self._products: dict[str, np.ndarray] = {}
        self._largest: dict[str, np.ndarray] = {}
        self._sum: dict[str, np.ndarray] = {}
        self._count: dict[str, int] = {}
        self._rows: dict[str, list[np.ndarray]] = {}
        self.picked = np.zeros(0, int)  # which rows of the current sample to keep

    def __call__(self, name: str, value: np.ndarray) -> np.ndarray:
        if name == "norm" or name.split(".", 2)[-1] in PLACES:
            magnitude = np.abs(value)
            largest = magnitude.max(axis=0)
            if not np.isfinite(largest).all():
                raise ModelError(f"calibration met a value that is not finite at {name}")
            self._largest[name] = np.maximum(self._largest.get(name, F32(0)), largest)
            self._sum[name] = self._sum.get(name, F64(0)) + magnitude.sum(axis=0, dtype=F64)
            self._count[name] = self._count.get(name, 0) + len(value)
            self._rows.setdefault(name, []).append(value[self.picked])
            if self._with_products and name != "norm":
                x = value.astype(F64)
                self._products[name] = self._products.get(name, F64(0)) + x.T @ x
        return value

    def inputs(self) -> dict[str, Inputs]:
        """What was seen since the last call, by step name."""
        seen = {
            name: Inputs(
                largest,
                (self._sum[name] / self._count[name]).astype(F32),
                np.concatenate(self._rows[name]),
                self._products.get(name),
            )
            for name, largest in self._largest.items()
        }
        self._largest, self._sum, self._count, self._rows, self._products = {}, {}, {}, {}, {}
        return seen


def observe(
    checkpoint: Source,
    samples: list[np.ndarray],
    n_rows: int = 0,
    progress: bool = False,
    with_products: bool = False,
) -> Iterator[tuple[Fp32, dict[str, Inputs]]]:
    """The unquantized forward pass over all samples, one layer's weights in memory at a time if the caller keeps none.

    After each layer: its weights, and what its four places saw. At the end the same for the final norm. n_rows: rows
    to keep of each place, spread evenly over the samples. with_products: as of `Observer`.
    """
    config, observer = checkpoint.config, Observer(with_products)
    total = sum(len(sample) for sample in samples)
    kept = np.unique(np.linspace(0, total - 1, min(n_rows, total)).round().astype(int))
    starts = np.cumsum([0, *(len(sample) for sample in samples)])
    picked = [kept[(kept >= a) & (kept < b)] - a for a, b in pairwise(starts)]

    table = Fp32(checkpoint)
    states = [embed(config, table, sample) for sample in samples]
    del table
    with tqdm(total=config.n_layers * total, unit="token", unit_scale=True, desc="calibrating",
              disable=not progress, mininterval=0.5) as bar:  # fmt: skip
        for i in range(config.n_layers):
            weights = Fp32(checkpoint)
            for j, x in enumerate(states):
                observer.picked = picked[j]
                states[j] = forward_layer(config, weights, i, x, rope_table(config, np.arange(len(x))), observer)
                bar.update(len(x))
            yield weights, observer.inputs()
            del weights  # before the next layer's are read
        last = Fp32(checkpoint)
        for j, x in enumerate(states):
            observer.picked = picked[j]
            observer("norm", last_norm(config, last, x))
        yield last, observer.inputs()

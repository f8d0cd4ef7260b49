"""A model file of a real model's shape with random weights, written directly as codes and scales.

    python -m bench.make_model --like llama-3.2-1b [--scheme q8 | w8a8 | awq] OUT.bin

For measuring speed without downloading or quantizing anything. There is no tokenizer: such a file runs with --ids
and --bench. Scales are such that activations keep the size they have in a trained model; the time taken does not
depend on the values, only on there being no infinities and no denormal numbers. Needs nothing but numpy, for machines
that have little else (and tqdm, if there is to be a progress bar).
"""

import argparse
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.random_checkpoint import MODELS, config_of
from export.model_file import (
    HEADER_SIZE,
    MAGIC_AWQ,
    MAGIC_Q8,
    MAGIC_W8A8,
    VERSION_AWQ,
    VERSION_Q8,
    VERSION_W8A8,
    Generation,
    awq_tensors,
    header,
    matrix_names,
    norm_names,
    replacing,
    write_array,
)
from golden.checkpoint import Config

POOL_SIZE = 1 << 24  # random values are made once and then read from anywhere: as good here, and far quicker


@dataclass(frozen=True)
class Storage:
    """How a scheme stores its matrices: int8 codes, and behind them fp32 scales."""

    magic: int
    version: int
    group_size: int  # weights that share a scale; 0: a whole row
    kv_value_bytes: int = 4  # in the KV cache

    def n_scales(self, n_out: int, n_in: int) -> int:
        """Of a matrix of n_out rows and n_in columns."""
        return n_out * (n_in // (self.group_size or n_in))

    def n_bytes(self, n_out: int, n_in: int) -> int:
        """Of a layer's matrix, codes and scales."""
        return n_out * n_in + 4 * self.n_scales(n_out, n_in)

    def table_bytes(self, n_out: int, n_in: int) -> int:
        """Of the embedding or the classifier."""
        return self.n_bytes(n_out, n_in)


@dataclass(frozen=True)
class Int4Storage(Storage):
    """AWQ's: int4 codes, for each group an int4 zero point and an fp16 scale; embedding and classifier in fp16."""

    def n_bytes(self, n_out: int, n_in: int) -> int:
        return (n_out * n_in + self.n_scales(n_out, n_in)) // 2 + 2 * self.n_scales(n_out, n_in)

    def table_bytes(self, n_out: int, n_in: int) -> int:
        return 2 * n_out * n_in


SCHEMES = {
    "q8": Storage(MAGIC_Q8, VERSION_Q8, 64),
    "w8a8": Storage(MAGIC_W8A8, VERSION_W8A8, 0),  # activations: a scale for each token, as it comes
    "awq": Int4Storage(MAGIC_AWQ, VERSION_AWQ, 128, kv_value_bytes=2),
}


def matrix_shape(config: Config, name: str) -> tuple[int, int]:
    """(n_out, n_in) of the matrix with this step name, e.g. "layers.0.attn.q_proj"."""
    c = config
    return {
        "embed": (c.vocab_size, c.dim),
        "q_proj": (c.q_dim, c.dim),
        "k_proj": (c.kv_dim, c.dim),
        "v_proj": (c.kv_dim, c.dim),
        "o_proj": (c.dim, c.q_dim),
        "gate_proj": (c.hidden_dim, c.dim),
        "up_proj": (c.hidden_dim, c.dim),
        "down_proj": (c.dim, c.hidden_dim),
        "classifier": (c.vocab_size, c.dim),
    }[name.rsplit(".", 1)[-1]]


class RandomSource:
    """Endless random numbers from a few pools."""

    def __init__(self, size: int = POOL_SIZE, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        # A group of 64 normal values quantized: the largest is 127, and 127 is about 2.5 standard deviations.
        self.codes = np.clip(np.rint(self.rng.standard_normal(size, np.float32) * 50), -127, 127).astype(np.int8)
        self.factors = self.rng.uniform(0.75, 1.25, size // 64).astype(np.float32)
        int4 = np.random.default_rng([seed, 1])
        self.words = int4.integers(-(2**31), 2**31, size // 16, np.int32)  # eight codes each, all equally frequent
        self.zeros = (self.words & 0x11111111) + 0x77777777  # 7 or 8, so that weights are 0 on average
        self.zeros = self.zeros.astype(np.uint32).view(np.int32)

    def write(self, f, pool: np.ndarray, n: int) -> None:  # noqa: ANN001  (any binary file)
        """Appends n values of a pool, starting anywhere in it."""
        start = int(self.rng.integers(len(pool)))
        while n > 0:
            part = pool[start : start + n]
            f.write(part.data)
            n, start = n - len(part), 0


class Silent:
    """A progress bar that is none."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: int) -> None:
        """n bytes more are done."""


def progress_bar(total: int, shown: bool) -> Any:
    """tqdm's, if one is to be shown and tqdm is there."""
    with suppress(ImportError):
        if shown:
            from tqdm import tqdm

            return tqdm(total=total, unit="B", unit_scale=True)
    return Silent()


def write_int8(f: BinaryIO, config: Config, storage: Storage, source: RandomSource, bar: Any) -> None:
    """The weights of a Q8 or W8A8 file."""
    for name in norm_names(config):
        n = config.head_dim if name.endswith(("q_norm", "k_norm")) else config.dim
        write_array(f, np.ones(n), "f4")
    for name in matrix_names(config):
        n_out, n_in = matrix_shape(config, name)
        source.write(f, source.codes, n_out * n_in)
        # Weights of variance 1 / n_in turn inputs of size 1 into outputs of size 1.
        scales = (source.factors * (1 / (50 * math.sqrt(n_in)))).astype("<f4")
        source.write(f, scales, storage.n_scales(n_out, n_in))
        bar.update(storage.n_bytes(n_out, n_in))


def write_int4(f: BinaryIO, config: Config, storage: Storage, source: RandomSource, bar: Any) -> None:
    """The weights of an AWQ file."""
    deviation = math.sqrt((16**2 - 1) / 12)  # of codes that are all equally frequent
    table = (source.codes * np.float32(1 / (50 * math.sqrt(config.dim)))).astype("<f2")
    for name, dtype, shape in awq_tensors(config, storage.group_size):
        n, part = math.prod(shape), name.rsplit(".", 1)[-1]
        if part == "qweight":
            n_in = shape[0]
            source.write(f, source.words, n)
        elif part == "qzeros":
            source.write(f, source.zeros, n)
        elif part == "scales":
            source.write(f, (source.factors * (1 / (deviation * math.sqrt(n_in)))).astype("<f2"), n)
        elif part in ("embed", "classifier"):
            source.write(f, table, n)
        else:
            write_array(f, np.ones(n), "f2")
        bar.update(n * np.dtype(dtype).itemsize)


def write_model(config: Config, out: Path, scheme: str = "q8", progress: bool = True) -> None:
    """Writes what `python -m export` writes for the scheme, with random numbers and no tokenizer."""
    c, source, storage = config, RandomSource(), SCHEMES[scheme]
    total = 0
    for name in matrix_names(c):
        count = storage.n_bytes if name.startswith("layers.") else storage.table_bytes
        total += count(*matrix_shape(c, name))
    with replacing(out) as f, progress_bar(total, progress) as bar:
        f.write(bytes(HEADER_SIZE))
        (write_int4 if scheme == "awq" else write_int8)(f, c, storage, source, bar)
        end = f.tell()
        f.seek(0)
        f.write(header(c, Generation(temperature=0.0), storage.magic, storage.version, storage.group_size, end, b""))


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.make_model", description=__doc__.splitlines()[0])
    parser.add_argument("--like", choices=MODELS, required=True, help="the model whose shape it has")
    parser.add_argument("--scheme", choices=SCHEMES, default="q8", help="how the weights are stored (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write_model(config_of(args.like), args.out, args.scheme, not args.quiet)
    return 0


if __name__ == "__main__":
    sys.exit(main())

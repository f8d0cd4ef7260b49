"""A model file of a real model's shape with random weights, written directly as codes and scales.

    python -m bench.make_model --like llama-3.2-1b [--scheme q8 | w8a8 | awq | gptq | gptq-4 | gptq-2 | ...] OUT.bin
    python -m bench.make_model --like qwen3-30b-a3b --scheme a8w8 | a8w4 | moe-ladder | ... [--layers N] OUT.bin

For measuring speed without downloading or quantizing anything. There is no tokenizer: such a file runs with --ids
and --bench. Scales are such that activations keep the size they have in a trained model; the time taken does not
depend on the values, only on there being no infinities and no denormal numbers. Needs nothing but numpy, for machines
that have little else (and tqdm, if there is to be a progress bar).
"""

import argparse
import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.random_checkpoint import MIXTURES, MODELS, config_of
from formats import gptq as gptq_format
from formats import moe
from formats.checkpoint import Config
from formats.files import replacing
from formats.gptq import GptqLayout, MatrixFormat
from formats.limits import LIMITS
from formats.model_file import Generation, header, write_array
from formats.moe import MoeLayout
from formats.schemes import AWQ_FILE, GPTQ_FILE, MOE_FILE, Q8_FILE, W8A8_FILE, FileFormat, Layout
from formats.tensors import HEADER_SIZE, Tensor, weights_end

POOL_SIZE = 1 << 24  # random values are made once and then read from anywhere: as good here, and far quicker
CODE_DEVIATION = 50  # of int8 codes: in a group of 64 normal values the largest, code 127, is at about 2.5
INT4_DEVIATION = math.sqrt((16**2 - 1) / 12)  # of codes that are all equally frequent
TABLES = {bits: np.rint(np.linspace(-120, 120, 2**bits)).astype(np.int8) for bits in (4, 5)}  # what codes stand for
SKEW = 1.77  # times as large, every fourth expert's logits win 60 % of the eight places of 128
EMBEDDING = 32  # of mixtures: larger than what all layers add
LADDER_DEVIATION = 8 * 5 * math.sqrt((4**2 - 1) / 12)  # of 2-bit codes in fifths, times the mean of the scales' codes


@dataclass(frozen=True)
class Storage:
    """The kind of file that is made of a scheme."""

    format: FileFormat
    group_size: int  # weights that share a scale, of GPTQ and ladders the activations; 0: a whole row
    kv_value_bytes: int = 4  # in the KV cache
    layout: Layout | None = None  # of a GPTQ or MoE file

    def tensors(self, config: Config) -> list[Tensor]:
        """What such a file holds, in order."""
        if self.layout is not None:
            return list(self.format.tensors(config, self.layout))
        return list(self.format.tensors(config, self.group_size, 0))

    def own_fields(self, config: Config) -> bytes:
        """What the header of such a file has of its own."""
        if isinstance(self.layout, MoeLayout):
            return moe.pack_layout(config, self.layout)
        return b"" if self.layout is None else gptq_format.pack_layout(self.layout)


BYTES, NIBBLES, SPARSE = MatrixFormat(8), MatrixFormat(4, 128), MatrixFormat(4, 128, sparse=True)
PAIRS = MatrixFormat(2, 64, two_level=True)
NL4, FIVE, SIX = (MatrixFormat(bits, 64, int8_scales=True) for bits in (4, 5, 6))


def gptq(embed: MatrixFormat, attention: MatrixFormat, feed_forward: MatrixFormat, classifier: MatrixFormat) -> Storage:
    """A GPTQ file with these formats."""
    return Storage(GPTQ_FILE, 64, layout=GptqLayout((embed, *[attention] * 4, *[feed_forward] * 3, classifier)))


SCHEMES = {
    "q8": Storage(Q8_FILE, 64),
    "w8a8": Storage(W8A8_FILE, 0),  # activations: a scale for each token, as it comes
    "awq": Storage(AWQ_FILE, 128, kv_value_bytes=2),
    "gptq": gptq(BYTES, NIBBLES, PAIRS, BYTES),  # the exporter's ladder, of a tied model
    "gptq-8": gptq(BYTES, BYTES, BYTES, BYTES),
    "gptq-4": gptq(NIBBLES, NIBBLES, NIBBLES, NIBBLES),
    "gptq-2": gptq(PAIRS, PAIRS, PAIRS, PAIRS),
    "gptq-nl4": gptq(NL4, NL4, NL4, NL4),
    "gptq-5": gptq(FIVE, FIVE, FIVE, FIVE),
    "gptq-6": gptq(SIX, SIX, SIX, SIX),
    "gptq-sparse": gptq(NIBBLES, SPARSE, SPARSE, NIBBLES),
}


def ladder(attention: MatrixFormat, experts: MatrixFormat) -> Storage:
    """A MoE file with these formats; the embedding is in 8 bits, the classifier stored as attention is."""
    formats = (BYTES, attention, attention, experts, experts, attention)
    return Storage(MOE_FILE, 64, layout=MoeLayout(moe.LADDER, 0, formats=formats))


MOE_SCHEMES = {  # of mixtures of experts
    "a8w8": Storage(MOE_FILE, 0, layout=MoeLayout("a8w8", 0)),
    "a8w4": Storage(MOE_FILE, 0, layout=MoeLayout("a8w4", 64)),
    "a8w4-pure": Storage(MOE_FILE, 0, layout=MoeLayout("a8w4", 64, pure=True)),
    "moe-ladder": ladder(NIBBLES, PAIRS),  # the exporter's
    "moe-4": ladder(NIBBLES, NIBBLES),
    "moe-sparse": ladder(SPARSE, SPARSE),
}


def storage_of(config: Config, scheme: str) -> Storage:
    """How a scheme stores a model. Raises ValueError for a scheme of the other kind of model."""
    schemes = SCHEMES if config.moe is None else MOE_SCHEMES
    if scheme not in schemes:
        kind = "a model without experts" if config.moe is None else "a mixture of experts"
        raise ValueError(f"--scheme is {scheme}, {kind} has {', '.join(schemes)}")
    return schemes[scheme]


class RandomSource:
    """Endless random numbers from a few pools."""

    def __init__(self, size: int = POOL_SIZE, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        normal = self.rng.standard_normal(size, np.float32)
        self.codes = np.clip(np.rint(normal * CODE_DEVIATION), -127, 127).astype(np.int8)
        self.factors = self.rng.uniform(0.75, 1.25, size // 64).astype(np.float32)
        int4 = np.random.default_rng([seed, 1])
        self.words = int4.integers(-(2**31), 2**31, size // 16, np.int32)  # eight codes each, all equally frequent
        self.zeros = (self.words & 0x11111111) + 0x77777777  # 7 or 8, so that weights are 0 on average
        self.zeros = self.zeros.astype(np.uint32).view(np.int32)
        levels = int4.integers(1, 16, size // 16, np.uint8)  # scales of two levels; their mean is 8
        self.levels = levels | int4.integers(7, 9, size // 16, np.uint8) << np.uint8(4)  # and zero points
        pairs = np.array([0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100], np.uint8)  # two of four weights
        self.mask = int4.choice(pairs, size // 16) | int4.choice(pairs, size // 16) << np.uint8(4)

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


def write_weights(
    f: BinaryIO, config: Config, tensors: Iterable[Tensor], alignment: int, source: RandomSource, bar: Any, skew: bool
) -> None:
    """Every tensor of a file, each at a multiple of `alignment`.

    Weights of variance 1 / n_in turn inputs of size 1 into outputs of size 1. skew: a quarter of the experts
    gets most tokens.
    """
    position = HEADER_SIZE
    for tensor in tensors:
        dtype, shape, part = tensor.dtype, tensor.shape, tensor.name.rsplit(".", 1)[-1]
        n = math.prod(shape)
        f.write(bytes(-position % alignment))
        position += -position % alignment + tensor.n_bytes
        if part == "codes" and dtype == "|i1":
            n_in, deviation = shape[-1], CODE_DEVIATION
            source.write(f, source.codes, n)
        elif part == "codes":
            n_in, deviation = 2 * shape[-1], INT4_DEVIATION  # two codes to a byte
            source.write(f, source.words.view(np.uint8), n)
        elif part == "mask":
            source.write(f, source.mask, n)
        elif part == "groups":  # behind their codes
            row_bytes, n_in, deviation = n_in // 2, 64 * shape[-1], LADDER_DEVIATION
            if dtype == "|i1":
                bits = 8 * row_bytes // n_in
                deviation = CODE_DEVIATION * (TABLES[bits].std() if bits in TABLES else math.sqrt((4**bits - 1) / 12))
            source.write(f, source.levels if dtype == "|u1" else source.codes, n)
        elif part == "table":
            f.write(TABLES[n.bit_length() - 1].data)
        elif part == "zeros":
            source.write(f, source.zeros.view(np.uint8), n)
        elif part == "row_scales":
            source.write(f, source.factors * np.float32(1 / (deviation * math.sqrt(n_in))), n)
        elif part == "qweight":
            n_in, deviation = shape[0], INT4_DEVIATION
            source.write(f, source.words, n)
        elif part == "qzeros":
            source.write(f, source.zeros, n)
        elif part == "scales":  # behind the codes that they belong to
            size = 1 / (deviation * math.sqrt(n_in))
            if config.moe is not None and tensor.name == "embed.scales":  # routers tell tokens apart in all layers
                size *= EMBEDDING * math.sqrt(n_in)
            source.write(f, (source.factors * size).astype(dtype), n)
        elif part == moe.DENSE_LAYERS:
            f.write(bytes(not config.has_experts(i) for i in range(config.n_layers)))
        elif part == "assist":  # for hardware; the program does not read it
            f.write(bytes(tensor.n_bytes))
        elif part == "router" and skew:
            for expert in range(shape[0]):
                at = int(source.rng.integers(len(source.codes) - shape[1]))
                size = (1 if expert % 4 else SKEW) / (CODE_DEVIATION * math.sqrt(shape[1]))
                write_array(f, source.codes[at : at + shape[1]] * np.float32(size), dtype)
        elif part in ("embed", "classifier", "router"):
            table = source.codes * np.float32(1 / (CODE_DEVIATION * math.sqrt(shape[1])))
            source.write(f, table.astype(dtype), n)
        else:
            write_array(f, np.ones(n), dtype)
        bar.update(tensor.n_bytes)


def write_model(
    config: Config,
    out: Path,
    scheme: str = "q8",
    progress: bool = True,
    pool_size: int = POOL_SIZE,
    skew: bool = False,
) -> None:
    """Writes what `python -m export` writes for the scheme, with random numbers and no tokenizer."""
    source, storage = RandomSource(pool_size), storage_of(config, scheme)
    tensors = storage.tensors(config)
    end = weights_end(tensors, storage.format.alignment)
    with replacing(out) as f, progress_bar(end - HEADER_SIZE, progress) as bar:
        generation = Generation(temperature=0.0)
        own = storage.own_fields(config)
        f.write(header(config, generation, storage.format, storage.group_size, end, b"", own=own))
        write_weights(f, config, tensors, storage.format.alignment, source, bar, skew)


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.make_model", description=__doc__.splitlines()[0])
    parser.add_argument("--like", choices=MODELS | MIXTURES, required=True, help="the model whose shape it has")
    parser.add_argument("--scheme", choices=SCHEMES | MOE_SCHEMES,
                        help="how the weights are stored (q8; of mixtures of experts a8w8)")  # fmt: skip
    parser.add_argument("--layers", type=int, metavar="N", help="how many it has, if not as many as the model")
    parser.add_argument("--skew", action="store_true", help="a quarter of the experts gets about 60 %% of the tokens")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.layers is not None and not LIMITS["n_layers"].holds(args.layers):
        parser.error(f"--layers is {args.layers}, expected {LIMITS['n_layers']}")
    config = config_of(args.like, args.layers)
    scheme = args.scheme or ("q8" if config.moe is None else "a8w8")
    try:
        storage_of(config, scheme)
    except ValueError as error:
        parser.error(str(error))
    write_model(config, args.out, scheme, not args.quiet, skew=args.skew)
    return 0


if __name__ == "__main__":
    sys.exit(main())

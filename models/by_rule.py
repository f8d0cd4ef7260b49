"""Model files of any size whose every byte follows from a rule, so that nobody has to download them.

    python -m models.by_rule --like llama-3.2-1b [--scheme q8 | w8a8 | awq | gptq | gptq-4 | gptq-2 | ...] OUT.bin
    python -m models.by_rule --like qwen3-30b-a3b --scheme a8w8 | a8w4 | moe-ladder | ... [--layers N] OUT.bin

Goldens at the size of real models are made of such files (models/sizes.py), and speed is measured with them. There is
no tokenizer: a file runs with --ids and --bench. Needs nothing but numpy, for machines that have little else (and tqdm,
if there is to be a progress bar). docs/real-size.md has the same in words:

    word(t, i)   splitmix64(t * 2^40 + i), of tensor t of the file, counted from 0
    u            an element's own bytes of the tensor's words, one word behind the other, little-endian

What a value is made of u by its kind is in `Rule`; scales are such that activations keep the size they have in a
trained model, and every 64th channel of a norm, on average, is 8 times as large.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.random_checkpoint import MIXTURES, MODELS, config_of
from formats import gptq as gptq_format
from formats import moe
from formats.checkpoint import Config
from formats.files import replacing
from formats.gptq import GptqLayout, MatrixFormat
from formats.limits import LIMITS
from formats.model_file import Generation, header
from formats.moe import MoeLayout
from formats.schemes import AWQ_FILE, GPTQ_FILE, MOE_FILE, Q8_FILE, W8A8_FILE, FileFormat, Layout
from formats.tensors import HEADER_SIZE, Tensor, weights_end
from golden.fp32 import splitmix64

PART_BYTES = 1 << 19  # of a tensor that are made at a time, so that they stay in the cache
NONE_OF_A_FILE = 1 << 23  # a tensor's number that no file has: token ids are made of its words


# ----------------------------------------------------------------------------
# The rule


def words(tensor: int, start: int, stop: int) -> np.ndarray:
    """The words start to stop - 1 of a tensor, uint64."""
    return splitmix64(np.arange((tensor << 40) + start, (tensor << 40) + stop, dtype=np.uint64))


def token_ids(n: int, vocab_size: int) -> list[int]:
    """The first n ids of a prompt by the rule."""
    return (words(NONE_OF_A_FILE, 0, n) % np.uint64(vocab_size)).tolist()


def floats(u: np.ndarray, exponent: int, signed: bool = False, outliers: bool = False) -> np.ndarray:
    """u's fraction, and its sign if signed, under a given exponent: 2^exponent to twice that. u: uint32, uint16.

    The result is fp32 or fp16. outliers: where the upper six bits of u are 0, 8 times as large.
    """
    size, bias, kind = (23, 127, "<f4") if u.itemsize == 4 else (10, 15, "<f2")
    bits = u & u.dtype.type((1 << size) - 1) | u.dtype.type((exponent + bias) << size)
    if signed:
        bits |= u & u.dtype.type(1 << 8 * u.itemsize - 1)
    if outliers:
        bits += (u >> u.dtype.type(8 * u.itemsize - 6) == 0) * u.dtype.type(3 << size)
    return bits.view(kind)


def int8(u: np.ndarray) -> np.ndarray:
    """-127 to 127; -128 becomes -127."""
    return np.maximum(u.view(np.int8), np.int8(-127))


PAIRS_OF_FOUR = np.array([0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100], np.uint8)  # the weights that 2:4 keeps


@dataclass(frozen=True)
class Rule:
    """What the values of one tensor are made of their bytes."""

    kind: str
    exponent: int = 0

    def of(self, raw: np.ndarray, dtype: str) -> np.ndarray:
        """The values that raw, uint8, stands for."""
        u = raw.view(f"<u{np.dtype(dtype).itemsize}")
        if self.kind == "int8":
            return int8(u)
        if self.kind == "bytes":
            return u
        if self.kind == "e4m3":  # two codes are NaN
            return u - (u & np.uint8(127) == 127)
        if self.kind == "e8m0":
            return np.uint8(127 + self.exponent) + (u & np.uint8(1))
        if self.kind == "mask":
            low, high = (PAIRS_OF_FOUR[half % np.uint8(6)] for half in (u & np.uint8(15), u >> np.uint8(4)))
            return low | high << np.uint8(4)
        if self.kind == "zeros":  # in each half of a byte `exponent` or one more
            return (raw & np.uint8(0x11)) + np.uint8(0x11 * self.exponent)
        if self.kind == "levels":  # a scale's code, and 7 or 8 as a zero point
            return u & np.uint8(15) | (np.uint8(7) + (u >> np.uint8(7))) << np.uint8(4)
        if self.kind == "signs":
            return np.where(u >> np.uint32(31) == 0, np.float32(1), np.float32(-1))
        return floats(u, self.exponent, signed=self.kind == "signed", outliers=self.kind == "norm")


def half_bits(n_in: int) -> int:
    """About log2(sqrt(n_in)): by so many bits weights are smaller, as sums over n_in of them grow as the root."""
    return n_in.bit_length() // 2


def size_of_codes(parts: dict[str, Tensor], n_in: int, is_mx: bool) -> int:
    """log2 of the mean size of a matrix's codes, with that of its scales' codes and fractions, rounded.

    parts: the tensors of the matrix.
    """
    codes = parts.get("codes")
    if codes is None or codes.dtype == "|i1" or is_mx:
        return 3 if codes is None else 7  # AWQ's, or int8 and E4M3
    bits = 8 * codes.shape[-1] * (2 if "mask" in parts else 1) // n_in
    if "groups" in parts:
        return 6 if parts["groups"].dtype == "|u1" else 11 if bits == 6 else 13
    return 2 if "mask" in parts else 3 if bits == 4 else 1


def exponent_of_scales(config: Config, name: str, n_in: int, size: int) -> int:
    """The exponent of what a matrix's values are multiplied by. size: log2 of those values.

    The embedding's rows are small, so that a model with a tied classifier does not repeat its last token; those of a
    model with experts larger, so that routers tell tokens apart. What is added to the residual stream is twice as large
    as other results, and so are queries and keys if no norm comes after.
    """
    if name == "embed":
        return -size - (6 if config.moe is None else 3)
    no_norm = ("q_proj", "k_proj") if not config.has_head_norms else ()
    return -size - half_bits(n_in) + name.endswith(("o_proj", "down_proj", *no_norm))


# ----------------------------------------------------------------------------
# The files


@dataclass(frozen=True)
class Storage:
    """The kind of file that is made of a scheme."""

    format: FileFormat
    group_size: int  # weights that share a scale, of GPTQ and ladders the activations; 0: a whole row
    kv_value_bytes: int = 4  # in the KV cache
    layout: Layout | None = None  # of a GPTQ or MoE file
    static: bool = False  # W8A8 with static scales of activations

    def tensors(self, config: Config) -> list[Tensor]:
        """What such a file holds, in order."""
        if self.layout is not None:
            return list(self.format.tensors(config, self.layout))
        return list(self.format.tensors(config, self.group_size, int(self.static)))

    def header(self, config: Config) -> bytes:
        """The 256 bytes in front of the weights of such a file, which has no tokenizer: temperature 0."""
        if isinstance(self.layout, MoeLayout):
            own = moe.pack_layout(config, self.layout)
        else:
            own = b"" if self.layout is None else gptq_format.pack_layout(self.layout)
        end = weights_end(self.tensors(config), self.format.alignment)
        generation, static = Generation(temperature=0.0), int(self.static)
        return header(config, generation, self.format, self.group_size, end, b"", static, own=own)


BYTES, NIBBLES, SPARSE = MatrixFormat(8), MatrixFormat(4, 128), MatrixFormat(4, 128, sparse=True)
PAIRS = MatrixFormat(2, 64, two_level=True)
NL4, FIVE, SIX = (MatrixFormat(bits, 64, int8_scales=True) for bits in (4, 5, 6))


def gptq(embed: MatrixFormat, attention: MatrixFormat, feed_forward: MatrixFormat, classifier: MatrixFormat) -> Storage:
    """A GPTQ file with these formats."""
    return mixed(embed, *[attention] * 4, *[feed_forward] * 3, classifier)


def mixed(*formats: MatrixFormat) -> Storage:
    """A GPTQ file with a format for each kind of matrix."""
    return Storage(GPTQ_FILE, gptq_format.activation_group(formats), layout=GptqLayout(formats))


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


def ladder(attention: MatrixFormat, experts: MatrixFormat, down: MatrixFormat | None = None) -> Storage:
    """A MoE file with these formats; the embedding is in 8 bits, the classifier stored as attention is.

    down: of the experts' second matrix, if it has another than the first.
    """
    formats = (BYTES, attention, attention, experts, down or experts, attention)
    return Storage(MOE_FILE, gptq_format.activation_group(formats), layout=MoeLayout(moe.LADDER, 0, formats=formats))


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


def rules(config: Config, storage: Storage, tensors: list[Tensor]) -> Iterator[Rule | None]:
    """The rule of each tensor; None for the few that are no function of one element's bytes (`whole_tensor`)."""
    matrices: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        name, _, part = tensor.name.rpartition(".")
        matrices.setdefault(name, {})[part] = tensor
    widths = dict(moe.matrix_shapes(config)) | (dict(moe.expert_shapes(config)) if config.moe else {})
    is_mx = isinstance(storage.layout, MoeLayout) and storage.layout.format == "mxfp8"
    for tensor in tensors:
        name, _, part = tensor.name.rpartition(".")
        if tensor.name in widths:  # a table of fp16 numbers
            yield Rule("signed", exponent_of_scales(config, tensor.name, tensor.shape[-1], 0))
        elif part == "router":
            yield Rule("signed", 1 - half_bits(tensor.shape[-1]))
        elif name in widths:
            n_in, parts = widths[name][-1], matrices[name]
            in_mx = is_mx and tensor.dtype == "|u1"
            if part == "scales" and in_mx:
                yield Rule("e8m0", exponent_of_scales(config, name, n_in, 7))
            elif part in ("scales", "row_scales"):
                size = size_of_codes(parts, n_in, in_mx)
                yield Rule("positive", exponent_of_scales(config, name, n_in, size))
            elif part in ("zeros", "qzeros"):
                yield Rule("zeros", 1 if size_of_codes(parts, n_in, False) == 1 else 7)
            elif part == "groups" and tensor.dtype == "|u1":
                yield Rule("levels")
            elif part == "assist":
                yield None
            elif in_mx:
                yield Rule("e4m3")
            else:
                yield Rule("mask" if part == "mask" else "int8" if tensor.dtype == "|i1" else "bytes")
        elif part in ("order", moe.DENSE_LAYERS):
            yield None
        elif part == "rotation":
            yield Rule("signs")
        elif part == "act_scales":
            yield Rule("positive", -4)
        else:
            of_head = part in ("q_norm", "k_norm")
            yield Rule("positive", 0) if of_head else Rule("norm", 0 if tensor.name == "norm" else -1)


def whole_tensor(config: Config, number: int, tensors: list[Tensor], of_all: list[Rule | None]) -> np.ndarray:
    """The values of tensor `number`, which has no `Rule` of its own."""
    tensor = tensors[number]
    if tensor.name == moe.DENSE_LAYERS:
        return np.array([not config.has_experts(i) for i in range(config.n_layers)], np.uint8)
    if tensor.name.endswith(".order"):  # of the channels by their words
        return np.argsort(words(number, 0, tensor.shape[0]), kind="stable").astype("<i4")
    return assist_of(number, tensors, of_all)


def assist_of(number: int, tensors: list[Tensor], of_all: list[Rule | None]) -> np.ndarray:
    """A8W4's assist matrix, which follows from the codes and scales in front of it."""
    from formats.low_bits import unpack_codes
    from golden.grouped import assist_matrix

    packed, scales = (values(i, tensors[i], rule) for i in (number - 2, number - 1) if (rule := of_all[i]) is not None)
    *n_experts, n_out, n_bytes = packed.shape
    codes = unpack_codes(packed.reshape(-1, n_bytes), 4).astype(np.int8) - np.int8(8)
    codes = codes.reshape(math.prod(n_experts), n_out, -1)
    return assist_matrix(codes, scales.astype(np.float32).reshape(*codes.shape[:2], -1)).reshape(packed.shape[:-1])


def parts_of(number: int, tensor: Tensor, rule: Rule) -> Iterator[np.ndarray]:
    """The values of a tensor in order, as many at a time as fit PART_BYTES, flat."""
    for start in range(0, tensor.n_bytes, PART_BYTES):
        n_bytes = min(PART_BYTES, tensor.n_bytes - start)
        raw = words(number, start // 8, start // 8 - -n_bytes // 8).view(np.uint8)[:n_bytes]
        yield rule.of(raw, tensor.dtype)


def values(number: int, tensor: Tensor, rule: Rule) -> np.ndarray:
    """The whole tensor. number: its place in the file's list."""
    return np.concatenate(list(parts_of(number, tensor, rule))).view(tensor.dtype).reshape(tensor.shape)


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


def write_stored(config: Config, out: Path, storage: Storage, progress: bool = False, skew: bool = False) -> None:
    """Writes a model file by the rule. skew: a quarter of the experts gets most tokens, which is not the rule."""
    tensors = storage.tensors(config)
    alignment = storage.format.alignment
    end = weights_end(tensors, alignment)
    with replacing(out) as f, progress_bar(end - HEADER_SIZE, progress) as bar:
        f.write(storage.header(config))
        position = HEADER_SIZE
        of_all = list(rules(config, storage, tensors))
        for number, (tensor, rule) in enumerate(zip(tensors, of_all, strict=True)):
            f.write(bytes(-position % alignment))
            position += -position % alignment + tensor.n_bytes
            if rule is None:
                f.write(np.ascontiguousarray(whole_tensor(config, number, tensors, of_all)).data)
            elif skew and tensor.name.endswith(".router"):
                router = values(number, tensor, rule)
                router[::4] *= 2
                f.write(router.data)
            else:
                for part in parts_of(number, tensor, rule):
                    f.write(part.data)
            bar.update(tensor.n_bytes)


def write_model(config: Config, out: Path, scheme: str = "q8", progress: bool = True, skew: bool = False) -> None:
    """Writes what `python -m export` writes for one of SCHEMES or MOE_SCHEMES, by the rule and with no tokenizer."""
    write_stored(config, out, storage_of(config, scheme), progress, skew)


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m models.by_rule", description=__doc__.splitlines()[0])
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

"""Model files: their header, and writing one. docs/model-files.md has the byte layout, formats/tensors.py the weights.

formats/files.py opens the file that is written, so that an interrupted export leaves nothing that looks finished.
"""

import json
import struct
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from formats.checkpoint import ROPE_KINDS, Config, RopeScaling
from formats.errors import ModelError, shown
from formats.fields import is_number, is_whole
from formats.files import check_file, read_json
from formats.limits import LIMITS
from formats.schemes import FileFormat, Layout, format_of
from formats.tensors import HEADER_SIZE, Tensor, with_offsets

EXTENSION_MAGIC, EXTENSION_OFFSET = 0x31584B41, 0x40  # "AKX1"
ARCH_NUMBER = {"llama": 1, "qwen3": 2, "qwen3_moe": 3}
MAX_EOS_IDS = int(LIMITS["n_eos"].high)

# Struct formats without padding, little-endian. The fields at 0x25 and 0x29 are unaligned, as in llama2.c.
_HEADER = "<Ii7iBi"  # magic, version, seven dimensions, shared_classifier, group_size
_EXTENSION = "<IIiiffIfffiii8iffiQQIiff"  # up to repetition_penalty
_CHECKSUM_OFFSET = 0xB0
_ATTENTION_FACTOR_OFFSET, _ROTATION_BLOCK_OFFSET = 0x30, 0x34
_OWN_OFFSET = 0xC0  # fields of the scheme's own, to the end of the header
_KUIPER_GROUP_SIZE_OFFSET = 0x29  # head_dim is where the others have group_size

# Fields of generation_config.json that change what transformers generates and that no program here follows, with
# the value at which each is off, besides null, false and empty lists.
_NOT_FOLLOWED_WHEN_DRAWING = {"top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
_NOT_FOLLOWED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0,
    "dola_layers": None,
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "stop_strings": None,
    "token_healing": None,
    "watermarking_config": None,
}


@dataclass(frozen=True)
class Generation:
    """Ids and sampling defaults, from generation_config.json and config.json."""

    bos_id: int = -1
    eos_ids: list[int] = field(default_factory=list)
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off


def read_generation(hf_dir: Path, vocab_size: int) -> Generation:
    """How the model likes to be sampled, as transformers would: generation_config.json before config.json.

    Raises ModelError for a value out of range. Warns, in one line, of fields that it does not follow.
    """
    path = config_path = hf_dir / "config.json"
    own, merged = {}, read_json(config_path)
    if (hf_dir / "generation_config.json").exists():
        path = hf_dir / "generation_config.json"
        own = read_json(path)
        merged = {**merged, **own}

    def refuse(name: str, value: object, expected: str) -> NoReturn:
        raise ModelError(f"{path if name in own else config_path}: {name} is {shown(value)}, expected {expected}")

    def token_id(name: str, value: object) -> int:
        if not is_whole(value) or not 0 <= value < vocab_size:
            refuse(name, value, f"an id below vocab_size {vocab_size}")
        return value

    def number(name: str, default: float) -> float:
        value = merged.get(name)
        value = default if value is None else value
        if not is_number(value) or not LIMITS[name].holds(value):
            refuse(name, value, str(LIMITS[name]))
        return value

    eos = merged.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if len(eos) > MAX_EOS_IDS:
        raise ModelError(f"{path}: eos_token_id has {len(eos)} ids, at most {MAX_EOS_IDS} fit the header")
    bos = merged.get("bos_token_id")
    sampled = merged.get("do_sample")
    if not isinstance(sampled, bool | None):
        refuse("do_sample", sampled, "true or false")
    top_k = number("top_k", 50 if sampled else 0)
    if not is_whole(top_k):
        refuse("top_k", top_k, "a whole number")
    ignored = [
        f"{name} {json.dumps(value)}"
        for name, off in (_NOT_FOLLOWED | (_NOT_FOLLOWED_WHEN_DRAWING if sampled else {})).items()
        if not ((value := merged.get(name)) is None or value is False or value in ([], {}, off))
    ]
    if ignored:
        text = ", ".join(ignored)
        text = text if len(text) <= 300 else text[:300] + "..."
        warnings.warn(f"{path}: not followed, unlike in transformers: {text}", stacklevel=3)
    return Generation(
        bos_id=-1 if bos is None else token_id("bos_token_id", bos),
        eos_ids=[token_id("eos_token_id", e) for e in eos],
        temperature=number("temperature", 1.0) if sampled else 0.0,
        top_p=number("top_p", 1.0),
        top_k=top_k,
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
    )


def header(
    config: Config,
    generation: Generation,
    file_format: FileFormat,
    group_size: int,
    tokenizer_offset: int,
    tokenizer: bytes,
    activations: int = 0,
    own: bytes = b"",
) -> bytes:
    """The 256 bytes in front of the weights, with the checksum over them and the tokenizer section.

    group_size 0: one scale per row. activations: 1 if W8A8's activations have static scales, otherwise 0. own: the
    scheme's own fields, from 0xC0 on.
    """
    c, s = config, config.rope_scaling
    head = bytearray(HEADER_SIZE)
    dims = (c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.vocab_size, c.max_seq_len)
    at_25 = c.head_dim if file_format.is_kuiper else group_size
    struct.pack_into(_HEADER, head, 0, file_format.magic, file_format.version, *dims, int(c.tied), at_25)
    if file_format.is_kuiper:
        struct.pack_into("<i", head, _KUIPER_GROUP_SIZE_OFFSET, group_size)
    scaling = (0, 0.0, 0.0, 0.0, 0)
    if s is not None:
        kind = 1 + ROPE_KINDS.index(s.kind)
        scaling = (kind, s.factor, s.low_freq_factor, s.high_freq_factor, s.original_max_position_embeddings)
        if s.kind != "llama3":
            struct.pack_into("<f", head, _ATTENTION_FACTOR_OFFSET, s.attention_factor)
    struct.pack_into("<i", head, _ROTATION_BLOCK_OFFSET, c.rotation_block)
    eos = generation.eos_ids + [0] * (MAX_EOS_IDS - len(generation.eos_ids))
    struct.pack_into(
        _EXTENSION,
        head,
        EXTENSION_OFFSET,
        EXTENSION_MAGIC,
        ARCH_NUMBER[c.arch],
        c.head_dim,
        group_size,
        c.norm_eps,
        c.rope_theta,
        *scaling,
        generation.bos_id,
        len(generation.eos_ids),
        *eos,
        generation.temperature,
        generation.top_p,
        generation.top_k,
        tokenizer_offset,
        len(tokenizer),
        0,
        activations,
        generation.min_p,
        0.0 if generation.repetition_penalty == 1 else generation.repetition_penalty,
    )
    head[_OWN_OFFSET : _OWN_OFFSET + len(own)] = own
    struct.pack_into("<I", head, _CHECKSUM_OFFSET, zlib.crc32(tokenizer, zlib.crc32(head)))
    return bytes(head)


@dataclass(frozen=True)
class FileHeader:
    """What a header says about the weights behind it."""

    config: Config
    group_size: int  # 0: one scale per row
    activations: int  # W8A8: 0 dynamic, 1 static
    weights_end: int  # where the tokenizer section begins
    file_format: FileFormat
    layout: Layout | None = None  # what the scheme's own fields say

    def tensors(self) -> list[Tensor]:
        """The tensors of the file, in order."""
        if self.layout is not None:
            return list(self.file_format.tensors(self.config, self.layout))
        return list(self.file_format.tensors(self.config, self.group_size, self.activations))


def read_header(path: Path, file_format: FileFormat) -> FileHeader:
    """The header of a file that `header` wrote. Raises ModelError if it is of another kind or inconsistent.

    An AWQ file without extension block is another program's: a Qwen3 with rope_theta 1e6 and norm_eps 1e-6.
    """
    size = check_file(path)
    try:
        with path.open("rb") as f:
            head = f.read(HEADER_SIZE)
            if len(head) < HEADER_SIZE:
                raise ModelError(f"{path}: {size} bytes, too short for a model file")
            found, found_version, *dims, tied, group_size = struct.unpack_from(_HEADER, head)
            if (other := format_of(found)) not in (None, file_format):
                raise ModelError(f"{path}: is a {other.scheme} file, expected {file_format.scheme}")
            if (found, found_version) != (file_format.magic, file_format.version):
                raise ModelError(
                    f"{path}: magic 0x{found:08x} version {found_version}, "
                    f"expected 0x{file_format.magic:08x} version {file_format.version}"
                )
            extension = struct.unpack_from(_EXTENSION, head, EXTENSION_OFFSET)
            foreign = file_format.is_kuiper and extension[0] == 0
            offset, tokenizer_size, checksum, activations = (size, 0, 0, 0) if foreign else extension[-6:-2]
            if offset + tokenizer_size != size or offset < HEADER_SIZE:
                raise ModelError(f"{path}: {size} bytes, the header says {offset + tokenizer_size}")
            f.seek(offset)
            blank = head[:_CHECKSUM_OFFSET] + bytes(4) + head[_CHECKSUM_OFFSET + 4 :]
            if not foreign and zlib.crc32(f.read(), zlib.crc32(blank)) != checksum:
                raise ModelError(f"{path}: the checksum does not hold")
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    _, arch, head_dim, _, norm_eps, rope_theta, scaled, *scaling = extension[:11]
    if file_format.is_kuiper:
        at_25, (group_size,) = group_size, struct.unpack_from("<i", head, _KUIPER_GROUP_SIZE_OFFSET)
        if foreign:
            arch, head_dim, norm_eps, rope_theta, scaled = ARCH_NUMBER["qwen3"], at_25, 1e-6, 1e6, 0
        elif at_25 != head_dim:
            raise ModelError(f"{path}: head_dim is {at_25} at 0x25 and {head_dim} at 0x48")
    if not 0 <= scaled <= len(ROPE_KINDS):
        raise ModelError(f"{path}: rope_scaling type is {scaled}, expected 0 to {len(ROPE_KINDS)}")
    if scaled > 1:
        scaling = [*scaling, ROPE_KINDS[scaled - 1], *struct.unpack_from("<f", head, _ATTENTION_FACTOR_OFFSET)]
    archs = {number: name for name, number in ARCH_NUMBER.items() if name in file_format.archs}
    if arch not in archs:
        raise ModelError(f"{path}: arch is {arch}, expected one of {sorted(archs)}")
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len = dims
    config = Config(
        arch=archs[arch],
        dim=dim,
        hidden_dim=hidden_dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        tied=bool(tied),
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rope_scaling=RopeScaling(*scaling) if scaled else None,
        rotation_block=0 if foreign else struct.unpack_from("<i", head, _ROTATION_BLOCK_OFFSET)[0],
    )
    check_ranges(path, config)
    layout = None
    if file_format.read_layout is not None:
        config, layout = file_format.read_layout(path, head[_OWN_OFFSET:], config, group_size)
    return FileHeader(config, group_size, activations, offset, file_format, layout)


def check_ranges(path: Path, config: Config) -> None:
    """Refuses numbers of a header that no program runs. Raises ModelError."""
    c, s = config, config.rope_scaling
    fields = {
        "dim": c.dim,
        "hidden_dim": c.hidden_dim,
        "n_layers": c.n_layers,
        "n_heads": c.n_heads,
        "n_kv_heads": c.n_kv_heads,
        "vocab_size": c.vocab_size,
        "max_seq_len": c.max_seq_len,
        "head_dim": c.head_dim,
        "norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
    }
    if s is not None:
        fields |= {
            "rope_scaling factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position_embeddings,
            "attention_factor": s.attention_factor,
        }
    for name, value in fields.items():
        if not LIMITS[name].holds(value):
            raise ModelError(f"{path}: {name} is {value}, expected {LIMITS[name]}")
    block = c.rotation_block
    if block and not (0 < block <= c.dim and c.dim % block == 0 and block & -block == block):
        raise ModelError(f"{path}: rotation_block is {block}, expected a power of two that divides dim")
    if c.n_heads % c.n_kv_heads:
        raise ModelError(f"{path}: n_heads is {c.n_heads}, not a multiple of n_kv_heads {c.n_kv_heads}")
    if c.head_dim % 2:
        raise ModelError(f"{path}: head_dim is {c.head_dim}, RoPE needs an even number")
    if s is not None and not s.high_freq_factor > s.low_freq_factor:
        raise ModelError(f"{path}: high_freq_factor is not above low_freq_factor")


def read_format(path: Path) -> FileFormat | None:
    """The format of a file by its first four bytes; None if they are no model file's. Raises OSError."""
    with path.open("rb") as f:
        return format_of(int.from_bytes(f.read(4), "little"))


def map_tensors(path: Path, head: FileHeader) -> dict[str, np.ndarray]:
    """The tensors of a file by name, mapped and not read. Raises ModelError if they do not end where the header says.

    head: the file's own, from `read_header`.
    """
    data = np.memmap(path, np.uint8, mode="r")
    mapped, position = {}, HEADER_SIZE
    for tensor in with_offsets(head.tensors(), alignment=head.file_format.alignment):
        if tensor.end > head.weights_end:
            raise ModelError(f"{path}: weights end at byte {head.weights_end}, too soon")
        mapped[tensor.name] = np.asarray(data[tensor.offset : tensor.end]).view(tensor.dtype).reshape(tensor.shape)
        position = tensor.end
    if position != head.weights_end:
        raise ModelError(f"{path}: weights end at byte {position}, the header says {head.weights_end}")
    return mapped


def write_array(f: BinaryIO, values: np.ndarray, dtype: str) -> None:
    """Appends the values, row by row, little-endian."""
    values = np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
    f.write(values.reshape(-1).view(np.uint8).data)  # bfloat16 has no buffer of its own

"""GGUF files, the format of llama.cpp: metadata, and tensors read one at a time. docs/gguf.md says which models.

The `gguf` package reads and dequantizes. It trusts its file, though: an absurd count keeps it busy for good, and a
length beyond the end gives it an empty string. So `check_layout` walks through the header first, with every length
held against the file's. A model split into NAME-00001-of-00003.gguf and so on is one `GGUFFiles`.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from formats.errors import ModelError

# Types of metadata values, by number: their sizes in bytes, then those of variable length.
SCALAR_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
LARGEST = float(np.finfo(np.float32).max)  # of the numbers that a model file has room for
MAX_ARRAY = 1 << 22  # values: vocabularies have some 10^5
MAX_NAME = 1 << 16
MAX_DIMENSIONS = 4

SCALE, INPUT_SCALE = ".scale", ".input_scale"  # factors of a matrix in NVFP4, and of its input, which stays as it is

# Types of tensors that are read, in the order of docs/gguf.md.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
         "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S",
         "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")  # fmt: skip

PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


# ----------------------------------------------------------------------------
# One file's header, with every length checked


class _Cursor:
    """A position in a file. Raises ModelError, with what was being read, where the file ends too soon."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self._data, self.at = path, data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def skip(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.left:
            raise ModelError(
                f"{self.path}: {what} takes {n_bytes} bytes at byte {self.at}, the file has {len(self._data)}"
            )
        self.at += n_bytes

    def number(self, kind: str, what: str) -> int:
        """The next number, of one of struct's types."""
        start = self.at
        self.skip(struct.calcsize(kind), what)
        return struct.unpack_from("<" + kind, self._data, start)[0]

    def string(self, what: str) -> str:
        start = self.at + 8
        self.skip(self.number("Q", what), what)
        try:
            return self._data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {what} at byte {start} is not UTF-8") from None


def _check_value(cursor: _Cursor, key: str) -> None:
    """Walks over one value of the metadata."""
    kind = cursor.number("I", key)
    if kind in SCALAR_SIZES:
        cursor.skip(SCALAR_SIZES[kind], key)
    elif kind == STRING:
        cursor.string(key)
    elif kind == ARRAY:
        item, count = cursor.number("I", key), cursor.number("Q", key)
        if item not in SCALAR_SIZES and item != STRING:
            raise ModelError(f"{cursor.path}: {key}: an array of values of type {item} is not supported")
        if count > min(MAX_ARRAY, cursor.left):
            raise ModelError(f"{cursor.path}: {key}: {count} values, expected at most {min(MAX_ARRAY, cursor.left)}")
        if item == STRING:
            for _ in range(count):
                cursor.string(key)
        else:
            cursor.skip(count * SCALAR_SIZES[item], key)
    else:
        raise ModelError(f"{cursor.path}: {key}: a value of type {kind}, which GGUF does not have")


def _check_magic(path: Path, head: bytes, size: int) -> None:
    """Refuses what is no GGUF file, or one of another version or byte order."""
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path}: a Git LFS pointer, the file that it stands for has not been downloaded")
    if not head.startswith(b"GGUF"):
        raise ModelError(f"{path}: neither a Hugging Face directory nor a GGUF file, it begins with {head[:4]!r}")
    if size < 24:
        raise ModelError(f"{path}: {size} bytes, too short for a GGUF file")
    (version,) = struct.unpack_from("<I", head, 4)
    if version and version % 65536 == 0:
        raise ModelError(f"{path}: a big-endian GGUF file, supported are little-endian ones")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version}, supported are 2 and 3")


def check_layout(path: Path) -> None:
    """Raises ModelError unless the header and all tensors lie within the file and are of types that GGUF has."""
    from gguf import GGML_QUANT_SIZES

    blocks = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}  # values of a block, and its bytes
    size = path.stat().st_size
    with path.open("rb") as f:
        _check_magic(path, f.read(24), size)
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            cursor.skip(8, "the magic")
            n_tensors, n_keys = cursor.number("Q", "tensor_count"), cursor.number("Q", "kv_count")
            for what, count, least in (("tensor_count", n_tensors, 32), ("kv_count", n_keys, 13)):
                if count > size // least:
                    raise ModelError(f"{path}: {what} is {count}, more than {size} bytes have room for")
            seen, alignment = set(), 32
            for _ in range(n_keys):
                key = cursor.string("a metadata key")
                if key in seen or not 0 < len(key) < MAX_NAME:
                    raise ModelError(f"{path}: metadata key {key[:80]!r} is {'there twice' if key in seen else 'bad'}")
                seen.add(key)
                start = cursor.at
                _check_value(cursor, key)
                if key == "general.alignment":
                    kind, alignment = struct.unpack_from("<II", data, start)
                    if kind != 4 or alignment == 0 or alignment & (alignment - 1):
                        raise ModelError(f"{path}: {key} is {alignment}, expected a power of two")
            ends, seen = [], set()
            for _ in range(n_tensors):
                name = cursor.string("a tensor's name")
                if name in seen:
                    raise ModelError(f"{path}: tensor {name} is there twice")
                seen.add(name)
                n_dims = cursor.number("I", name)
                if not 1 <= n_dims <= MAX_DIMENSIONS:
                    raise ModelError(f"{path}: tensor {name} has {n_dims} dimensions, expected 1 to {MAX_DIMENSIONS}")
                dims = [cursor.number("Q", name) for _ in range(n_dims)]
                kind, offset = cursor.number("I", name), cursor.number("Q", name)
                if kind not in blocks:
                    raise ModelError(f"{path}: tensor {name} has type {kind}, which is not known")
                (block, block_bytes), shape = blocks[kind], tuple(reversed(dims))
                if 0 in dims or dims[0] % block:
                    raise ModelError(f"{path}: tensor {name} has shape {shape}, expected rows of blocks of {block}")
                ends.append((name, offset + math.prod(dims) // block * block_bytes))
            start = -(-cursor.at // alignment) * alignment
            for name, end in ends:
                if start + end > size:
                    raise ModelError(f"{path}: tensor {name} ends at byte {start + end}, the file has {size}")


# ----------------------------------------------------------------------------
# Metadata


class Metadata:
    """The values of a file's metadata by key. A value of another type than asked for raises ModelError."""

    def __init__(self, path: Path, values: dict[str, Any]):
        self.path, self._values = path, values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> Any:
        """Whatever stands there; None if nothing does."""
        return self._values.get(key)

    def refuse(self, key: str, why: str) -> ModelError:
        """The error for a value that cannot be used."""
        shown = repr(self._values.get(key))
        return ModelError(f"{self.path}: {key} is {shown if len(shown) <= 80 else shown[:80] + '...'}: {why}")

    def _get(self, key: str, default: Any, good: Any, expected: str) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: {key} is missing")
        if value is not default and not good(value):
            raise self.refuse(key, f"expected {expected}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, default, lambda v: isinstance(v, str), "text")

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, default, lambda v: isinstance(v, bool), "true or false")

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        def good(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

        return self._get(key, default, good, f"a whole number from {least} to {most}")

    def number(self, key: str, default: float | None = None, least: float = 0.0, most: float = LARGEST) -> float:
        def good(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most

        return float(self._get(key, default, good, f"a number from {least:g} to {most:g}"))

    def _list(self, key: str, kind: type, expected: str) -> list:
        def good(value: Any) -> bool:
            return isinstance(value, list) and all(type(item) is kind for item in value)

        return self._get(key, None, good, f"a list of {expected}")

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "texts")

    def integers(self, key: str) -> list[int]:
        return self._list(key, int, "whole numbers")


# ----------------------------------------------------------------------------
# A model, in one file or several


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies. shape: as in numpy, rows of the matrix first."""

    file: Path
    type: str  # "F32", "Q4_K", ..
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def parts_of(path: Path) -> list[Path]:
    """All files of the model of which `path` is one, in order. Raises ModelError, naming them, if some are missing."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelError(f"{path}: part {number} of {count} cannot be")
    paths = [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(f"{path}: one of {count} files, missing beside it: {shown}")
    return paths


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turns errors of the package and of the system into ModelErrors that name the file."""
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # whatever a file makes of the package that check_layout did not foresee
        raise ModelError(f"{path}: not a readable GGUF file: {error}") from None


class GGUFFiles:
    """The metadata and tensors of a model, from one file or from all parts of a split one.

    Opening reads headers only. metadata: of the first part, which has it all.
    """

    def __init__(self, path: Path):
        self.tensors: dict[str, StoredTensor] = {}
        paths = parts_of(path)
        for number, part in enumerate(paths):
            with _one_line(part):
                metadata = self._read(part, number, len(paths))
            if number == 0:
                self.metadata = metadata
        expected = self.metadata.integer("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise self.metadata.refuse("split.tensors.count", f"the files have {len(self.tensors)}")

    def _read(self, path: Path, number: int, n_parts: int) -> Metadata:
        """Adds the tensors of one file; returns its metadata."""
        from gguf import GGUFReader

        check_layout(path)
        reader = GGUFReader(path)
        keys = (key for key in reader.fields if not key.startswith("GGUF."))
        metadata = Metadata(path, {key: reader.fields[key].contents() for key in keys})
        if (metadata.integer("split.count", 1, least=0) or 1) != n_parts:
            raise metadata.refuse("split.count", f"expected {n_parts}, by the name of the file")
        if n_parts > 1 and metadata.integer("split.no", least=0) != number:
            raise metadata.refuse("split.no", f"expected {number}, by the name of the file")
        for tensor in reader.tensors:
            if tensor.name in self.tensors:
                raise ModelError(f"{path}: tensor {tensor.name} is in {self.tensors[tensor.name].file.name}, too")
            shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
            self.tensors[tensor.name] = StoredTensor(
                path, tensor.tensor_type.name, shape, int(tensor.data_offset), int(tensor.n_bytes)
            )
        return metadata

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """One tensor, or one matrix of a tensor of several, dequantized: fp32, finite."""
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        with _one_line(tensor.file):
            shape, size, first = tensor.shape, tensor.n_bytes, 0
            if index is not None:
                shape, size, first = shape[1:], size // shape[0], index * (size // shape[0])
            rows = np.fromfile(tensor.file, np.uint8, size, offset=tensor.offset + first).reshape(*shape[:-1], -1)
            with np.errstate(invalid="ignore", over="ignore"):
                value = dequantize(rows, GGMLQuantizationType[tensor.type])
                if (scale := name.removesuffix(".weight") + SCALE) in self.tensors:
                    value = value * self.read(scale)[index or 0]
        if not np.isfinite(value).all():
            raise ModelError(f"{tensor.file}: tensor {name} has values that are not finite")
        return value

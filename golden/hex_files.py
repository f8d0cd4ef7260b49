"""Tensors as text for hardware: $readmemh, Xilinx memory files, C headers. `python -m golden hex`.

A word has `lanes` values, the first in its lowest bits: in hexadecimal the first value of a word stands rightmost.
Values are two's complement or IEEE bits. Words go row by row; a row, the last dimension, begins a new word, and where
it does not fill its last word, zeros do.

    hex   a word per line, for $readmemh
    mem   the same behind `@0`, for Vivado's updatemem and for $readmemh
    coe   a memory initialization file of AMD's block memory generator
    c     arrays for a C header, floats as hexadecimal literals, which are exact; fp16 as its bits

`--tile MxK` stores matrices tile by tile (golden/tiles.py), M outputs by K inputs; `--transpose` makes rows of columns,
in each tile or, without tiles, in each matrix. manifest.json has the address of every tile. docs/hardware.md has it all
with a picture.
"""

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from formats.errors import one_line
from formats.files import check_file_names, replacing
from golden.hex_tensors import TensorFile, Values, read_tensors
from golden.tiles import tile, tile_counts

FORMATS = ("hex", "mem", "c", "coe")
C_TYPES = {"int8": "int8_t", "uint8": "uint8_t", "int32": "int32_t", "float32": "float"}
C_TYPES |= {"float16": "uint16_t", "bfloat16": "uint16_t"}  # their bits
C_HEAD = "#include <math.h>\n#include <stdint.h>\n\n"
# What a group or a row of codes shares: a scale, a zero point. A word has one of them unless --scale-lanes says more.
SHARED = re.compile(r"(^|[._])(scales?|s|zeros|qzeros|groups|assist)$")


class Options(NamedTuple):
    """What the command line says of how tensors are written."""

    kind: str = "hex"  # one of FORMATS
    lanes: int = 1
    scale_lanes: int = 1
    tile: tuple[int, int] | None = None  # outputs, inputs
    transpose: bool = False


class Laid(NamedTuple):
    """A tensor as it is written."""

    name: str
    type: str  # "int8", "uint4", "float32"
    shape: tuple[int, ...]  # before it was laid out
    order: str  # in words
    bits: int  # of a value
    lanes: int  # values of a word
    rows: np.ndarray  # (..., n): each row begins a new word
    tile: tuple[int, int] | None = None  # its shape in the matrix, and whether it was then transposed
    transpose: bool | None = None
    counts: tuple[int, ...] = ()  # of tiles along each dimension

    @property
    def words_per_row(self) -> int:
        return -(-(self.rows.shape[-1] if self.rows.ndim else 1) // self.lanes)

    def about(self) -> dict[str, object]:
        """What stands on top of the file and in the manifest."""
        fields = ("name", "type", "shape", "order", "bits", "lanes", "tile", "transpose")
        return {field: getattr(self, field) for field in fields if getattr(self, field) is not None}

    def tiles(self) -> dict[str, object]:
        """What the manifest says about tiles: words of each, and addresses, nested as the tiles are; empty without."""
        if self.tile is None:
            return {}
        n = self.rows.shape[-2] * self.words_per_row
        return {"tile_words": n, "tile_addresses": (n * np.arange(np.prod(self.counts)).reshape(self.counts)).tolist()}

    def memory(self) -> dict[str, object]:
        """What the manifest says about the memory that holds it: bits of a word, and words."""
        n_rows = int(np.prod(self.rows.shape[:-1]))
        return {"width": self.lanes * self.bits, "depth": n_rows * self.words_per_row}


def select(tensors: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that match any of the patterns (`quantize.64.*`), each once. Raises ValueError for one without."""
    names = list(tensors)
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"no tensor {pattern}")
        found |= dict.fromkeys(matching)
    return list(found)


# ----------------------------------------------------------------------------
# Words and C


def bits_of(values: np.ndarray) -> np.ndarray:
    """The values' bits as unsigned integers of the same size."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def words(values: np.ndarray, lanes: int, bits: int | None = None) -> list[str]:
    """The tensor's words in hexadecimal, row by row; the module's docstring says how values lie in them.

    bits: of a value, the lowest of its type's; None: all.
    """
    rows = bits_of(values).reshape(-1, values.shape[-1] if values.ndim else 1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % lanes))).reshape(-1, lanes)
    data = rows.astype(rows.dtype.newbyteorder("<")).view(np.uint8)
    bits = bits or 8 * values.dtype.itemsize
    if bits < 8:
        single = np.unpackbits(data, axis=1, bitorder="little").reshape(-1, lanes, 8)[..., :bits]
        data = np.packbits(single.reshape(-1, lanes * bits), axis=1, bitorder="little")
    digits = -(-lanes * bits // 4)
    return [word.tobytes().hex()[-digits:] for word in data[:, ::-1]]


def c_name(name: str, kind: str) -> str:
    """The name as an identifier that begins with what it is: `layers.1.attn.norm` -> `w_layers_1_attn_norm`."""
    return f"{kind}_" + re.sub(r"\W", "_", name, flags=re.ASCII)


def c_literal(value: float | int) -> str:
    """A number in C, exactly."""
    if isinstance(value, int):
        return str(value)
    if np.isnan(value):
        return "NAN"
    return ("-" if value < 0 else "") + "INFINITY" if np.isinf(value) else value.hex() + "f"


def c_array(identifier: str, values: np.ndarray) -> str:
    """`static const TYPE NAME[size] = {...};`, flat. values: of one of C_TYPES, at least one."""
    c_type = C_TYPES[values.dtype.name]
    flat = (bits_of(values) if c_type == "uint16_t" else values).reshape(-1).tolist()
    lines = [", ".join(map(c_literal, flat[i : i + 16])) for i in range(0, len(flat), 16)]
    return f"static const {c_type} {identifier}[{values.size}] = {{\n  " + ",\n  ".join(lines) + "};\n"


# ----------------------------------------------------------------------------
# The order of a tensor


def tile_columns(name: str, array: np.ndarray, inputs: int, file: TensorFile) -> int:
    """The columns of a tile of one tensor, where a tile of its matrix has so many inputs.

    A value that stands for G inputs, as a scale does for its group, counts as G columns. Raises ValueError where a tile
    would end within a group.
    """
    n_inputs, n = file.columns(name.rpartition(".")[0]) or array.shape[-1], array.shape[-1]
    if inputs * n % n_inputs == 0:
        return inputs * n // n_inputs
    if n_inputs % n or n_inputs // n % inputs:
        raise ValueError(f"--tile: {name} has {n} values for {n_inputs} inputs, which tiles of {inputs} do not divide")
    return 1


def as_matrices(name: str, values: Values, option: str, file: TensorFile) -> np.ndarray:
    """The tensor as matrices (..., m, n). One value per row, such as (E, n_out) scales, is a column of each matrix.

    Raises ValueError for what is no matrix.
    """
    matrix, _, part = name.rpartition(".")
    codes = file.tensors.get(f"{matrix}.codes")
    array = values.array
    if codes is not None and part != "codes" and array.shape == codes().array.shape[:-1]:
        array = array[..., None]
    if values.packed:
        raise ValueError(f"{option}: {name} is packed in an order of its own; give --unpack")
    if array.ndim < 2:
        raise ValueError(f"{option}: {name} has shape {array.shape}, expected a matrix")
    return array


def lay_out_tiles(name: str, values: Values, shape: tuple[int, int], lanes: int, transpose: bool = False) -> Laid:
    """Matrices (..., m, n) tile by tile. shape: of a tile, before it is transposed."""
    array = values.array
    counts = tile_counts(array.shape, *shape)
    order = "row of tiles, tile, " + ("column, row" if transpose else "row, column")
    order = f"tiles of {shape[0]} x {shape[1]}: {'matrix, ' if len(counts) > 2 else ''}{order}"
    rows = tile(array, *shape, transpose)
    return Laid(name, values.type, array.shape, order, values.bits, lanes, rows, shape, transpose, counts)


def lay_out(name: str, file: TensorFile, options: Options) -> Laid:
    """One tensor in the order in which it is written. Raises ValueError for what it cannot be."""
    values = file.tensors[name]()
    if values.array.size == 0:
        raise ValueError(f"{name} has no values")
    if options.kind == "c" and values.array.dtype.name not in C_TYPES:
        raise ValueError(f"--format c: {name}: {values.array.dtype} has no C type here")
    lanes = options.scale_lanes if SHARED.search(name) else options.lanes
    if options.tile is not None:
        matrices = as_matrices(name, values, "--tile", file)
        shape = options.tile[0], tile_columns(name, matrices, options.tile[1], file)
        return lay_out_tiles(name, values._replace(array=matrices), shape, lanes, options.transpose)
    rows, order = values.array, "row by row"
    if options.transpose:
        rows, order = as_matrices(name, values, "--transpose", file).swapaxes(-1, -2), "column by column"
    return Laid(name, values.type, values.array.shape, order, values.bits, lanes, rows)


# ----------------------------------------------------------------------------
# Files


def as_json(about: dict[str, object]) -> str:
    r"""JSON on one line of printable ASCII, in which a name ends no comment and begins none: `*/` is `\u002a\u002f`.

    Strings alone can have these characters.
    """
    return re.sub(r"[^\w\s.,:\-\[\]{}\"\\]", lambda c: f"\\u{ord(c[0]):04x}", json.dumps(about), flags=re.ASCII)


def render(laid: Laid, kind: str, prefix: str) -> str:
    """The text of one tensor in one format; what is known about it stands on top as a comment."""
    comment = as_json(laid.about())
    if kind == "c":
        return f"/* {comment} */\n{c_array(c_name(laid.name, prefix), laid.rows)}"
    lines = words(laid.rows, laid.lanes, laid.bits)
    if kind == "coe":
        body = ",\n".join(lines)
        return f"; {comment}\nmemory_initialization_radix=16;\nmemory_initialization_vector=\n{body};\n"
    return f"// {comment}\n" + ("@0\n" if kind == "mem" else "") + "\n".join(lines) + "\n"


def write_folder(source: Path, tensors: list[Laid], kind: str, prefix: str, out: Path) -> str:
    """A file for each tensor, and manifest.json. Returns their paths, a line each.

    source: what they come from. Raises ModelError, before anything is written, for a name that no file can have.
    """
    is_c, ending = kind == "c", ".h" if kind == "c" else f".{kind}"
    check_file_names(source, [laid.name for laid in tensors], ending)
    out.mkdir(parents=True, exist_ok=True)
    manifest = []
    for laid in tensors:
        path = out / (laid.name + ending)
        with replacing(path) as f:
            f.write(((C_HEAD if is_c else "") + render(laid, kind, prefix)).encode())
        size = {"c_name": c_name(laid.name, prefix)} if is_c else laid.memory()
        manifest.append(laid.about() | {"file": path.name} | size | laid.tiles())
    with replacing(out / "manifest.json") as f:
        f.write(("[\n " + ",\n ".join(map(as_json, manifest)) + "\n]\n").encode())
    return "".join(f"{one_line(out / str(about['file']))}\n" for about in manifest)


def check_c_names(names: list[str], prefix: str) -> None:
    """Raises ValueError if two tensors would have one name in C."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(c_name(name, prefix), name)
        if other != name:
            raise ValueError(f"--format c: {other} and {name} are both {c_name(name, prefix)}")


def write_text(source: Path, patterns: list[str], options: Options, unpack: bool, out: Path | None) -> str:
    """The tensors as text, or, with `out`, a file for each and manifest.json in that folder, and what was written.

    Raises ValueError for names that the source has not, and for what a format cannot take.
    """
    file, kind = read_tensors(source, unpack), options.kind
    if kind == "c" and (options.lanes, options.scale_lanes) != (1, 1):
        given = f"--lanes {options.lanes}" if options.lanes != 1 else f"--scale-lanes {options.scale_lanes}"
        raise ValueError(f"{given}: a C array has no words; leave it out")
    try:
        names = select(file.tensors, patterns)
        if out is None and kind != "c" and len(names) > 1:
            raise ValueError(f"--format {kind}: {len(names)} tensors, one file has one: give --out DIR")
        if kind == "c":
            check_c_names(names, file.kind)
        tensors = [lay_out(name, file, options) for name in names]
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if out is not None:
        return write_folder(source, tensors, kind, file.kind, out)
    return (C_HEAD if kind == "c" else "") + "\n".join(render(laid, kind, file.kind) for laid in tensors)

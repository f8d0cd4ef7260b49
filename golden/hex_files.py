"""Tensors as text for hardware: $readmemh, Xilinx memory files, C headers. `python -m golden hex`.

A word has `lanes` values, the first in its lowest bits: in hexadecimal the first value of a word stands rightmost.
Values are two's complement or IEEE bits. Words go row by row; a row, the last dimension, begins a new word, and where
it does not fill its last word, zeros do.

    hex   a word per line, for $readmemh
    mem   the same behind `@0`, for Vivado's updatemem and for $readmemh
    coe   a memory initialization file of AMD's block memory generator
    c     arrays for a C header, floats as hexadecimal literals, which are exact; fp16 as its bits

`--tile RxC` stores a matrix tile by tile (golden/tiles.py), a tile's rows behind each other.
"""

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from formats.files import replacing
from formats.model_file import map_tensors, read_format, read_header
from golden.tiles import tile
from golden.trace import read_trace

FORMATS = ("hex", "mem", "c", "coe")
C_TYPES = {"int8": "int8_t", "uint8": "uint8_t", "int32": "int32_t", "float32": "float", "float16": "uint16_t"}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file, or of a model file under the names of `--info`. Raises ModelError."""
    file_format = None if path.suffix == ".safetensors" else read_format(path)
    if file_format is None:
        return read_trace(path)
    return map_tensors(path, read_header(path, file_format))


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


def bits_of(values: np.ndarray) -> np.ndarray:
    """The values' bits as unsigned integers of the same size."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def words(values: np.ndarray, lanes: int) -> list[str]:
    """The tensor's words in hexadecimal, row by row; the module's docstring says how values lie in them."""
    rows = bits_of(values).reshape(-1, values.shape[-1] if values.ndim else 1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % lanes)))
    digits = 2 * values.dtype.itemsize
    return ["".join(f"{value:0{digits}x}" for value in word[::-1]) for word in rows.reshape(-1, lanes).tolist()]


def c_name(name: str) -> str:
    """The name as an identifier: `layers.1.ffn.norm.q` -> `layers_1_ffn_norm_q`."""
    identifier = re.sub(r"\W", "_", name, flags=re.ASCII)
    return "_" + identifier if identifier[0].isdigit() else identifier


def c_literal(value: float | int) -> str:
    """A number in C, exactly."""
    if isinstance(value, int):
        return str(value)
    if np.isnan(value):
        return "NAN"
    return ("-" if value < 0 else "") + "INFINITY" if np.isinf(value) else value.hex() + "f"


def c_array(name: str, values: np.ndarray) -> str:
    """`static const TYPE NAME[size] = {...};`, flat. Raises ValueError for a type that C has no name for here."""
    if values.dtype.name not in C_TYPES:
        raise ValueError(f"{name}: {values.dtype} has no C type here")
    flat = (bits_of(values) if values.dtype == np.float16 else values).reshape(-1).tolist()
    lines = [", ".join(map(c_literal, flat[i : i + 16])) for i in range(0, len(flat), 16)]
    return (
        f"static const {C_TYPES[values.dtype.name]} {c_name(name)}[{values.size}] = {{\n  "
        + ",\n  ".join(lines)
        + "};\n"
    )


def describe(name: str, values: np.ndarray, lanes: int, tiles: tuple[int, int] | None) -> dict[str, object]:
    """What the manifest says about a tensor."""
    order = "row by row" if tiles is None else f"tiles of {tiles[0]} x {tiles[1]}: row of tiles, tile, row, column"
    return {"name": name, "type": values.dtype.name, "shape": list(values.shape), "order": order, "lanes": lanes}


def render(values: np.ndarray, about: dict[str, object], kind: str, tiles: tuple[int, int] | None) -> str:
    """The text of one tensor in one format. about: from `describe`; it goes to the top as a comment."""
    stored = values if tiles is None else tile(values, *tiles)
    comment = json.dumps(about)
    if kind == "c":
        return f"/* {comment} */\n{c_array(str(about['name']), stored)}"
    lines = words(stored, int(str(about["lanes"])))
    if kind == "coe":
        body = ",\n".join(lines)
        return f"; {comment}\nmemory_initialization_radix=16;\nmemory_initialization_vector=\n{body};\n"
    return f"// {comment}\n" + ("@0\n" if kind == "mem" else "") + "\n".join(lines) + "\n"


def write_text(
    source: Path, patterns: list[str], kind: str, lanes: int, tiles: tuple[int, int] | None, out: Path | None
) -> str:
    """The tensors as text, or, with `out`, a file for each and manifest.json in that folder, and what was written.

    Raises ValueError for names that the source has not, and for what a format cannot take.
    """
    tensors = read_tensors(source)
    try:
        names = select(tensors, patterns)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if out is None and kind != "c" and len(names) > 1:
        raise ValueError(f"--format {kind}: {len(names)} tensors, one file has one: give --out DIR")
    if kind == "c" and lanes != 1:
        raise ValueError(f"--lanes {lanes}: a C array has no words; leave it out")
    texts, manifest = [], []
    for name in names:
        values = tensors[name]
        if tiles is not None and values.ndim != 2:
            raise ValueError(f"--tile: {name} has shape {values.shape}, expected a matrix")
        about = describe(name, values, lanes, tiles)
        texts.append(render(values, about, kind, tiles))
        manifest.append(about | {"file": f"{name}.{'h' if kind == 'c' else kind}"})
    head = "#include <math.h>\n#include <stdint.h>\n\n"
    if out is None:
        return (head if kind == "c" else "") + "\n".join(texts)
    out.mkdir(parents=True, exist_ok=True)
    for about, text in zip(manifest, texts, strict=True):
        with replacing(out / str(about["file"])) as f:
            f.write(((head if kind == "c" else "") + text).encode())
    with replacing(out / "manifest.json") as f:
        f.write(("[\n " + ",\n ".join(map(json.dumps, manifest)) + "\n]\n").encode())
    return "".join(f"{out / str(about['file'])}\n" for about in manifest)

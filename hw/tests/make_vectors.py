"""Writes what the tests of hw/ compare with, as text: op vectors as `golden hex` has them, products as `golden passes`.

python hw/tests/make_vectors.py OUT

OUT/ops               a file per tensor, a value a line
OUT/passes-CASE       a product on an array of 16 x 16 cells, pass by pass; rows of weights for rows of cells
OUT/cases.txt         the CASEs, a line each: name, tokens, outputs, inputs, group size
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from golden.hex_files import Options, write_text
from golden.op_cases import read_cases
from golden.passes import operands, write_passes

SOURCE = Path("golden/data/ops.safetensors")
OPS = ["quantize*", "matmul*", "gptq_*", "grouped_a8w4.*", "msd_split.*"]
TILE = (16, 16)
OTHER_ARRAYS = [(8, 32), (64, 64)]  # rows, columns
DRAWN = ["16x32x2048g64", "40x48x128g32", "3x20x256g128"]  # beside the matmul cases: all codes, -128 on both sides


def main(out: Path) -> None:
    """Writes all files."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(SOURCE, OPS, Options(), unpack=False, out=out / "ops")
    cases = [name for name, case in read_cases(SOURCE).items() if case["op"] == "matmul"] + DRAWN
    lines = []
    for case in cases:
        x, w = operands(case, SOURCE)
        lines.append(f"{case} {len(x.codes)} {len(w.codes)} {x.codes.shape[1]} {x.group_size}")
        write_passes(case, SOURCE, TILE, transpose=True, kind="hex", out=out / f"passes-{case}")
    for rows, cols in OTHER_ARRAYS:
        write_passes(
            "matmul.16x64x64g64", SOURCE, (cols, rows), transpose=True, kind="hex", out=out / f"array-{rows}x{cols}"
        )
    (out / "cases.txt").write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

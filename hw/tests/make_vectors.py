"""Writes what the tests of hw/ compare with, as text: op vectors as `golden hex` has them, products as `golden passes`.

python hw/tests/make_vectors.py OUT/ops      a file per tensor, a value a line
python hw/tests/make_vectors.py OUT/8x32     products on an array of 8 rows x 32 columns of cells

OUT/8x32/passes-CASE    a product, pass by pass; rows of weights for rows of cells
OUT/8x32/cases.txt      the CASEs, a line each: name, tokens, outputs, inputs, group size

A product whose groups the rows do not divide is left out, and named.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from golden.hex_files import Options, write_text
from golden.op_cases import read_cases
from golden.passes import operands, write_passes

SOURCE = Path("golden/data/ops.safetensors")
OPS = [
    "quantize*",
    "matmul*",
    "gptq_expand.*",
    "gptq_gather.*",
    "grouped_a8w4.*",
    "msd_split.*",
    "attention.*",
    "attention_int8*",
]
OPS += ["attention_kv.*", "rmsnorm.*", "swiglu*", "rope.*", "embedding.*"]
DRAWN = ["16x32x2048g64", "40x48x128g32", "3x20x256g128"]  # beside the matmul cases: all codes, -128 on both sides


def main(out: Path) -> None:
    """Writes the files of a folder, which is called ops or as an array is: ROWSxCOLUMNS."""
    if out.name == "ops":
        write_text(SOURCE, OPS, Options(), unpack=False, out=out)
        return
    rows, cols = map(int, out.name.split("x"))
    out.mkdir(parents=True, exist_ok=True)
    cases = [name for name, case in read_cases(SOURCE).items() if case["op"] == "matmul"] + DRAWN
    lines = []
    for case in cases:
        x, w = operands(case, SOURCE)
        if x.group_size % rows:
            print(f"{out.name}: without {case}, whose groups {rows} rows do not divide")
            continue
        lines.append(f"{case} {len(x.codes)} {len(w.codes)} {x.codes.shape[1]} {x.group_size}")
        write_passes(case, SOURCE, (cols, rows), transpose=True, kind="hex", out=out / f"passes-{case}")
    (out / "cases.txt").write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The signals of one tile, from the simulation, as docs/rtl.md draws them: docs/rtl-wave.json.

    python -m hw.wave build/hw/wave/tile.vcd docs/rtl-wave.json

make rtl-wave simulates hw/sim/wave.cpp, calls this, and draws the picture.

The file has a list of lanes. A lane has a name, and the texts that stand in some clocks; clock 0 is that of the first
beat of weights.
"""

import argparse
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

CORE = "matmul_axi.u_core."
EDGES = "gen_edges[0].u_column_edges."


def read_vcd(path: Path) -> dict[str, list[int]]:
    """The value of every signal before each rising edge: at times that 3 divides (hw/sim/matmul_rtl.cpp)."""
    scope: list[str] = []
    names: dict[str, list[str]] = {}
    values: dict[str, int] = {}
    samples: list[dict[str, int]] = []
    time = None
    for line in path.read_text().splitlines():
        words = line.split()
        if not words:
            continue
        if words[0] == "$scope":
            scope.append(words[2])
        elif words[0] == "$upscope":
            scope.pop()
        elif words[0] == "$var":
            names.setdefault(words[3], []).append(".".join([*scope[1:], words[4]]))
        elif words[0].startswith("#"):
            if time is not None and time % 3 == 0:
                samples.append(dict(values))
            time = int(words[0][1:])
        elif words[0][0] == "b":
            values[words[1]] = int(words[0][1:].replace("x", "0"), 2)
        elif words[0][0] in "01x":
            values[words[0][1:]] = int(words[0][0] == "1")
    return {name: [s.get(code, 0) for s in samples] for code, several in names.items() for name in several}


def signed(value: int, bits: int) -> int:
    """The number that these bits are."""
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def fp32(value: int) -> str:
    """The number that these 32 bits are, as text."""
    return f"{struct.unpack('<f', struct.pack('<I', value))[0]:g}"


def lanes(vcd: dict[str, list[int]]) -> list[dict]:
    """The lanes of the picture, of an array of 4 x 4 cells."""
    core = {name.removeprefix(CORE): v for name, v in vcd.items() if name.startswith(CORE)}
    taken = [a & b for a, b in zip(vcd["s_axis_w_tvalid"], vcd["s_axis_w_tready"], strict=True)]
    first = taken.index(1)
    beats = iter(["scales"] * 4 + ["row 0", "row 1", "row 2", "row 3"])
    out = [vcd["m_axis_tvalid"][t] & vcd["m_axis_tready"][t] for t in range(len(taken))]
    last = max(t for t in range(first, len(taken)) if out[t])
    clocks = range(first, last + 1)

    def lane(name: str, at: Callable[[int], str]) -> dict:
        texts = {str(t - first): at(t) for t in clocks}
        return {"name": name, "at": {clock: text for clock, text in texts.items() if text}}

    def codes(t: int) -> str:
        word = core["codes_q"][t]
        first, last = (signed(word >> bit & 255, 8) for bit in (0, 24))
        return f"{first}..{last}" if core["x_valid_q"][t] else ""

    found = [
        lane("s_axis_w", lambda t: next(beats) if taken[t] else ""),
        lane("tile_ready", lambda t: "1" if core["tile_ready"][t] else ""),
        lane("take, take_row", lambda t: str(core["take_row"][t]) if core["take"][t] else ""),
        lane("array: w_row_i", lambda t: str(core["w_row_q"][t]) if core["w_valid_q"][t] else ""),
        lane("issue, token", lambda t: str(core["token"][t]) if core["issue"][t] else ""),
        lane("array: x_i", codes),
    ]
    sum_bits = 18
    for c in range(4):
        valid = core[f"gen_edges[0].u_column_edges.gen_column[{c}].valid"]
        found.append(
            lane(
                f"sum, column {c}",
                lambda t, c=c, valid=valid: (
                    str(signed(core["sums"][t] >> sum_bits * c & (1 << sum_bits) - 1, sum_bits)) if valid[t] else ""
                ),
            )
        )
    edges = {name.removeprefix(EDGES): v for name, v in core.items() if name.startswith(EDGES)}
    found += [
        lane(
            "scaler: token, column",
            lambda t: f"{edges['token_q'][t]},{edges['column_q'][t]}" if edges["busy_q"][t] else "",
        ),
        lane("scaler: result", lambda t: fp32(edges["result_o"][t]) if edges["result_valid_o"][t] else ""),
    ]
    found.append(lane("m_axis", lambda t: fp32(vcd["m_axis_tdata"][t] & 0xFFFFFFFF) if out[t] else ""))
    return found


def main() -> int:
    """Writes the lanes of a VCD file."""
    parser = argparse.ArgumentParser(prog="python -m hw.wave", description=__doc__.splitlines()[0])
    parser.add_argument("vcd", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows = [json.dumps(lane) for lane in lanes(read_vcd(args.vcd))]
    args.out.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

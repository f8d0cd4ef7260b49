"""Stories with every product in RTL: the goldens' ids, and the cycles that the RTL counts beside bench/systolic.py.

    python -m hw.story [--hw build/hw] [--array 16x16] [--scalers 4] [--ids 16] [--mhz 100] [--weight-every 1]
                       [--programs q8 w8a8 gptq]

make rtl-story builds what this runs. Ids have to be the golden's, and the cycles of each product those that
`core_cycles` says; otherwise the exit code is 1. The table splits what a product of one token takes: what an array does
by itself (`cycles`), scales in the stream of weights, and the rest of the core: a whole tile in the buffer before it is
loaded, and registers.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.systolic import Array, Stream, core_cycles, cycles, layer_shapes
from formats.checkpoint import read_config

ROOT = Path(__file__).resolve().parent.parent
# Name, golden, title.
PROGRAMS = {
    "q8": ("q8", "runq, Q8"),
    "w8a8": ("w8a8", "runq_w8a8, W8A8"),
    "gptq": ("gptq-ladder", "runq_gptq --backend rtl, ladder of 8, 4 and 2 bits"),
}


def built(array: str, scalers: int, hw: str = "build/hw") -> Path:
    """Where mk/hw.mk builds what runs on an array, below its HW; scalers 0: as many as the core has by itself."""
    return Path(hw) / f"axi-{array}{f'-scalers{scalers}' if scalers else ''}"


def command(name: str, folder: Path) -> list[str]:
    """The program with products in RTL, and its options."""
    if name == "gptq":
        return [f"build/portable/{platform.machine()}/runq_gptq", "build/models/tiny-llama.gptq-ladder.bin"]
    program = {"q8": "runq", "w8a8": "runq_w8a8"}[name]
    return [str(folder / program), f"build/models/tiny-llama.{name}.bin"]


def tell(
    name: str, array: str, n_ids: int, weight_every: int, scalers: int = 0, hw: str = "build/hw"
) -> tuple[list[int], list[dict], float]:
    """Ids that follow "Once", the log of all commands, and the seconds that they took.

    Raises RuntimeError with a line if the array is not built, or if the program fails or has no product in RTL.
    """
    make = f"make rtl-story ARRAY={array}{f' SCALERS={scalers}' if scalers else ''}"
    folder = built(array, scalers, hw)
    if not (ROOT / folder).is_dir():
        raise RuntimeError(f"{folder} is not there: {make} builds it")
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "log"
        env = os.environ | {"RTL_LOG": str(log), "RTL_WEIGHT_EVERY": str(weight_every)}
        more = ["--backend", "rtl"] if name == "gptq" else []
        done = subprocess.run(
            [*command(name, folder), "-i", "Once", "-t", "0", "-n", str(n_ids), "--print-ids", *more],
            cwd=ROOT,
            env=env | {"RUNQ_BACKENDS": str(ROOT / folder / "backends")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if all(e["command"] != "multiply" for e in entries):
        raise RuntimeError(
            f"no product ran on the array of {array}: its rows have to divide the groups, its memory has to hold a row"
        )
    for e in entries:
        e["scalers"] = scalers
    return [int(i) for i in done.stdout.split(",")], entries, sum(e["seconds"] for e in entries)


def stream_of(entry: dict) -> Stream:
    """How the weights of a product came, from its number of beats."""
    tiles = -(-entry["n_outputs"] // entry["cols"])
    groups = entry["n_inputs"] // entry["group_size"]
    for rows_per_beat, scale_beats in ((1, 4), (2, 5), (4, 5)):
        if tiles * (entry["n_inputs"] // rows_per_beat + groups * scale_beats) == entry["weight_beats"]:
            return Stream(scale_beats, rows_per_beat, entry["weight_every"])
    raise RuntimeError(f"{entry['weight_beats']} beats are no stream of weights of this product: {entry}")


def expected(entry: dict, scale_beats: int | None = None) -> int:
    """`core_cycles` of a product that was logged; scale_beats: with so many instead."""
    s = stream_of(entry)
    if scale_beats is not None:
        s = Stream(scale_beats, s.rows_per_beat, s.beat_cycles)
    array = Array(entry["rows"], entry["cols"])
    return core_cycles(
        array, entry["n_tokens"], entry["n_inputs"], entry["n_outputs"], entry["group_size"], s, entry.get("scalers", 0)
    )


def sizes(entry: dict) -> tuple:
    """What products that take the same cycles have in common."""
    return entry["n_tokens"], entry["n_outputs"], entry["n_inputs"], entry["group_size"], entry["weight_beats"]


def table(entries: list[dict], mhz: float) -> tuple[list[str], int]:
    """Lines about products of one token, and how many products took other cycles than `core_cycles` says."""
    products = [e for e in entries if e["command"] == "multiply"]
    n_wrong, memory = 0, {}
    for e in products:
        key = sizes(e)
        if key not in memory:
            memory[key] = expected(e)
        if e["sum_cycles"] != memory[key]:
            n_wrong += 1
    lines = ["outputs inputs bits | array alone  + scales  + buffer, registers  = RTL's count |  beats/cycle"]
    shown = set()
    for e in products:
        key = sizes(e)
        if e["n_tokens"] != 1 or key in shown:
            continue
        shown.add(key)
        s = stream_of(e)
        array = Array(e["rows"], e["cols"], max(1, s.beat_cycles // s.rows_per_beat))
        alone = cycles(array, 1, e["n_inputs"], e["n_outputs"])
        no_scales, all_of_it = expected(e, 0), memory[key]
        lines.append(
            f"{e['n_outputs']:7} {e['n_inputs']:6} {8 // s.rows_per_beat:4} | {alone:11,} {all_of_it - no_scales:+9,} "
            f"{no_scales - alone:+20,}  {'=' if e['sum_cycles'] == all_of_it else '!'} {e['sum_cycles']:11,} |"
            f" {e['weight_beats'] / e['sum_cycles']:11.1%}"
        )
    # The last token: all commands behind the last but one product with the classifier.
    vocabulary = max(e["n_outputs"] for e in products)
    ends = [i for i, e in enumerate(entries) if e["command"] == "multiply" and e["n_outputs"] == vocabulary]
    token = entries[ends[-2] + 1 : ends[-1] + 1]
    multiply = sum(e["cycles"] for e in token if e["command"] == "multiply")
    quantize = sum(e["cycles"] for e in token if e["command"] == "quantize")
    bytes_per_cycle = token[-1]["cols"] / token[-1]["weight_every"]
    lines.append(
        f"a token: {multiply:,} cycles of products, {quantize:,} of quantizing: "
        f"{mhz * 1e6 / (multiply + quantize):,.0f} tokens/s at {mhz:g} MHz and "
        f"{bytes_per_cycle:g} bytes per cycle ({bytes_per_cycle * mhz / 1e3:g} GB/s), "
        "without the host's part"
    )
    return lines, n_wrong


def main() -> int:
    """Tells the stories; the exit code is 1 if an id or a number of cycles is another."""
    parser = argparse.ArgumentParser(prog="python -m hw.story", description=__doc__.splitlines()[0])
    parser.add_argument("--hw", default="build/hw", help="where the model was built: HW of make's command line")
    parser.add_argument("--array", default="16x16", help="rows x columns of cells, of a model that was built")
    parser.add_argument("--scalers", type=int, default=0, help="of that model; 0: as many as it has by itself")
    parser.add_argument("--ids", type=int, default=16, help="new ids of each story")
    parser.add_argument("--mhz", type=float, default=100.0)
    parser.add_argument("--weight-every", type=int, default=1, help="cycles from one beat of weights to the next")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    args = parser.parse_args()
    if args.ids < 2 or args.scalers < 0 or args.mhz <= 0 or args.weight_every < 1:
        parser.error("expected --ids of 2 and up, --scalers of 0 and up, --mhz above 0, --weight-every of 1 and up")
    known = set(layer_shapes(read_config(ROOT / "models" / "tiny-llama")).values())
    n_failed = 0
    for name in args.programs:
        golden, title = PROGRAMS[name]
        ids = json.loads((ROOT / "golden" / "data" / f"tiny-llama.{golden}.json").read_text())["generations"][0][
            "new_ids"
        ]
        try:
            found, entries, seconds = tell(name, args.array, args.ids, args.weight_every, args.scalers, args.hw)
        except (OSError, RuntimeError) as e:
            print(f"{title}: {e}", file=sys.stderr)
            return 1
        found_shapes = {(e["n_outputs"], e["n_inputs"]) for e in entries if e["command"] == "multiply"}
        same = found == ids[: args.ids]
        lines, n_wrong = table(entries, args.mhz)
        all_in_rtl = found_shapes == known
        print(f"{title}: {args.ids} ids are {'' if same else 'NOT '}the golden's: {','.join(map(str, found))}")
        if not all_in_rtl:
            print(f"products in RTL are of {sorted(found_shapes)}, expected {sorted(known)}")
        for line in lines:
            print("  " + line)
        n_products = sum(e["command"] == "multiply" for e in entries)
        print(
            f"  {n_products} products, {n_wrong} with other cycles than the model; {seconds / args.ids:.2f} s a token\n"
        )
        n_failed += not same or not all_in_rtl or n_wrong > 0
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plants a mistake in the chip around its units, one at a time, and runs the story that has to find it.

    python hw/tests/chip_mutants.py [NAME ...]      make chip-mutants; with names, these mistakes alone

A mistake is a text of a source that is replaced by another, and has to be there once. It is found if an id or a step of
the trace is not the golden's, if an assertion fails, or if a token does not end; not if the chip does not compile.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

OUT = Path("build/hw/chip-mutants")
# Name: module, old, new.
MUTANTS = {
    "position for id": ("step_sequencer", "2'd2:    index = position_i;", "2'd2:    index = token_i;"),
    "attention without its own position": (
        "step_sequencer",
        "index = position_i + INDEX_W'(1);",
        "index = position_i;",
    ),
    "every other step": ("step_sequencer", "at_q + ADDRESS_W'(32)", "at_q + ADDRESS_W'(64)"),
    "step ends before memory answers": ("chip_axi", "~writer_active & ~queue_waits", "~queue_waits"),
    "step ends before the product": ("chip_axi", "(out_left_q == '0) & ", ""),
    "values from where keys are": ("chip_axi", "values_start ? second_address : address", "address"),
    "rotation not from head to head": ("chip_axi", ".period_i     (group)", ".period_i     (n)"),
    "result over its input": ("chip_axi", ".write_at_i   (vector_out)", ".write_at_i   (vector_a)"),
    "codes behind those before": ("chip_axi", ".clear_i         (step_begins & quantizes)", ".clear_i         (start)"),
    "scale for the first group alone": ("chip_axi", "code_first_q <= code_last;", "code_first_q <= 1'b0;"),
}


def check(name: str) -> str:
    """How the story finds a mistake; "" if it does not. Raises ValueError if it cannot be planted or compiled."""
    module, old, new = MUTANTS[name]
    folder = OUT / re.sub(r"[^a-z0-9]+", "-", name)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree("hw/rtl", folder / "rtl")
    source = folder / "rtl" / f"{module}.sv"
    text = source.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{name}: {text.count(old)} places in {module}.sv, expected 1: {old}")
    source.write_text(text.replace(old, new))
    program = folder / "chip-4x4" / "chip_run"
    options = [f"RTL={folder}/rtl", f"HW={folder}", "RTL_OPT=-O1", "CHIP_WARNINGS=-Wno-lint"]
    made = subprocess.run(["make", "-s", *options, str(program)], capture_output=True, text=True, check=False)
    if made.returncode:
        raise ValueError(f"{name}: does not compile: {made.stdout[-1000:]}{made.stderr[-1000:]}")
    story = [sys.executable, "-m", "hw.chip_story", "--hw", folder, "--array", "4x4", "--ids", "1", "--models", "q8"]
    done = subprocess.run(list(map(str, story)), capture_output=True, text=True, check=False)
    shutil.rmtree(folder)
    if done.returncode == 0:
        return ""
    says = [line.strip() for line in (done.stdout + done.stderr).splitlines() if re.search("NOT|outside|q8: ", line)]
    if not says:
        raise ValueError(f"{name}: the story does not run: {done.stderr[-1000:]}")
    return says[-1][:110]


def main(names: list[str]) -> int:
    """Plants the mistakes of these names, or all; the exit code is 1 if one is not found."""
    missed = 0
    for name in names or MUTANTS:
        found = check(name)
        missed += not found
        print(f"{name:36} {found or 'NOT FOUND'}", flush=True)
    print(f"{len(names or MUTANTS) - missed} of {len(names or MUTANTS)} planted mistakes were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

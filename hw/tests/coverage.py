"""Prints what the tests reach of the RTL: lines and toggles of each module, from the data of `verilator --coverage`.

    python hw/tests/coverage.py FILE.dat...     make hw-coverage; exit code 1 below 95 % of all lines

A line counts if it is reached in one of the models of its module, a bit of a signal if it goes up, and again if it
comes down.
"""

import re
import sys
from collections import Counter
from pathlib import Path

LEAST = 0.95  # of the lines


def read_points(path: Path, points: Counter) -> None:
    """Adds the counts of a file: by module, kind, line, and what Verilator says of the point."""
    for line in path.read_text(encoding="latin-1").splitlines():
        if not (record := re.fullmatch(r"C '(.*)' (\d+)", line)):
            continue
        fields = dict(field.split("\2", 1) for field in record[1].split("\1") if "\2" in field)
        kind = fields["page"].partition("/")[0]
        points[Path(fields["f"]).stem, kind, int(fields["l"]), fields.get("o", "")] += int(record[2])


def share(counts: list[int]) -> str:
    """How many of the points have a count, as text."""
    reached = sum(count > 0 for count in counts)
    return f"{reached:5} of {len(counts):5} {reached / len(counts):6.1%}" if counts else f"{'-':>21}"


def main(paths: list[str]) -> int:
    """The table, and lines that no test reaches."""
    points: Counter = Counter()
    for path in paths:
        read_points(Path(path), points)
    if not points:
        sys.exit("no coverage data")
    print(f"{'module':<16} {'lines':>21}   {'toggles':>21}")
    for module in [*sorted({key[0] for key in points}), "all"]:
        of_kind = [
            [n for key, n in points.items() if module in (key[0], "all") and (key[1] == "v_toggle") == toggles]
            for toggles in (False, True)
        ]
        print(f"{module:<16} {share(of_kind[0])}   {share(of_kind[1])}")
    for (module, kind, line, what), n in sorted(points.items()):
        if n == 0 and kind != "v_toggle":
            print(f"hw/rtl/{module}.sv:{line}: never reached ({what})")
    lines = [n for key, n in points.items() if key[1] != "v_toggle"]
    return 0 if sum(n > 0 for n in lines) >= LEAST * len(lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

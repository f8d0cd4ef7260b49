"""Folds a program and the common/ headers it includes into one source file: python tools/single.py runq.cpp

Each header is put where it is first included; system headers stay as they are. Needs nothing but Python.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'\s*#include "([^"]+)"')


def fold(path: Path, seen: set[Path]) -> list[str]:
    """The lines of a file with its own headers in place of their includes, each once."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = INCLUDE.match(line)
        if match:
            header = next(h for h in (path.parent / match[1], ROOT / match[1]) if h.exists()).resolve()
            if header not in seen:
                seen.add(header)
                rule = "// " + "=" * 76
                lines += [rule, f"// {header.relative_to(ROOT)}", "", *fold(header, seen), "", rule, f"// {path.name}"]
        elif line.strip() != "#pragma once":
            lines.append(line)
    return lines


def main() -> int:
    """Prints the folded source."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    print("\n".join(fold(Path(sys.argv[1]).resolve(), set())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

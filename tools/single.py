"""Folds a program and the engine/ headers it includes into one source file: python tools/single.py runq.cpp

Each header is put where it is first included, and the source that belongs to a header at the end; system headers stay
as they are. A header that several branches of an #if include is in each of them. Needs nothing but Python.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Stands in the folded file, where a test takes it from: its flags are those of mk/build.mk.
COMPILE = (
    "g++ -std=c++20 -O3 -march=native -fopenmp-simd -pthread -fno-math-errno -fno-trapping-math {0}.cpp -o {0} "
    "-lpcre2-8 -lutf8proc"
)
INCLUDE = re.compile(r'\s*#include "([^"]+)"')
CONDITION = re.compile(r"\s*#\s*(if|el|endif)")  # el: #elif, #else


def fold(path: Path, seen: set[Path]) -> list[str]:
    """The lines of a file with its own headers in place of their includes, each once. seen: those before it."""
    lines = []
    before: list[set[Path]] = []  # each #if that is open: what was seen in front of it
    inside: list[set[Path]] = []  # and what its branches have included
    for line in path.read_text(encoding="utf-8").splitlines():
        condition = CONDITION.match(line)
        if condition and condition[1] == "if":
            before.append(set(seen))
            inside.append(set())
        elif condition:
            inside[-1] |= seen - before[-1]
            seen &= before[-1]
            if condition[1] == "endif":
                before.pop()
                seen |= inside.pop()
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


def fold_program(path: Path) -> list[str]:
    """The lines of a program: its source, and behind it the sources of the headers that it includes."""
    seen: set[Path] = set()
    lines = fold(path, seen)
    taken: set[Path] = set()
    while True:  # a source may include headers that have a source, too
        sources = {header.with_suffix(".cpp") for header in seen} - taken
        found = sorted(source for source in sources if source.exists())
        if not found:
            return lines
        taken.add(found[0])
        rule = "// " + "=" * 76
        lines += ["", rule, f"// {found[0].relative_to(ROOT)}", "", *fold(found[0], seen)]


def how_to_compile(name: str) -> list[str]:
    """The comment that a folded file begins with."""
    return [
        f"// {name}.cpp and all its headers in one file, made by tools/single.py. To compile it:",
        "//",
        f"//     {COMPILE.format(name)}",
        "//",
        "// Debian's packages for that are g++, libpcre2-dev and libutf8proc-dev. With -DNO_TOKENIZER in place of the",
        "// two libraries g++ is enough; such a program takes and prints token ids.",
        "",
    ]


def main() -> int:
    """Prints the folded source."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(sys.argv[1]).resolve()
    print("\n".join(how_to_compile(path.stem) + fold_program(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

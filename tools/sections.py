"""Keeps equal what several programs have in common: python tools/sections.py [--check]

A section is the text between a line `// ---- section NAME ----` and a line `// ---- end of NAME ----`, of any number of
dashes. Its master, which one edits, is in the first of PROGRAMS that has it. Without an option the master's text goes
into the other programs that have a section of that name; if such a copy was edited itself, nothing is written. --check
says which copies differ.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("runq.cpp", "runq_w8a8.cpp", "runq_gptq.cpp", "runq_moe.cpp", "runq_awq.cu")
WRITTEN = ROOT / "build" / "sections"  # has the programs as this wrote them last
MARKER = re.compile(r"// ---- (section|end of) (.*?) *-*$")


def find_sections(source: str, file: str) -> dict[str, str]:
    """The text of each section. Raises ValueError, a line for each marker that is not one of a pair."""
    found: dict[str, str] = {}
    errors = []
    name, begin, lines = "", 0, source.splitlines(keepends=True)  # name: of the section that is open
    for i, line in enumerate(lines, 1):
        marker = MARKER.match(line.rstrip())
        if marker is None:
            continue
        if marker[1] == "section":
            if name or marker[2] in found:
                where = f"inside section {name}" if name else "a second time"
                errors.append(f"{file}:{i}: section {marker[2]} begins {where}")
            name, begin = marker[2], i
        elif marker[2] == name:
            found[name] = "".join(lines[begin : i - 1])
            name = ""
        else:
            errors.append(f"{file}:{i}: section {marker[2]} ends and has not begun")
    if name:
        errors.append(f"{file}:{begin}: section {name} does not end")
    if errors:
        raise ValueError("\n".join(errors))
    return found


def earlier_sections(file: str) -> list[dict[str, str]]:
    """Those of a program in git's HEAD, and as this wrote it last: a copy that is one of these was not edited."""
    head = subprocess.run(["git", "show", f"HEAD:./{file}"], cwd=ROOT, capture_output=True, check=False)
    written = WRITTEN / file
    sources = [head.stdout.decode(), written.read_text(encoding="utf-8") if written.exists() else ""]
    try:
        return [find_sections(source, file) for source in sources]
    except ValueError:  # nothing can have come from such a file
        return []


def with_section(source: str, name: str, text: str) -> str:
    """A program with another text in a section."""
    marked = rf"(?ms)^(// ---- section {re.escape(name)} *-*\n).*?^(?=// ---- end of {re.escape(name)} *-*$)"
    return re.sub(marked, lambda begin: begin[1] + text, source)


def main() -> int:
    """Copies or checks."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in PROGRAMS if (ROOT / file).exists()}
    masters: dict[str, tuple[str, str]] = {}  # by section: its program, and its text
    changed: dict[str, str] = {}
    errors = []
    for file, source in sources.items():
        try:
            sections = find_sections(source, file)
        except ValueError as e:
            errors.append(str(e))
            continue
        for name, text in sections.items():
            program, master = masters.setdefault(name, (file, text))
            if text == master:
                continue
            if "--check" in sys.argv:
                errors.append(f"{file}: section {name} is not that of {program}")
            elif all(text != earlier.get(name) for earlier in earlier_sections(file)):
                errors.append(f"{file}: section {name} was edited here; its master is in {program}")
            changed[file] = with_section(changed.get(file, source), name, master)
    if errors or "--check" in sys.argv:
        print("\n".join(errors), end="\n" if errors else "", file=sys.stderr)
        return 1 if errors else 0
    WRITTEN.mkdir(parents=True, exist_ok=True)
    for file, source in changed.items():
        print(file)
        for path in (ROOT / file, WRITTEN / file):
            path.write_text(source, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

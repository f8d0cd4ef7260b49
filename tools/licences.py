"""docs/licences.md: the licences of what this project uses, from the packages' own metadata.

.venv/bin/python tools/licences.py             prints the page's table of Python packages
.venv/bin/python tools/licences.py PAGE        puts it into the page, between its two comments
"""

import re
import sys
from importlib.metadata import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- packages: written by tools/licences.py -->\n", "<!-- end of packages -->\n"


def locked() -> list[str]:
    """Names of the packages of requirements.txt, in its order."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.split("==")[0] for line in lines if "==" in line]


def licence(name: str) -> str:
    """What a package's metadata say: the SPDX expression; in older ones the field, or the classifiers."""
    fields = metadata(name)
    if expression := fields.get("License-Expression"):
        return expression
    classifiers = [c.split(" :: ")[-1] for c in fields.get_all("Classifier", []) if c.startswith("License :: OSI")]
    text = fields.get("License", "")
    return text if text and "\n" not in text and len(text) < 40 else ", ".join(classifiers) or "not said"


def table() -> str:
    """A row for each package."""
    rows = [f"| {name} | {metadata(name)['Version']} | {licence(name)} |" for name in locked()]
    return "\n".join(["| package | version | licence |", "|---|---|---|", *rows]) + "\n"


def main() -> None:
    """Prints the table, or puts it into a page."""
    if len(sys.argv) < 2:
        print(table(), end="")
        return
    page = Path(sys.argv[1])
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.S)
    assert len(pattern.findall(text)) == 1, f"{page}: the comments are not there once"
    page.write_text(pattern.sub(lambda _: BEGIN + "\n" + table() + "\n" + END, text), encoding="utf-8")


if __name__ == "__main__":
    main()

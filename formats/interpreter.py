"""Which Python this is: an error that says what to type where it is too old or lacks a module.

That happens to who types python3 in place of .venv/bin/python. Each package with a command line calls `check` first
of all, from its __init__.py; so these lines, like those, have to be such that Python 3.6 can read them.
"""

import os
import shlex
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)  # as in pyproject.toml


def _what_to_type(package: str, setup: str) -> str:
    """The command of this process with .venv's Python, and `setup` in front of it where there is no .venv."""
    # Without sys.orig_argv (before Python 3.10) nobody knows which module of the package is wanted.
    arguments = getattr(sys, "orig_argv", ["", "-m", package, "..."])[1:]
    python = ROOT / ".venv" / "bin" / "python"
    line = " ".join([os.path.relpath(str(python)), *map(shlex.quote, arguments)]).replace("'...'", "...")
    return line if python.exists() else f"{setup} && {line}"


def _explain_missing(package: str, name: str) -> str:
    """What to do about a module that is not there."""
    here = f"{package}: this Python has no module '{name}'"
    locked = {line.split("==")[0].lower() for line in (ROOT / "requirements.txt").read_text().splitlines()}
    if name.lower() not in locked:
        return f"{here}, and .venv has none either: install it"
    if Path(sys.prefix).resolve() == ROOT / ".venv":
        return f"{here}: .venv is not complete; type: rm -r .venv && make .venv/bin/python"
    return f"{here}; type: {_what_to_type(package, 'make .venv/bin/python')}"


def check(package: str) -> None:
    """Ends `python -m PACKAGE` in one line and exit code 1 if this Python is too old, or once it lacks a module."""
    if sys.argv[:1] != ["-m"]:  # as it is while Python still looks for the module: nobody is importing us
        return
    if sys.version_info[:2] < OLDEST:
        needed, found = (".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info))
        command = _what_to_type(package, f"make .venv/bin/python PYTHON=python{needed}")
        sys.exit(f"{package}: needs Python {needed} or newer, this is {found}; type: {command}")

    def explain(kind: type, error: BaseException, traceback: TracebackType) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name and not (ROOT / error.name.split(".")[0]).is_dir():
            print(_explain_missing(package, error.name.split(".")[0]), file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = explain

"""Which Python this is: an error of one line that says what to type where it is too old or lacks a module.

It is too old, or lacks the modules of requirements.txt, where somebody types python3 in place of .venv/bin/python. Each
package with a command line calls `check` first of all, from its __init__.py; so these lines, like those, have to be
such that Python 3.6 can read them. Modules that requirements.txt does not have, such as torch, are asked for by `need`,
or from a shell, by the names under which they are imported:

    python -m formats.interpreter MODULE...     exit code 1 and that line if this Python lacks one
"""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)  # as in pyproject.toml


def _is_locked(module: str) -> bool:
    """Whether requirements.txt has a module, so that .venv has it, too."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").lower().splitlines()
    return module.lower() in (line.split("==")[0] for line in lines)


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
    if not _is_locked(name):
        return f"{here}, and .venv has none either: install it"
    if Path(sys.prefix).resolve() == ROOT / ".venv":
        return f"{here}: .venv is not complete; type: rm -r .venv && make .venv/bin/python"
    return f"{here}; type: {_what_to_type(package, 'make .venv/bin/python')}"


def hold_standard_descriptors() -> None:
    """Keeps files from becoming a standard stream that is closed: it is /dev/null then, used the wrong way round.

    So what is meant for it cannot land in a file, and reading it or writing to it fails as before (EBADF). Standard
    error, where Python has None instead, becomes a stream that keeps nothing.
    """
    for descriptor, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest number that is free, which is this one
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  for as long as the process


def check(package: str) -> None:
    """Ends `python -m PACKAGE` in one line and exit code 1 if this Python is too old, or once it lacks a module.

    Ctrl-C before the program has begun, while modules are loaded, is a line, too.
    """
    if sys.argv[:1] != ["-m"]:  # as it is while Python still looks for the module: nobody is importing us
        return
    hold_standard_descriptors()
    if sys.version_info[:2] < OLDEST:
        needed, found = (".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info))
        command = _what_to_type(package, f"make .venv/bin/python PYTHON=python{needed}")
        sys.exit(f"{package}: needs Python {needed} or newer, this is {found}; type: {command}")

    def explain(kind: type, error: BaseException, traceback: TracebackType) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name and not (ROOT / error.name.split(".")[0]).is_dir():
            print(_explain_missing(package, error.name.split(".")[0]), file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            print(f"{package}: interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = explain


def need(*modules: str) -> None:
    """Ends the program in one line and exit code 1 if this Python lacks a module, which .venv need not have."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        others = [name.replace("_", "-") for name in modules if not _is_locked(name)]
        sys.exit(
            f"{sys.executable} has no {', '.join(missing)}. Please type: python3 -m venv .venv-torch && "
            f".venv-torch/bin/pip install -r requirements.txt {' '.join(others)}; then run this with "
            ".venv-torch/bin/python, or make with PYTHON_HF=.venv-torch/bin/python"
        )


if __name__ == "__main__":
    need(*sys.argv[1:])

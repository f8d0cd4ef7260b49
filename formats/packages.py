"""Packages that requirements.txt does not have, such as torch: one line that says how to get them, not a traceback.

python -m formats.packages PACKAGE...     exit code 1 and that line if this Python lacks one
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def need(*packages: str) -> None:
    """Ends the program where one of the packages, by the names under which they are imported, cannot be found."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        locked = (Path(__file__).resolve().parent.parent / "requirements.txt").read_text(encoding="utf-8").lower()
        others = [name.replace("_", "-") for name in packages if f"\n{name}==" not in locked]
        sys.exit(
            f"{sys.executable} has no {', '.join(missing)}. Please type: python3 -m venv .venv-torch && "
            f".venv-torch/bin/pip install -r requirements.txt {' '.join(others)}; then run this with "
            ".venv-torch/bin/python, or make with PYTHON_HF=.venv-torch/bin/python"
        )


if __name__ == "__main__":
    need(*sys.argv[1:])

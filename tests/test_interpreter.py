"""A Python that is too old or lacks modules: one line that says what to type, of every package with commands."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "export": ["export", "q8", "a model", "b"],
    "golden": ["golden", "ppl"],
    "models": ["models.compare_schemes"],
    "bench": ["bench.run"],
    "ptx": ["ptx.count"],
    "tests": ["tests.test_docs"],
    "web": ["web.page_data"],
}


def ends(*arguments, cwd=ROOT):
    """The only line of a Python that must end with exit code 1."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.rstrip("\n")


def test_every_package_with_a_command_line_is_here():
    sources = {init.parent.name: init.parent.glob("*.py") for init in ROOT.glob("*/__init__.py")}
    commands = {
        name for name, paths in sources.items() if any('if __name__ == "__main__"' in p.read_text() for p in paths)
    }
    # formats.interpreter is there to say what a Python lacks.
    assert commands - {"formats"} == set(COMMANDS)


@pytest.mark.parametrize("package", COMMANDS)
def test_a_missing_module(package):
    # -S: without site-packages, as a system's Python
    line = ends("-S", "-m", *COMMANDS[package])
    command = " ".join(COMMANDS[package]).replace("a model", "'a model'")
    module = "tokenizers" if package == "web" else "numpy"  # the first that it imports
    assert line == f"{package}: this Python has no module '{module}'; type: .venv/bin/python -S -m {command}"


@pytest.mark.parametrize("command", ["export q8 absent out.bin", "golden diff a b"])
def test_a_folder_is_run_as_the_package_is(tmp_path, command):
    """`python export`, from any folder, and with another Python."""
    package, *arguments = command.split()
    expected = ends("-m", package, *arguments)
    assert ends(package, *arguments) == ends(ROOT / package, *arguments, cwd=tmp_path) == expected
    line = ends("-S", package, *arguments)
    assert line == f"{package}: this Python has no module 'numpy'; type: .venv/bin/python -S {command}"


def test_without_venv(tmp_path):
    for package in ("formats", "export", "golden"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("data", "real"))
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    command = ".venv/bin/python -S -m export q8 a b"
    line = ends("-S", "-m", "export", "q8", "a", "b", cwd=tmp_path)
    assert line == f"export: this Python has no module 'numpy'; type: make .venv/bin/python && {command}"
    # A .venv in which pip did not end.
    incomplete = (
        "import sys; sys.prefix = '.venv'; sys.argv[0] = '-m'; import export; raise ModuleNotFoundError(name='gguf')"
    )
    line = ends("-S", "-c", incomplete, cwd=tmp_path)
    assert line.endswith("no module 'gguf': .venv is not complete; type: rm -r .venv && make .venv/bin/python")


def test_a_module_that_venv_has_not():
    missing = "import sys; sys.argv[0] = '-m'; import models; import no_such_module.part"
    assert ends("-c", missing) == (
        "models: this Python has no module 'no_such_module', and .venv has none either: install it"
    )


def test_an_old_python():
    old = "import sys; sys.version_info = (3, 9, 18); sys.argv[0] = '-m'; {}; import export"
    needs = "export: needs Python 3.11 or newer, this is 3.9; type: .venv/bin/python -m export"
    assert ends("-S", "-c", old.format("del sys.orig_argv")) == f"{needs} ..."
    assert ends("-S", "-c", old.format("sys.orig_argv = ['x', '-m', 'export', 'q8']")) == f"{needs} q8"


def test_other_errors_stay_as_they_are():
    for statement in ("1 / 0", "import export.no_such_file"):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv[0] = '-m'; import export; {statement}"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.startswith("Traceback")
    # Whoever imports a package has its exceptions to himself.
    imports = "import sys, export; assert sys.excepthook is sys.__excepthook__"
    subprocess.run([sys.executable, "-S", "-c", imports], cwd=ROOT, check=True)


def test_old_parsers_read_what_runs_first():
    first = [ROOT / "formats" / "__init__.py", ROOT / "formats" / "interpreter.py"]
    for path in first + [ROOT / package / "__init__.py" for package in COMMANDS]:
        ast.parse(path.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_file_does_not_become_a_standard_stream_that_is_closed(tmp_path, closed):
    """What is written is the same as with all streams open; and no stream, no traceback."""
    files = [tmp_path / "open.bin", tmp_path / "closed.bin"]
    for file, streams in zip(files, ("", closed), strict=True):
        export = [sys.executable, "-m", "export", "q8", "models/tiny-llama", file]
        done = subprocess.run(
            ["sh", "-c", f'"$@" {streams}', "sh", *export], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done
        assert "Traceback" not in done.stderr
    assert files[1].read_bytes() == files[0].read_bytes()
    seen = tmp_path / "seen"
    check = (
        "import os, sys; sys.argv[0] = '-m'; import export\n"
        "print([os.readlink(f'/proc/self/fd/{n}') for n in range(3)], file=open(sys.argv[-1], 'w'))"
    )
    subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", check, seen], cwd=ROOT, check=True)
    assert seen.read_text().count("'/dev/null'") >= closed.count("&-"), seen.read_text()

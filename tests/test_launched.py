"""Commands as processes of their own, and as `run_here` runs them in the tests' process: the same in every byte."""

import hashlib
import os
import re
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers import CALIBRATION, DATA, MODELS, ROOT, SIGNALS, launch, run_here
from tests.test_hex import FILES

LLAMA, MOE = MODELS / "tiny-llama", MODELS / "tiny-qwen3-moe"
TRACE, W8A8_FILE = DATA / "tiny-llama.q8.trace.safetensors", FILES / "tiny-llama.w8a8.bin"
CALIB = ("--calib", CALIBRATION, "--samples", 2, "--seq-len", 32)

# Each command, as it ends well and as it does not: module, arguments, exit code. OUT is a folder, where files go.
COMMANDS = [
    ("golden", ("diff", TRACE, TRACE, "-v"), 0),
    ("golden", ("diff", TRACE, "MISSING", "--model", LLAMA), 3),
    ("golden", ("diff", TRACE, "absent"), 1),
    ("golden", ("accept", "LOGITS", "--model", LLAMA), 1),
    ("golden", ("hex", "quantize.64.*", "--lanes", 4, "--out", "OUT"), 0),
    ("golden", ("hex", "half.x", "--tile", "2"), 2),
    ("golden", ("passes", "3x20x256g64", "--tile", "16x16", "--out", "OUT"), 0),
    ("golden", ("ppl", LLAMA, "TEXT", "--file", W8A8_FILE), 0),
    ("golden", ("make", "--files", "OUT", "--out", "OUT", "--only", "awq"), 1),
    ("golden", ("real", "--files", "absent", "--out", "OUT"), 1),
    ("export", ("q8", LLAMA, "OUT/m.bin"), 0),
    ("export", ("q8", "absent", "OUT/m.bin"), 1),
    ("export", ("w8a8", LLAMA, "OUT/m.bin", *CALIB, "--verbose"), 0),
    ("export", ("awq", LLAMA, "OUT/m.bin", "--rtn", "--hf-out", "OUT/hf"), 0),
    ("export", ("gptq", LLAMA, "OUT/m.bin", "--rtn"), 0),
    ("export", ("moe", MOE, "OUT/m.bin", "--no-smooth", "--format", "a8w4", "--no-tokenizer"), 0),
    ("export", (), 2),
    ("models.by_rule", ("--like", "qwen3-0.6b", "--layers", "0", "OUT/m.bin"), 2),
    ("bench.systolic", (LLAMA, "--rows", "8", "--cols", "8"), 0),
    ("models.outliers", (LLAMA, "OUT"), 1),
]


def made(folder):
    """What is in a folder: names and checksums."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip


@pytest.mark.parametrize(("module", "arguments", "code"), COMMANDS, ids=lambda v: " ".join(map(str, v[:1]))
                         if isinstance(v, tuple) else str(v))  # fmt: skip
def test_a_command_does_the_same_here_as_by_itself(tmp_path, module, arguments, code):
    trace = load_file(TRACE)
    save_file({name: trace[name] for name in ("tokens", "layers.1.attn.q_proj")}, tmp_path / "missing")
    save_file({"tokens": np.zeros(200, np.int32)}, tmp_path / "logits")
    (tmp_path / "text").write_text("Once upon a time there was a girl. ’\n")
    results = []
    for run in (launch, run_here):
        out = tmp_path / "out"
        out.mkdir()
        words = {"MISSING": tmp_path / "missing", "LOGITS": tmp_path / "logits", "TEXT": tmp_path / "text"}
        given = [words.get(a, str(a).replace("OUT", str(out))) for a in arguments]
        done = run(module, *given, text=False)
        stderr = re.sub(rb"\[[^]\n]*/s[^]\n]*\]|in \d+\.\d s\n|.*\r| +$", b"", done.stderr, flags=re.M)  # times
        results.append((done.returncode, done.stdout, stderr, made(out), done.args))
        out.rename(tmp_path / run.__name__)
    assert results[0] == results[1]
    assert results[0][0] == code
    assert b"Traceback" not in results[0][2]
    assert results[0][1] or results[0][2]


def test_what_a_command_changes_of_the_process_is_put_back(tmp_path, monkeypatch):
    """Its folder, arguments, streams, environment, and what it does at warnings, signals and numpy's errors."""
    (tmp_path / "meddler.py").write_text(
        "import os, signal, sys, warnings\nimport numpy as np\n"
        "print(os.getcwd(), sys.argv[1:], __name__, flush=True)\n"
        "print('\\udc80 é', file=sys.stderr)\n"
        "warnings.warn('mind')\nwarnings.warn('old', DeprecationWarning, stacklevel=2)\n"
        "warnings.simplefilter('ignore')\nwarnings.showwarning = None\nnp.seterr(all='raise')\n"
        "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
        "os.chdir('/')\nsys.argv = ['x']\nos.environ['MEDDLED'] = '1'\n"
        "sys.exit('too bad' if os.path.exists('/') else 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def state():
        return (Path.cwd(), sys.argv, sys.stdout, sys.stderr, dict(os.environ), np.geterr(), warnings.filters[:],
                warnings.showwarning, sys.modules["__main__"])  # fmt: skip

    before, handlers = state(), list(map(signal.getsignal, SIGNALS))
    here = run_here("meddler", "a b", text=False)
    assert state() == before
    assert list(map(signal.getsignal, SIGNALS)) == handlers
    alone = launch("meddler", "a b", text=False)
    assert (here.returncode, here.stdout, here.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert here.returncode == 1
    assert here.stdout.decode() == f"{ROOT} ['a b'] __main__\n"
    lines = here.stderr.decode().splitlines()
    assert lines[0] == "\\udc80 é"
    assert "UserWarning: mind" in lines[1]
    assert lines[-1] == "too bad"


def test_a_command_that_raises_ends_with_a_traceback(tmp_path, monkeypatch):
    (tmp_path / "raiser.py").write_text("print('begins')\nraise KeyError('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = run_here("raiser")
    assert (done.returncode, done.stdout) == (1, "begins\n")
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("\nKeyError: 'x'\n")

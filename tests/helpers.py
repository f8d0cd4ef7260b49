"""What several test files need: where things are, the tiny models' exports, command lines, traces with a mistake."""

import io
import json
import os
import random
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import traceback
import warnings
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from export.awq import export_awq
from export.w8a8 import export_w8a8
from formats.checkpoint import Checkpoint
from golden.awq import AWQ, group_range, quantize
from golden.calibration import calibration_samples

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
DATA = ROOT / "golden" / "data"
CALIBRATION = MODELS / "calibration.txt"
GOLDEN_FILES = ROOT / "build" / "models"  # with the exported file behind each golden trace: `make` puts them there
TINY = ("tiny-llama", "tiny-qwen3")
F16, F32, F64 = np.float16, np.float32, np.float64
NUMPY_ERRORS = np.geterr()  # what numpy begins with
FULL = os.environ.get("FULL", "0") not in ("", "0")  # sweeps that `make test` does in part are done whole

# The model files behind the golden vectors: name of the variant -> options of the export, as the Makefile has them.
W8A8_VARIANTS = {"w8a8": {}, "w8a8-block32": {"block": 32}, "w8a8-static": {"static": True},
                 "w8a8-rotate": {"rotate": 2}}  # fmt: skip
AWQ_VARIANTS = {"awq": {}, "awq-g64": {"group_size": 64}}


def calibration(n_samples, seq_len):
    """Options of the exporters that calibrate."""
    return {"calibration": CALIBRATION, "n_samples": n_samples, "seq_len": seq_len}


def export_variant(name, variant, out):
    """Writes one of those files."""
    export = export_w8a8 if variant in W8A8_VARIANTS else export_awq
    export(MODELS / name, out, **calibration(16, 256), progress=False, **(W8A8_VARIANTS | AWQ_VARIANTS)[variant])


def assert_golden_file(name, variant, folder):
    """What the exporter writes now is what `make` has exported, byte for byte."""
    export_variant(name, variant, folder / "again.bin")
    assert (folder / "again.bin").read_bytes() == (GOLDEN_FILES / f"{name}.{variant}.bin").read_bytes()


def export_tiny(hf_dir, out, **options):
    """An AWQ file, by a short calibration or none, and its reader."""
    export_awq(hf_dir, out, progress=False, **({} if options.get("rtn") else calibration(4, 128)), **options)
    return AWQ(out)


def one_layer(name, out, hidden_dim=128):
    """A directory with a tiny model cut down to its first layer, and that one's feed-forward block to hidden_dim."""
    shutil.copytree(MODELS / name, out)
    config = json.loads((out / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "intermediate_size": hidden_dim}
    (out / "config.json").write_text(json.dumps(config))
    weights = {}
    for key, value in load_file(out / "model.safetensors").items():
        if ".layers." in key and ".layers.0." not in key:
            continue
        if "gate_proj" in key or "up_proj" in key:
            value = value[:hidden_dim]
        if "down_proj" in key:
            value = np.ascontiguousarray(value[:, :hidden_dim])
        weights[key] = value
    save_file(weights, out / "model.safetensors")
    return out


def calibrate(name, n_samples=4, seq_len=128):
    """The checkpoint of a tiny model, and samples of stories."""
    checkpoint = Checkpoint(MODELS / name)
    text = CALIBRATION.read_text()
    return checkpoint, calibration_samples(checkpoint.path, checkpoint.config, text, n_samples, seq_len)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


@contextmanager
def _as_a_program(stdout, stderr, argv):
    """In this block the process is as a command finds it that has just begun; behind it, as it was before."""
    folder, handlers = Path.cwd(), {number: signal.getsignal(number) for number in SIGNALS}
    saved = sys.argv, sys.stdout, sys.stderr, os.environ.copy()

    def show(message, category, filename, lineno, _file=None, line=None):
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    with warnings.catch_warnings(), np.errstate(**NUMPY_ERRORS):
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)  # as in Python without options
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # the module is imported already
        warnings.showwarning = show
        sys.argv, sys.stdout, sys.stderr = argv, stdout, stderr
        os.chdir(ROOT)
        try:
            yield
        finally:
            os.chdir(folder)
            sys.argv, sys.stdout, sys.stderr, environment = saved
            if os.environ != environment:
                os.environ.clear()
                os.environ.update(environment)
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def run_here(module, *args, text=True):
    """What `python -m MODULE ARGS...` would print and its exit code, without a process: imports take most of its time.

    For what a command does with files and text. What is about the process itself (signals, closed streams, limits,
    other interpreters) launches one. tests/test_launched.py holds the two ways to each other.
    """
    command = [sys.executable, "-m", module, *map(str, args)]
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors=errors) for errors in ("strict", "backslashreplace")]
    with _as_a_program(*streams, command[2:]):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
            if isinstance(stopped.code, str):
                print(stopped.code, file=sys.stderr)
        except Exception:  # Python's own way to end
            traceback.print_exc()
            code = 1
        for stream in streams:
            stream.flush()
    outputs = [stream.buffer.getvalue() for stream in streams]
    return subprocess.CompletedProcess(command, code, *([out.decode() for out in outputs] if text else outputs))


def launch(module, *args, **options):
    """The same, as a process of its own."""
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, **{"text": True} | options)


run_golden, run_export = partial(run_here, "golden"), partial(run_here, "export")
launch_export = partial(launch, "export")


def some_of(items, whole=False, seed=0):
    """All items of a sweep if it is to be whole, or FULL=1 is set; otherwise one in ten, drawn with the seed."""
    if whole or FULL:
        return list(items)
    rng = random.Random(seed)
    return [item for item in items if rng.random() < 0.1]


def default_signals():
    """In a child, before its program starts: SIGINT and SIGHUP end it, whatever the tests were told to ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def seal(data):
    """Puts the right checksum on a changed model file, a bytearray, so that the checks behind it are reached."""
    if len(data) < 256:
        return
    struct.pack_into("<I", data, 0xB0, 0)
    offset = struct.unpack_from("<Q", data, 0xA0)[0]
    struct.pack_into("<I", data, 0xB0, zlib.crc32(data[offset:], zlib.crc32(data[:256])))


def with_header_field(data, where, value):
    """A model file without tokenizer, with an int of its header changed and the checksum made to hold."""
    head = bytearray(data[:256])
    struct.pack_into("<i", head, where, value)
    struct.pack_into("<I", head, 0xB0, 0)
    struct.pack_into("<I", head, 0xB0, zlib.crc32(head))
    return bytes(head) + data[256:]


def broken(trace, step, change):
    """A trace with one step changed."""
    trace = dict(trace)
    trace[step] = change(trace[step].copy())
    return trace


def first_bad(reports):
    """The first step outside the contract."""
    return next((r.name for r in reports if not r.ok), None)


def plain_int4(weight, group_size=64):
    """Rounded to int4 without a search."""
    return quantize(weight, *group_range(weight, group_size))


def stands_for(matrix):
    """What an int4 matrix is, (n_out, n_in) fp16, computed weight by weight."""
    size = matrix.codes.shape[1] // matrix.scales.shape[1]
    scales = np.repeat(matrix.scales, size, axis=1).astype(F64)
    zeros = np.repeat(matrix.zeros, size, axis=1).astype(int)
    return ((matrix.codes.astype(int) - zeros) * scales).astype(F16)

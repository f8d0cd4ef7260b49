"""What several test files need: where things are, the tiny models' exports, command lines, traces with a mistake."""

import json
import shutil
import signal
import struct
import subprocess
import sys
import zlib
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
TINY = ("tiny-llama", "tiny-qwen3")
F16, F32, F64 = np.float16, np.float32, np.float64

# The model files behind the golden vectors: name of the variant -> options of the export, as the Makefile has them.
W8A8_VARIANTS = {"w8a8": {}, "w8a8-block32": {"block": 32}, "w8a8-static": {"static": True}}
AWQ_VARIANTS = {"awq": {}, "awq-g64": {"group_size": 64}}


def calibration(n_samples, seq_len):
    """Options of the exporters that calibrate."""
    return {"calibration": CALIBRATION, "n_samples": n_samples, "seq_len": seq_len}


def export_variant(name, variant, out):
    """Writes one of those files."""
    export = export_w8a8 if variant in W8A8_VARIANTS else export_awq
    export(MODELS / name, out, **calibration(16, 256), progress=False, **(W8A8_VARIANTS | AWQ_VARIANTS)[variant])


def golden_files(folder, variants):
    """The exported file behind each golden trace, in a folder."""
    for name in TINY:
        for variant in variants:
            export_variant(name, variant, folder / f"{name}.{variant}.bin")
    return folder


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


def run_golden(*args):
    return subprocess.run([sys.executable, "-m", "golden", *map(str, args)], cwd=ROOT, capture_output=True, text=True)


def run_export(*args, **options):
    command = [sys.executable, "-m", "export", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


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

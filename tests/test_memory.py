"""What --info says that a run takes, against the most that the system says it had: equal within 5 %.

Models are zeros, with small weights and large keys and values. All positions are used: made-up ones, and behind them a
prompt. What a program has before it loads a model is measured with the smallest one.
"""

import re

import pytest

from formats.checkpoint import Moe
from tests.test_program_faults import run, write_model

PROMPT = 300  # more than one chunk
DIMS = {"dim": 512, "hidden_dim": 2048, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "vocab_size": 512}
RUNS = [
    *(("runq", "--kv", kv) for kv in ("f32", "f16", "q8")),
    ("runq", "--kv", "q8", "--mmap"),
    ("runq_w8a8", "--kv", "f16"),
    ("runq_w8a8", "--attn", "int8"),
    ("runq_gptq", "--kv", "f32", "--backend", "builtin"),
    ("runq_moe", "--kv", "q8"),
    ("runq_moe", "--kv", "q8", "--no-fuse"),
]


def done(program, *args):
    """What a run printed, on standard output and after it."""
    result = run(program, *args)
    assert result.returncode == 0, result.stderr
    return (result.stdout + result.stderr).decode()


def peak_bytes(text):
    """The peak memory of a run's statistics: VmHWM."""
    number, unit = re.search(r"peak memory ([\d.]+) ([MG])B", text).groups()
    return float(number) * {"M": 1e6, "G": 1e9}[unit]


@pytest.mark.parametrize("command", RUNS, ids=" ".join)
def test_a_run_takes_what_info_says(tmp_path, command):
    program, *options = command
    context = 8192 if "f32" in options else 16384  # the larger a position is, the fewer there need to be
    group_size = {"group_size": 64} if program == "runq" else {}
    path = write_model(tmp_path / "model.bin", program, experts=Moe(8, 2, 512, True, ()), **DIMS, **group_size)
    args = [path, "-c", context, *options]
    counted = int(re.search(r"^memory_bytes +(\d+)$", done(program, *args, "--info"), re.M).group(1))
    peak = peak_bytes(done(program, *args, "--bench", f"{PROMPT},0,{context - PROMPT}"))
    base = peak_bytes(done(program, write_model(tmp_path / "small.bin", program), "-c", 8, "--ids", "1", "-n", 1))
    assert counted > 5 * base
    assert peak - base == pytest.approx(counted, rel=0.05)

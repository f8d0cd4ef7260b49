"""What --info says that a run takes, against the most that the system says it had: equal within 5 %.

Models are zeros, large enough that what a program has before it loads one, and half-used huge pages of 2 MB, are little
beside them. The first is measured with the smallest model, and subtracted. A run uses all positions of its context.

    FULL=1 python -m pytest -rP -k prompt tests/test_memory.py      every program, cache and length, with the figures
"""

import re

import pytest

from formats.checkpoint import Moe
from tests.helpers import FULL
from tests.test_program_faults import run, write_model

PROMPT = 300  # more than one chunk
DIMS = {"dim": 512, "hidden_dim": 2048, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "vocab_size": 512}
EXPERTS = Moe(8, 2, 512, True, ())
RUNS = [
    *(("runq", "--kv", kv) for kv in ("f32", "f16", "q8")),
    ("runq", "--kv", "q8", "--mmap"),
    ("runq_w8a8", "--kv", "f16"),
    ("runq_w8a8", "--attn", "int8"),
    ("runq_gptq", "--kv", "f32", "--backend", "builtin"),
    ("runq_moe", "--kv", "q8"),
    ("runq_moe", "--kv", "q8", "--no-fuse"),
]
CACHES = {program: [("--kv", kv) for kv in ("f32", "f16", "q8")] for program in ("runq", "runq_gptq", "runq_moe")}
CACHES |= {"runq_w8a8": [("--kv", "f32"), ("--kv", "f16"), ("--attn", "int8")], "runq_awq": [()]}
SWEEP = [
    (program, *cache, n, traced)
    for program, caches in CACHES.items()
    for cache in caches
    for n in (1, 128, 2000)
    for traced in (False, True)
]
PART = [
    ("runq", "--kv", "f32", 128, True),
    ("runq_w8a8", "--attn", "int8", 128, True),
    ("runq_gptq", "--kv", "f16", 1, False),
    ("runq_moe", "--kv", "q8", 128, True),
    ("runq_awq", 1, True),
]


def done(program, *args):
    """What a run printed, on standard output and after it."""
    result = run(program, *args)
    assert result.returncode == 0, result.stderr
    return (result.stdout + result.stderr).decode()


def counted_bytes(program, *args):
    """What --info says of a run with these options."""
    return int(re.search(r"^memory_bytes +(\d+)$", done(program, *args, "--info"), re.M).group(1))


def peak_bytes(text):
    """The peak memory of a run's statistics: VmHWM.

    It begins anew with a program; in getrusage()'s counts, too, what the process was before.
    """
    number, unit = re.search(r"peak memory ([\d.]+) ([MG])B", text).groups()
    return float(number) * {"M": 1e6, "G": 1e9}[unit]


def zeros(path, program, **dims):
    """A model of zeros."""
    group_size = {"group_size": 64} if program == "runq" else {}
    return write_model(path, program, **({"experts": EXPERTS} | DIMS | dims), **group_size)


def base_bytes(tmp_path, program):
    """What a program has besides: the peak of a run with the smallest model, less what is counted of it.

    The latter is next to nothing, but for the emulated GPU: of the room for partial sums, 16 MB whatever the model, it
    uses what blocks there are.
    """
    args = [write_model(tmp_path / "small.bin", program), "-c", 8]
    return peak_bytes(done(program, *args, "--ids", "1", "-n", 1)) - counted_bytes(program, *args)


@pytest.mark.parametrize("command", RUNS, ids=" ".join)
def test_a_run_takes_what_info_says(tmp_path, command):
    program, *options = command
    context = 8192 if "f32" in options else 16384  # the larger a position is, the fewer there need to be
    args = [zeros(tmp_path / "model.bin", program), "-c", context, *options]
    counted = counted_bytes(program, *args)
    peak = peak_bytes(done(program, *args, "--bench", f"{PROMPT},0,{context - PROMPT}"))
    base = base_bytes(tmp_path, program)
    assert counted > 5 * base
    assert peak - base == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("case", SWEEP if FULL else PART, ids=lambda case: " ".join(map(str, case)))
def test_a_prompt_takes_what_info_says(tmp_path, case):
    """A prompt of n tokens in a context of n positions, without and with a trace."""
    program, *options, n, traced = case
    dims = {"n_kv_heads": 2, "n_layers": 8}
    if program == "runq_awq":
        dims |= {"vocab_size": 32768} if n == 1 else {"dim": 128, "hidden_dim": 256, "n_heads": 2, "vocab_size": 4096}
    elif n < 2000 or not traced:  # beside a trace the huge pages of the weights, 2 MB each, are little
        dims |= {"dim": 1024, "hidden_dim": 4096, "n_heads": 16}
    if traced:  # sums of all experts' products are computed from the file
        dims |= {"experts": Moe(4, 4, 512, True, ())}
    args = [zeros(tmp_path / "model.bin", program, **dims), "-c", n, *options]
    if traced:
        args += ["--trace", tmp_path / "trace"]
    counted = counted_bytes(program, *args)
    ids = ",".join(str(1 + i % 500) for i in range(n))
    peak = peak_bytes(done(program, *args, "--ids", ids, "-n", 1, "--print-ids"))
    base = base_bytes(tmp_path, program)
    print(
        f"{' '.join(map(str, case))}: counted {counted / 1e6:.1f} MB, peak {(peak - base) / 1e6:.1f} MB and "
        f"{base / 1e6:.1f} MB before, {100 * (peak - base) / counted - 100:+.1f} %"
    )
    assert peak - base == pytest.approx(counted, rel=0.05)

"""Back ends of runq_gptq: each gives the golden's ids, the best one for a processor is taken, broken ones are not."""

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from formats.model_file import read_header
from formats.schemes import GPTQ_FILE
from formats.tensors import with_offsets
from golden.trace import Tolerances, compare, read_trace
from tests.helpers import DATA, FULL, GOLDEN_FILES, ROOT

PORTABLE = ROOT / "build" / "portable"
HERE = PORTABLE / platform.machine()
MODELS = [f"{model}.gptq-{kind}" for model in ("tiny-llama", "tiny-qwen3") for kind in ("w8", "w4", "ladder", "sparse")]
LADDER = "tiny-llama.gptq-ladder"
X86 = platform.machine() == "x86_64"
CPU_BACKENDS = ("avx2", "avxvnni", "avx512vnni") if X86 else ("neon", "dotprod", "i8mm")


def run(*args, model=LADDER, program=HERE / "runq_gptq", emulator=(), folder=None):
    """Runs the program on a model; back ends are those beside it, or in a folder."""
    command = [*emulator, program, ROOT / "build" / "models" / f"{model}.bin", *args]
    env = os.environ | ({"RUNQ_BACKENDS": str(folder)} if folder else {})
    return subprocess.run([*map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def golden_run(n, model):
    """Options that generate up to n ids after a golden's prompt, and these ids.

    A back end may add in an order of its own: up to where the two best logits are close.
    """

    def n_clear(generation):
        return next((i for i, lead in enumerate(generation["leads"]) if lead < 2e-3), n)

    generation = max(json.loads((DATA / f"{model}.json").read_text())["generations"], key=n_clear)
    n = min(n, n_clear(generation))
    assert n > 1
    ids = ",".join(map(str, generation["prompt_ids"]))
    return ("--ids", ids, "-t", 0, "-n", n, "--print-ids"), generation["new_ids"][:n]


def assert_golden(n, model, *args, **where):
    options, expected = golden_run(n, model)
    done = run(*options, *args, model=model, **where)
    assert done.returncode == 0, done.stderr
    assert [int(i) for i in done.stdout.split(",")] == expected
    return done


def kernel(**where):
    """The back end that the program takes, as --info says."""
    done = run("--info", **where)
    assert done.returncode == 0, done.stderr
    return re.search(r"^kernel +(.*)$", done.stdout, re.M)[1]


def needs(backend):
    """Skips where a back end, or what it runs on, is not there."""
    make = {"opencl": "build/packages-opencl && make portable"}.get(backend, "portable")
    if not (HERE / "backends" / f"quant_gemm_{backend}.so").exists():
        pytest.skip(f"needs the back end {backend}: make {make}")
    done = run("--info", "--backend", backend)
    if done.returncode == 1 and "(code 1)" in done.stderr:  # QUANT_GEMM_NO_DEVICE
        devices = {"opencl": "a device for OpenCL, as the package pocl-opencl-icd has"}
        pytest.skip(f"needs {devices.get(backend, f'a processor with {backend}')}")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "opencl", "builtin"])
def test_the_goldens_ids(backend, model):
    if backend != "builtin":
        needs(backend)
    assert_golden(12, model, "--backend", backend)


@pytest.mark.parametrize("model", MODELS if FULL else [*MODELS[:4], "tiny-qwen3.gptq-ladder"])
def test_the_goldens_ids_emulated(model):
    """Each format, and all of them in both architectures; with FULL=1 each in both.

    Eight ids of the model that has every format; of the others what a prompt and two tokens give, but with FULL=1.
    """
    assert_golden(8 if FULL or model == LADDER else 3, model, "--backend", "emulated")


def test_the_goldens_ids_emulated_with_warps_of_64():
    assert_golden(2, LADDER, "--backend", "emulated64")


def test_a_trace_of_a_back_end_on_a_device_has_the_activations(tmp_path):
    golden = read_trace(DATA / f"{LADDER}.trace.safetensors")
    ids = ",".join(map(str, golden["tokens"]))
    run("--ids", ids, "-n", 1, "-t", 0, "--trace", tmp_path / "t", "--print-ids", "--backend", "emulated")
    reports = compare(golden, read_trace(tmp_path / "t"), Tolerances({"*": 1e-2}))  # its sums have another order
    assert len(reports) > 80
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]


@pytest.mark.parametrize("backend", ["auto", "emulated"])
def test_what_a_back_end_cannot_code_ends_a_run(tmp_path, backend):
    """NaN is no code of activations; one back end quantizes, for the other the program does."""
    data = bytearray((GOLDEN_FILES / f"{LADDER}.bin").read_bytes())
    head = read_header(GOLDEN_FILES / f"{LADDER}.bin", GPTQ_FILE)
    norm = next(t for t in with_offsets(head.tensors(), alignment=64) if t.name == "layers.2.ffn.norm")
    data[norm.offset : norm.offset + 4] = b"\0\0\xc0\x7f"
    (tmp_path / "m.bin").write_bytes(data)
    done = run("--ids", "1,2", "-n", 1, "-t", 0, "--backend", backend, model=tmp_path / "m")
    line = "position 0: layers.2.ffn.norm is the first step that is not finite: nan in fp32\n"
    assert (done.returncode, done.stderr) == (1, f"runq_gptq: {tmp_path / 'm.bin'}: {line}")


# ----------------------------------------------------------------------------
# Choosing one


@pytest.mark.skipif(not X86, reason="needs an x86 processor")
def test_auto_takes_the_best_for_this_processor():
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split()
    best = "portable"  # without a back end
    for name, needed in (
        ("avx2", "avx2 fma f16c"),
        ("avxvnni", "avx2 avx_vnni"),
        ("avx512vnni", "avx512_vnni avx512vl"),
    ):
        if set(needed.split()) <= set(flags):
            best = name
    assert kernel().removeprefix("back end ") == best
    assert not kernel(program=ROOT / "runq_gptq").startswith("back end ")  # has no folder of back ends beside it


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64, of the package qemu-user")
@pytest.mark.skipif(not X86, reason="needs an x86 processor")
@pytest.mark.parametrize(("processor", "best"), [("Nehalem", "portable"), ("Haswell", "avx2"), ("EPYC-Rome", "avx2")])
def test_one_binary_on_other_x86_processors(processor, best):
    emulator = ("qemu-x86_64", "-cpu", processor)
    assert kernel(emulator=emulator).removeprefix("back end ") == best
    assert_golden(4, LADDER, emulator=emulator)


@pytest.mark.skipif(
    shutil.which("qemu-aarch64") is None or not (PORTABLE / "aarch64" / "runq_gptq").exists(),
    reason="needs qemu and a program for Arm: "
    "make build/packages-arm && make portable CXX=aarch64-linux-gnu-g++ TOKENIZER=0",
)
@pytest.mark.parametrize(("processor", "best"), [("cortex-a72", "neon"), ("neoverse-n1", "dotprod"), ("max", "i8mm")])
def test_one_binary_on_arm_processors(processor, best):
    emulator = ("qemu-aarch64", "-cpu", processor, "-L", "/usr/aarch64-linux-gnu")
    where = {"emulator": emulator, "program": PORTABLE / "aarch64" / "runq_gptq"}
    where["folder"] = PORTABLE / "aarch64" / "backends"  # under qemu, /proc/self/exe may be qemu
    assert kernel(**where) == f"back end {best}"
    assert_golden(4, LADDER, **where)


# ----------------------------------------------------------------------------
# Files that are no back ends, and back ends that fail

EXAMPLE = (ROOT / "docs" / "backend_example.c").read_text()
BROKEN = {
    "version": ((("QUANT_GEMM_VERSION", "99"),), "is for version 99 of the interface, this program for 8"),
    "nothing": ((("quant_gemm_backend(void)", "other(void)"),), "has no function quant_gemm_backend"),
    "memory": (
        (("*context = calloc(1, sizeof(Loaded));", '*context = NULL; return fail(QUANT_GEMM_NO_MEMORY, "no room");'),),
        "back end example, open: no room (code 2)",
    ),
    "function": (
        (
            (".multiply = multiply,", ""),
            ("static int32_t multiply(", "__attribute__((unused)) static int32_t multiply("),
        ),
        "lacks a name, or a function other than quantize",
    ),
    "name": ((('.name = "example",', ""),), "lacks a name, or a function other than quantize"),
    "no text": (
        (
            ("*context = calloc(1, sizeof(Loaded));", "*context = NULL; return QUANT_GEMM_FAILED;"),
            ("return latest_error;", "return NULL;"),
        ),
        "back end example, open: it says nothing (code 4)",
    ),
    "format": ((), "back end example, matrix: a matrix is not of 8 bits with a scale per row (code 3)"),
}


@pytest.fixture
def folder(tmp_path):
    """A folder with the back ends for CPUs."""
    for backend in CPU_BACKENDS:
        (tmp_path / f"quant_gemm_{backend}.so").symlink_to(HERE / "backends" / f"quant_gemm_{backend}.so")
    return tmp_path


def compile_example(folder, changes=()):
    """The example of docs/backends.md, with some words changed. It is the best one in the folder."""
    text = EXAMPLE
    for old, new in ((" return 1; ", " return 1000; "), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "example.c").write_text(text)
    library = folder / "quant_gemm_example.so"
    warnings = ("-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror")
    command = ["gcc", *warnings, "-O2", "-fPIC", "-shared", "-I", ROOT, folder / "example.c", "-o", library, "-lm"]
    subprocess.run([*map(str, command)], check=True)


def test_the_example_runs(folder):
    compile_example(folder)
    assert kernel(folder=folder) == "back end example"
    for model in ("tiny-llama.gptq-w8", "tiny-qwen3.gptq-w8"):
        done = assert_golden(12, model, folder=folder)
        assert re.search(r"^run +back end example,", done.stderr, re.M)


@pytest.mark.parametrize("what", BROKEN)
def test_one_that_fails_is_left_out_with_a_line_and_an_error_by_name(folder, what):
    changes, why = BROKEN[what]
    compile_example(folder, changes)
    done = assert_golden(4, LADDER, folder=folder)
    lines = [line for line in done.stderr.splitlines() if line.startswith("runq_gptq: ")]
    assert len(lines) == 1
    assert why in lines[0]
    assert re.search(r"^run +back end (?!example)", done.stderr, re.M)
    done = run("--ids", 1, "-n", 1, "--backend", "example", folder=folder)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert why in done.stderr


def test_a_file_that_is_no_library(folder):
    (folder / "quant_gemm_text.so").write_text("not a library")
    done = assert_golden(4, LADDER, folder=folder)
    assert [line for line in done.stderr.splitlines() if "quant_gemm_text.so: " in line and "left out" in line]
    done = run("--ids", 1, "-n", 1, "--backend", "text", folder=folder)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_would_never_open(folder):
    """A FIFO is no back end, and nobody waits for what might be written into it."""
    os.mkfifo(folder / "quant_gemm_fifo.so")
    assert_golden(4, LADDER, folder=folder)
    done = run("--ids", 1, "--backend", "fifo", folder=folder)
    assert done.returncode == 2
    assert "'fifo' is not one of" in done.stderr


def test_a_name_of_none(folder):
    done = run("--ids", 1, "--backend", "nothing", folder=folder)
    assert done.returncode == 2
    names = ", ".join(sorted(CPU_BACKENDS))
    expected = f"runq_gptq: --backend: 'nothing' is not one of auto, builtin, {names} (those in {folder})\n"
    assert done.stderr == expected


def test_help_says_that_other_names_are_taken():
    text = run("--help").stdout
    assert "      --backend " in text
    assert "auto (default), builtin, or a NAME\n" in text


def test_without_back_ends_the_programs_own_kernels_run(tmp_path):
    assert not kernel(folder=tmp_path).startswith("back end")
    assert_golden(12, LADDER, folder=tmp_path)


# ----------------------------------------------------------------------------
# The files themselves


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_library_shows_one_function(backend):
    library = HERE / "backends" / f"quant_gemm_{backend}.so"

    def lines(*command):
        return subprocess.run([*map(str, command)], capture_output=True, check=True, text=True).stdout.splitlines()

    assert [line.split()[-1] for line in lines("nm", "-D", "--defined-only", library)] == ["quant_gemm_backend"]

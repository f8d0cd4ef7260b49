"""What `make gpu-check` runs on a GPU, as far as a machine without one can show: its files, readers and report."""

import json
import os
import re
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench import gpu_check
from bench.gpu_check import SHAPES, Bench, Context, Done, Result
from bench.predict import CARDS, read_counts, tokens_per_s
from bench.run import work_of
from formats.model_file import read_header
from formats.schemes import AWQ_FILE
from formats.tensors import awq_tensors, weights_end
from golden.awq import AWQ

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(os.environ.get("RUNQ_AWQ", ROOT / "runq_awq"))
needs_program = pytest.mark.skipif(not PROGRAM.exists(), reason="needs runq_awq: make runq_awq")
SMALL = {
    "Qwen3-8B": {"dim": 256, "hidden_dim": 384, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 128},
    "Llama-3.2-1B": {"dim": 128, "hidden_dim": 256, "n_layers": 3, "n_heads": 4, "n_kv_heads": 1, "head_dim": 64},
}


def small(name):
    """A real model's shape with every size made small."""
    return replace(SHAPES[name], **SMALL[name], vocab_size=320, max_seq_len=64)


def runq_awq(*args):
    return subprocess.run([str(a) for a in (PROGRAM, *args)], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def context(tmp_path):
    return Context(time.monotonic() + 60, tmp_path)


# ---- model files


@needs_program
@pytest.mark.parametrize("name", SHAPES)
def test_random_files_load_and_run(tmp_path, name):
    shape, path = small(name), tmp_path / "model.bin"
    gpu_check.write_random_model(path, shape)
    done = runq_awq(path, "--info")
    assert done.returncode == 0, done.stderr
    info = dict(re.findall(r"^(\w+) +(.*)$", done.stdout, re.M))
    for field in ("arch", "dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size",
                  "max_seq_len", "group_size"):  # fmt: skip
        assert info[field] == str(getattr(shape, field, 128))  # the last is of groups
    assert info["file_bytes"] == str(path.stat().st_size)
    assert info["kv_cache_bytes"] == str(gpu_check.kv_cache_bytes(shape))
    assert info["shared_classifier"] == ("yes" if shape.tied else "no")
    assert info["rope_scaling"].startswith("llama3, factor 32," if shape.arch == "llama" else "none")
    assert (info["norm_eps"], info["rope_theta"]) == (
        ("1e-05", "500000") if shape.arch == "llama" else ("1e-06", "1000000")
    )

    done = runq_awq(path, "--ids", "1,2", "-n", 2, "-t", 0, "--trace", tmp_path / "trace", "--print-ids")
    assert done.returncode == 0, done.stderr
    logits = gpu_check.read_safetensors(tmp_path / "trace")["logits"]
    assert logits.shape == (3, shape.vocab_size)  # the last new token is not run
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10
    assert not np.array_equal(logits[0], logits[1])


@needs_program
def test_bench_output_is_read(tmp_path):
    gpu_check.write_random_model(tmp_path / "model.bin", small("Llama-3.2-1B"))
    done = runq_awq(tmp_path / "model.bin", "--bench", "5,3")
    assert done.returncode == 0, done.stderr
    bench = gpu_check.parse_bench(done.stdout, done.stderr)
    assert bench.prefill > 0
    assert bench.decode > 0
    assert bench.gb_per_s is not None
    assert bench.device_bytes > 0
    assert bench.percent is None  # the emulator's memory is not a device's


@pytest.mark.parametrize("name", SHAPES)
def test_files_are_what_an_export_writes(tmp_path, name):
    """As long as its tensors, and with a header that the reference reads, as another program's for Qwen3."""
    config, path = small(name), tmp_path / "model.bin"
    gpu_check.write_random_model(path, config)
    assert path.stat().st_size == weights_end(awq_tensors(config, 128))
    read = read_header(path, AWQ_FILE)
    assert replace(read.config, norm_eps=config.norm_eps) == config
    assert read.config.norm_eps == pytest.approx(config.norm_eps)
    assert (read.group_size, read.weights_end) == (128, path.stat().st_size)
    assert AWQ(path).config == read.config


def test_shapes_are_the_published_ones():
    llama, c = work_of(SHAPES["Llama-3.2-1B"], "awq"), SHAPES["Llama-3.2-1B"]
    assert (c.arch, c.dim, c.hidden_dim, c.n_layers, c.head_dim, c.tied) == ("llama", 2048, 8192, 16, 64, True)
    assert llama.layer_macs == 16 * (2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192)
    qwen = work_of(SHAPES["Qwen3-8B"], "awq")
    assert qwen.layer_macs == 36 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12288)
    # Eight billion parameters with both tables; a decode step reads the layers and one table in fp16.
    assert qwen.layer_macs + 2 * 151936 * 4096 == pytest.approx(8.19e9, rel=1e-3)
    assert qwen.layer_bytes + 2 * 151936 * 4096 == pytest.approx(4.86e9, rel=0.02)


def test_limit_of_a_prompt():
    work, limits = work_of(SHAPES["Llama-3.2-1B"], "awq"), {"copy_gb_per_s": 4000.0, "cublas_tflops": 700.0}
    assert gpu_check.prefill_limit(work, 1, limits) == pytest.approx(4e12 / work.layer_bytes)
    assert gpu_check.prefill_limit(work, 4096, limits) == pytest.approx(700e12 / (2 * work.layer_macs))


# ---- readers


def test_safetensors_reader(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5), np.float32),
        "b": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "c": np.arange(7, dtype=np.int32),
        "d": np.zeros((0, 4), np.int8),
    }
    save_file(tensors, tmp_path / "t", metadata={"format": "pt"})
    for path in (tmp_path / "t", ROOT / "golden" / "data" / "tiny-qwen3.awq.trace.safetensors"):
        expected, found = load_file(path), gpu_check.read_safetensors(path)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert (value.dtype, value.shape) == (found[name].dtype, found[name].shape)
            assert np.array_equal(value, found[name])


def test_traces_are_compared():
    golden = {"logits": np.array([1.0, -4.0]), "embed": np.array([[1.0, 2.0]], np.float16)}
    assert gpu_check.compare_traces(golden, golden | {"more": np.zeros(1)})[::2] == (0, 0)
    found = golden | {"logits": np.array([1.02, -4.0])}
    assert gpu_check.compare_traces(golden, found) == (pytest.approx(0.005), "logits", pytest.approx(0.005))
    found = golden | {"embed": np.array([[1.0, 1.0]], np.float16)}
    assert gpu_check.compare_traces(golden, found) == (0, "embed", 0.5)
    for bad in (np.array([np.nan, -4.0]), np.array([1.0])):
        assert gpu_check.compare_traces(golden, golden | {"logits": bad})[0] == float("inf")
    assert gpu_check.compare_traces(golden, {"embed": golden["embed"]}) == (
        float("inf"),
        "logits is missing",
        float("inf"),
    )


def test_ids():
    assert gpu_check.ids_of("12,3,45\n") == [12, 3, 45]
    assert gpu_check.ids_of("\n") == []
    assert gpu_check.determined([0.5, 0.02, 0.019, 0.9]) == 2
    assert gpu_check.determined([0.5]) == 1
    assert [gpu_check.n_equal([1, 2, 3], other) for other in ([1, 2, 3, 4], [1, 5, 3], [], [2])] == [3, 1, 0, 0]


def doctest_output(passed, failed):
    return f"[doctest] test cases:  {passed + failed} | {passed} passed | {failed} failed | 0 skipped\n"


def test_doctest_counts():
    count = gpu_check.case_counts
    assert count(Done(0, doctest_output(7, 0), "", 1)) == (7, 0)
    assert count(Done(1, doctest_output(5, 2), "", 1)) == (5, 2)
    assert count(Done(-11, doctest_output(5, 0), "", 1)) == (5, 1)
    assert count(Done(0, doctest_output(0, 0), "", 1)) == (0, 1)
    assert count(Done(127, "", "no such file", 0)) == (0, 1)


def test_sanitizer_summaries():
    memcheck, racecheck = "========= ERROR SUMMARY: {} errors\n", "========= RACECHECK SUMMARY: {} hazards displayed\n"
    found = gpu_check.sanitizer_findings
    passed = doctest_output(3, 0)
    assert found("memcheck", Done(0, passed + memcheck.format(0), "", 1)) is None
    assert found("racecheck", Done(0, passed + racecheck.format(0) + "(0 errors, 0 warnings)", "", 1)) is None
    assert found("memcheck", Done(9, passed + memcheck.format(2), "", 1)) == "2 found"
    assert found("racecheck", Done(9, passed + racecheck.format(1), "", 1)) == "1 found"
    assert "time" in found("racecheck", Done(124, "", "", 90))
    assert found("memcheck", Done(1, "", "", 0)) == "exit code 1, no summary"
    for done in (Done(127, "", "compute-sanitizer: No such file", 0), Done(9, "Error: Device not supported", "", 1)):
        assert "cannot be used" in found("memcheck", done)
    assert "there were none" in found("memcheck", Done(0, doctest_output(0, 0) + memcheck.format(0), "", 1))


def test_bench_of_a_device():
    out = """prefill 16 tokens: 9000.50 tokens/s, 62000.00 GMAC/s, at most 512 tokens at a time
decode 256 tokens: 575.25 tokens/s, 2795.00 GB/s, 65% of the 4300.00 GB/s that the device can copy
memory 1.234 GB at its peak
"""
    bench = gpu_check.parse_bench(out, "run       NVIDIA, context 4096, peak memory 7.1 GB, of the device 6.75 GB\n")
    assert bench == Bench(9000.5, 575.25, 2795.0, 65, 6.75e9)
    assert gpu_check.parse_bench("", "of the device 12.5 MB") == Bench(device_bytes=12.5e6)


# ---- running, and the report


def test_commands_end_in_time():
    done = gpu_check.run([sys.executable, "-c", "print('out'); import sys; sys.exit(3)"], 30)
    assert (done.code, done.out) == (3, "out\n")
    assert gpu_check.run(["/no/such/program"], 30).code == 127
    start = time.monotonic()
    done = gpu_check.run(["sh", "-c", "echo begun; sleep 600 & sleep 600"], 5)
    assert (done.code, done.out) == (124, "begun\n")
    assert time.monotonic() - start < 300


def good(_):
    return Result(report=["fine"])


def bad(_):
    return Result(failures=["two and two are five"], report=["numbers"])


def broken(_):
    raise KeyError("absent")


def test_a_failing_step_does_not_stop_the_others_and_fails_the_run(tmp_path, capsys):
    out = tmp_path / "reports" / "report.md"
    options = ["--out", str(out), "--tmp", str(tmp_path / "tmp")]
    assert gpu_check.main(options, {"bad": bad, "broken": broken, "good": good}) == 1
    text = out.read_text()
    assert text.startswith("# GPU check: FAILED: bad, broken, 3 steps in ")
    assert re.findall(r"^\| (\w+) \| (\w+) \| [\d.]+ \|$", text, re.M) == [
        ("bad", "FAILED"),
        ("broken", "FAILED"),
        ("good", "passed"),
    ]
    assert "## bad\n- FAILED: two and two are five\nnumbers\n" in text
    assert "KeyError: 'absent'" in text
    assert "## good\nfine\n" in text
    assert capsys.readouterr().out.splitlines()[-1].startswith("gpu-check: FAILED: bad, broken, 3 steps")

    assert gpu_check.main([*options, "--only", "good"], {"bad": bad, "good": good}) == 0
    assert out.read_text().startswith("# GPU check: passed, 1 step in ")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_report_is_there_before_the_last_step_ends(tmp_path):
    out, seen = tmp_path / "report.md", []
    steps = {"good": good, "slow": lambda _: seen.append(out.read_text()) or Result()}
    assert gpu_check.main(["--out", str(out), "--tmp", str(tmp_path)], steps) == 0
    assert seen[0].startswith("# GPU check: passed, 1 step in ")
    assert "## slow" in out.read_text()


def test_what_there_is_no_time_for_fails(tmp_path):
    out = tmp_path / "report.md"
    assert gpu_check.main(["--out", str(out), "--tmp", str(tmp_path), "--minutes", "0"], {"good": good}) == 1
    assert "no time was left" in out.read_text()


def test_quick_is_tests_only(tmp_path):
    ran = []
    steps = {name: lambda _, name=name: ran.append(name) or Result() for name in gpu_check.STEPS}
    assert gpu_check.main(["--quick", "--out", str(tmp_path / "r"), "--tmp", str(tmp_path)], steps) == 0
    assert ran == ["machine", "build", "tests", "models", "backend"]


def fake(folder, name, text):
    """A program that answers as it is told."""
    path = folder / name
    # A script of the shell, as the path of Python may have a space; for Python its second line is a string.
    shell = f"""#!/bin/sh\n'''exec' "{sys.executable}" "$0" "$@"\n' '''\n"""
    path.write_text(f"{shell}import sys\nargs = sys.argv[1:]\n{text}", encoding="utf-8")
    path.chmod(0o755)


GOLDEN_PROGRAM = """
import json, pathlib, shutil
if args == ["--help"]:
    print("      --matmul    how:\\n                  fused (default), dequant, predequant, fp16, plain\\n")
    sys.exit()
if "--bench" in args:
    print("prefill 512 tokens: 900.5 tokens/s\\ndecode 32 tokens: 90.5 tokens/s, 1.0 GB/s")
    sys.exit()
name = pathlib.Path(args[0]).stem
matmul = args[args.index("--matmul" if "--matmul" in args else "--backend") + 1]
data = pathlib.Path("golden/data")
if "--trace" in args:
    shutil.copyfile(data / f"{name}.trace.safetensors", args[args.index("--trace") + 1])
ids = [int(i) for i in args[args.index("--ids") + 1].split(",")]
for g in json.loads((data / f"{name}.json").read_text())["generations"]:
    if g["prompt_ids"] == ids:
        g["new_ids"][0] += matmul == "WRONG"
        print(",".join(map(str, g["new_ids"])))
"""


SANITIZER = """
import subprocess
subprocess.run(args[6:])
print("RACECHECK SUMMARY: 0 hazards displayed" if args[1] == "racecheck" else "ERROR SUMMARY: 0 errors")
"""
WRONG_IDS = GOLDEN_PROGRAM.replace("WRONG", "dequant")
WRONG_BACKEND = GOLDEN_PROGRAM.replace("WRONG", "cuda")
WRONG_TRACE = GOLDEN_PROGRAM.replace("{name}.trace", "tiny-llama.awq.trace")


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A folder of programs instead of build/gpu, and of the CUDA toolkit's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(gpu_check, "BUILD", folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    fake(folder, "nvidia-smi", "print('NVIDIA H200, 580.1, 143771 MiB, 9.0')")
    fake(folder, "nvcc", "print('Cuda compilation tools, release 13.0, V13.0.48')")
    for name in gpu_check.TESTS:
        fake(folder, name, f"print({doctest_output(4, 0)!r})")
    fake(folder, "compute-sanitizer", SANITIZER)
    fake(folder, "runq_awq", GOLDEN_PROGRAM)
    fake(folder, "runq_gptq", GOLDEN_PROGRAM)
    monkeypatch.setattr(gpu_check, "BACKEND_SHAPE", small("Qwen3-8B"))
    return folder


def test_steps_with_programs_that_work(context, fakes):
    assert "NVIDIA H200" in "\n".join(gpu_check.machine(context).report)
    assert context.card == CARDS["h200"]
    for step in (gpu_check.tests, gpu_check.models, gpu_check.backend, gpu_check.sanitizer):
        result = step(context)
        assert result.failures == []
    result = gpu_check.models(context)
    for matmul in ("fused", "dequant", "predequant", "fp16", "plain"):
        assert sum(f"| {matmul} |" in line for line in result.report) == 4
    assert not any("cuBLAS" in line for line in result.report)


def test_models_without_cublas(context, fakes):
    fake(fakes, "runq_awq", GOLDEN_PROGRAM.replace(", dequant, predequant, fp16", ""))
    result = gpu_check.models(context)
    assert result.failures == []
    assert result.report[0] == "The program was built without cuBLAS."
    assert sum("| plain |" in line for line in result.report) == 4
    assert not any("dequant" in line for line in result.report)


@needs_program
def test_values_of_matmul_are_read(context):
    assert gpu_check.matmuls(PROGRAM, context) == ["fused", "plain"]


def test_tests_find_carried_models(context, fakes, monkeypatch, tmp_path):
    carried = tmp_path / "carried" / "models"
    carried.mkdir(parents=True)
    (carried / "tiny-llama.awq.bin").write_bytes(b"model")
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(gpu_check, "CARRIED", carried.parent)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path / "root")
    assert gpu_check.tests(context).failures == []
    assert (tmp_path / "root" / "build" / "models" / "tiny-llama.awq.bin").read_bytes() == b"model"


@pytest.mark.parametrize(
    ("step", "name", "text", "failure"),
    [
        ("machine", "nvidia-smi", "sys.exit(9)", "nvidia-smi shows no device"),
        ("tests", "runq_awq_test", f"print({doctest_output(3, 1)!r}); sys.exit(1)", "runq_awq_test: 1 failed"),
        ("tests", "awq_kernels_test", "sys.exit('CUDA error')", "awq_kernels_test: 1 failed"),
        ("models", "runq_awq", "sys.exit('no CUDA device: 0 found')", "tiny-llama.awq --matmul fused: exit code 1"),
        ("models", "runq_awq", WRONG_IDS, "--matmul dequant: id 1 after 'Once' differs"),
        ("models", "runq_awq", WRONG_TRACE, "tiny-qwen3.awq --matmul"),
        ("backend", "runq_gptq", WRONG_BACKEND, "tiny-llama.gptq-w8 --backend cuda: id 1 after 'Once'"),
        ("backend", "runq_gptq", "sys.exit('no device')", "--bench 512,32 --backend cuda: exit code 1"),
        ("sanitizer", "compute-sanitizer", "print('ERROR SUMMARY: 3 errors')", "awq_kernels_test: 3 found"),
        ("ladder", "awq_kernels", "print('WRONG: awq_gemv, one'); sys.exit(1)", "1 wrong, first: awq_gemv, one"),
    ],
)  # fmt: skip
def test_steps_with_programs_that_do_not(context, fakes, step, name, text, failure):
    fake(fakes, name, text)
    result = gpu_check.STEPS[step](context)
    assert any(failure in f for f in result.failures), result.failures


def test_what_the_back_end_makes_is_reported(context, fakes):
    text = "\n".join(gpu_check.backend(context).report)
    assert len(re.findall(r"^\| tiny-(?:llama|qwen3)\.gptq-(?:ladder|w8) \| \d+ \(\d+\), ", text, re.M)) == 4
    assert "| cuda | 900.5 | 90.5 |" in text
    assert "900.5" not in "\n".join(gpu_check.backend(replace(context, quick=True)).report)


def test_what_was_not_built_is_said_and_the_rest_runs(context, fakes):
    """As on a first run where one program does not compile."""
    assert gpu_check.build(context).failures == [
        f"{name} was not built" for name in ("awq_kernels", "backends/quant_gemm_cuda.so")
    ]
    (fakes / "runq_gptq").unlink()
    (fakes / "build.log").write_text(
        "cli.cpp(3): error: expected a ;\nmake[1]: *** [mk/backends.mk:112: build/gpu/runq_gptq] Error 2\n"
    )
    result = gpu_check.build(context)
    assert "runq_gptq was not built" in result.failures
    assert "[mk/backends.mk:112: build/gpu/runq_gptq] Error 2" in result.failures
    assert "expected a ;" in "\n".join(result.report)
    finished = gpu_check.run_steps(["build", "backend", "models"], context, gpu_check.STEPS)
    assert [bool(f.result.failures) for f in finished] == [True, True, False]


def test_each_program_is_made_of_its_own_sources():
    """And of no header, however many of these a rule depends on; no library that a bare machine lacks is asked for."""
    names = [f"build/gpu/{name}" for name in gpu_check.PROGRAMS]
    done = subprocess.run(
        ["make", "-nB", "CUDA_ARCH=sm_80", "NVCC=nvcc", *names], cwd=ROOT, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if re.search(r" -o build/gpu/\S", line)]
    assert len(lines) == len(names), done.stderr
    for line in lines:
        (target,) = re.findall(r"-o build/gpu/(\S+)", line)
        sources = set(re.findall(r"\S+\.(?:cu|cpp)\b", line))
        assert not re.search(r"\S\.c?uh?\b(?<!\.cu)|\.h\b|flags\b|LINE_EDITOR|-ledit", line), line
        own = {"backends/quant_gemm_cuda.so": "engine/backend/gpu.cu"}.get(target, target.split("/")[-1])
        assert [s for s in sources if own.removesuffix("_test") in s], line
        assert sum(s.endswith(".cu") for s in sources) <= 1, line


def test_a_program_that_does_not_compile_keeps_none_from_running():
    done = subprocess.run(["make", "-n", "gpu-check"], cwd=ROOT, capture_output=True, text=True, check=True)
    (compiles,) = re.findall(r"^make .* -k .*\| tee build/gpu/build\.log$", done.stdout, re.M)
    assert all(f"build/gpu/{name}" in compiles for name in gpu_check.PROGRAMS)
    assert "-m bench.gpu_check" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3, 580.1, 81559 MiB, 9.0", "h100"),
        ("NVIDIA H200, 580.1, 143771 MiB, 9.0", "h200"),
        ("NVIDIA A100-SXM4-80GB, 580.1, 81920 MiB, 8.0", "a100"),
        ("NVIDIA GeForce RTX 4090, 580.1, 24564 MiB, 8.9", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU, 580.1, 16376 MiB, 8.9", None),
        ("NVIDIA H200 NVL, 580.1, 143771 MiB, 9.0", None),
        ("NVIDIA H100 PCIe, 580.1, 81559 MiB, 9.0", None),
        ("", None),
    ],
)
def test_the_card_of_a_device(device, card):
    assert gpu_check.card_of(device) == (CARDS[card] if card else None)


def test_predictions_stand_beside_measurements():
    prefill, decode = {512: Bench(prefill=20000.0), 2048: Bench()}, {1024: Bench(decode=250.0)}
    config = SHAPES["Qwen3-8B"]
    text = "\n".join(gpu_check.prediction_tables(CARDS["h100"], config, prefill, decode))
    expected = tokens_per_s(CARDS["h100"], read_counts(), config, "decode", 1056)
    assert f"| decode 1024 | {expected:.0f} | 250.0 | {250 / expected:.2f} |" in text
    assert re.search(r"^\| prefill 512 \| \d+ \| 20000\.0 \| \d\.\d\d \|$", text, re.M)
    assert re.search(r"^\| prefill 2048 \| \d+ \| - \| - \|$", text, re.M)
    text = "\n".join(gpu_check.prediction_tables(None, config, prefill, decode))
    assert "| decode 1024 | - | 250.0 | - |" in text and "does not know this device" in text


def test_ladder_gives_the_limits(context, fakes):
    limits = {"copy_gb_per_s": 4300.0, "cublas_tflops": 700.0}
    write = f"open(args[args.index('--json') + 1], 'w').write({json.dumps(limits)!r})\nprint('| tokens |')"
    fake(fakes, "awq_kernels", write)
    result = gpu_check.ladder(context)
    assert (result.failures, context.limits) == ([], limits)
    assert "| tokens |" in result.report


@needs_program
def test_speed_from_end_to_end(context, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "runq_awq").symlink_to(PROGRAM.resolve())
    monkeypatch.setattr(gpu_check, "BUILD", tmp_path / "bin")
    monkeypatch.setattr(gpu_check, "SHAPES", {"small": small("Llama-3.2-1B")})
    monkeypatch.setattr(gpu_check, "PROMPTS", (4, 8))
    monkeypatch.setattr(gpu_check, "N_DECODE", 3)
    monkeypatch.setattr(gpu_check, "KEYS", (1, 20))
    monkeypatch.setattr(gpu_check, "N_AT_KEYS", 3)
    monkeypatch.setattr(gpu_check, "SPEED_MATMULS", ("fused",))
    context.limits = {"copy_gb_per_s": 1.0, "cublas_tflops": 0.001}
    result = gpu_check.speed(context)
    assert result.failures == []
    text = "\n".join(result.report)
    assert re.search(r"^\| 4 \| [\d.]+ \| - \| - \| \d+% \|$", text, re.M)
    assert re.search(r"^\| fused \| [\d.]+ \| [\d.]+ \| - \|$", text, re.M)
    assert "Device memory, fused" in text
    assert re.search(r"^\| decode 20 \| - \| [\d.]+ \| - \|$", text, re.M)
    assert not list(context.tmp.glob("*.bin"))


def test_speed_tables():
    config, limits = SHAPES["Qwen3-8B"], {"copy_gb_per_s": 4000.0, "cublas_tflops": 700.0}
    sizes = {"file_bytes": 6_100_000_000, "kv_cache_bytes": gpu_check.kv_cache_bytes(config)}
    runs = {("fused", n): Bench(prefill=1000.0 * n, device_bytes=7e9) for n in gpu_check.PROMPTS}
    runs |= {("fp16", n): Bench(prefill=500.0 * n) for n in gpu_check.PROMPTS[:3]}
    runs["fused", 16] = Bench(16000.0, 600.0, 2900.0, 67, 7.1e9)
    runs["fp16", 16] = Bench(8000.0, 200.0, 3000.0, 70, 20e9)
    text = "\n".join(gpu_check.speed_tables(work_of(config, "awq"), runs, sizes, limits))
    assert "| 16 | 16000.0 | 8000.0 | 2.00 |" in text
    assert "| 4096 | 4096000.0 | - | - |" in text
    assert "| fused | 600.0 | 2900.0 | 67% |" in text
    assert "Decode, fused over fp16: 3.00." in text
    assert "leaves 296 MB" in text


def test_nothing_but_numpy_is_needed(tmp_path):
    """A file is made and a trace read where there is no package but numpy; of golden/ the arithmetic alone is read."""
    code = f"""
import sys
known = {{"bench", "formats", "golden", "models", "numpy", "tests"}}
class OnlyNumpy:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in known | sys.stdlib_module_names:
            raise ImportError(f"{{name}} is not there")
for name in [n for n in sys.modules if n.split(".")[0] not in sys.stdlib_module_names]:
    sys.modules.pop(name)  # what site-packages brought in
sys.meta_path.insert(0, OnlyNumpy())
from dataclasses import replace
from pathlib import Path
from bench import gpu_check
config = replace(gpu_check.SHAPES["Qwen3-8B"], **{SMALL["Qwen3-8B"]}, vocab_size=320)
gpu_check.write_random_model(Path({str(tmp_path / "m")!r}), config)
trace = gpu_check.read_safetensors(gpu_check.DATA / "tiny-llama.awq.trace.safetensors")
print(len(trace["tokens"]))
print(*sorted({{name.split(".")[0] for name in sys.modules}} & {{p.name for p in Path().iterdir()}}))
print(*(name for name in sys.modules if name.startswith("golden.")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["6", "bench", "formats", "golden", "models", "tests", "golden.fp32"]
    assert AWQ(tmp_path / "m").config.vocab_size == 320


def test_header_without_extension_is_zero_there(tmp_path):
    gpu_check.write_random_model(tmp_path / "m", small("Qwen3-8B"))
    head = (tmp_path / "m").read_bytes()[:256]
    assert head[0x2D:] == bytes(256 - 0x2D)
    assert struct.unpack_from("<ii", head, 0x25) == (128, 128)

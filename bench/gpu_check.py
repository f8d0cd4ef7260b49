"""Everything that only a GPU can show, in one run and one report; `make gpu-check` builds what it needs and runs it.

    python3 -m bench.gpu_check [--quick] [--only STEP ...] [--tune] [--out REPORT.md] [--tmp FOLDER] [--minutes N]

    machine     what it ran on
    build       whether all that this takes was compiled
    tests       the C++ tests, compiled by nvcc
    models      runq_awq on the tiny models: greedy ids and traces against the golden vectors, every --matmul
    backend     runq_gptq --backend cuda on the tiny models: greedy ids; and its speed
    sanitizer   compute-sanitizer's memcheck, initcheck, synccheck and racecheck over the tests of kernels
    ladder      build/gpu/awq_kernels: every kernel checked on real shapes, and timed
    speed       runq_awq --bench on files of Qwen3-8B's and Llama-3.2-1B's shape with random weights, made on the spot:
                prompts, decode at short and long contexts, and what bench/predict.py expected of them

A step that fails does not keep the next from running; the exit code is 0 if none failed. --quick runs the first five,
and of the back end no speed.

It runs on a machine that has the CUDA toolkit and Python with numpy and nothing else, so it imports only what needs no
other package: models/by_rule.py, golden/fp32.py, formats/ and tests/run.py. Model files for `models` are taken from
build/models, or from build/gpu-files, where `make gpu-files` puts what a bare machine lacks.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.predict import CARDS, Card, read_counts, tokens_per_s
from bench.random_checkpoint import config_of
from bench.run import Work, work_of
from formats.checkpoint import Config
from formats.model_file import EXTENSION_OFFSET
from formats.safetensors import read as read_safetensors
from formats.tensors import HEADER_SIZE
from models.by_rule import write_model
from tests.run import doctest_counts

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
CARRIED = ROOT / "build" / "gpu-files"
DATA = ROOT / "golden" / "data"

# ----------------------------------------------------------------------------
# Running things


@dataclass(frozen=True)
class Done:
    """How a command ended. code 124: it ran out of time; 127: there is no such program."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def tail(self) -> str:
        """The end of what it said."""
        text = "\n".join(part for part in (self.out.strip(), self.err.strip()) if part)
        return "\n".join(text.splitlines()[-40:])


def run(command: list[object], timeout: float) -> Done:
    """Runs a command in the repository's root; with all that it started, it is gone when this returns."""
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Done(127, "", f"{command[0]}: {error.strerror}", 0.0)
    try:
        out, err = process.communicate(timeout=max(0.1, timeout))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nkilled after {timeout:.0f} s".encode()
        code = 124
    return Done(code, out.decode(errors="replace"), err.decode(errors="replace"), time.monotonic() - start)


def run_all(commands: list[list[object]], timeout: float, at_once: int) -> list[Done]:
    """Runs several commands, a few at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda command: run(command, timeout), commands))


@dataclass
class Result:
    """What a step found."""

    failures: list[str] = field(default_factory=list)  # empty: it passed
    report: list[str] = field(default_factory=list)  # Markdown
    n_details: int = 0

    def details(self, title: str, text: str) -> None:
        """Appends output that is only read when something is wrong. The first few of many say it all."""
        self.n_details += 1
        if self.n_details > 5:
            return
        self.report += ["", f"{title}:", "", "```text", text.replace("```", "'''"), "```"]


@dataclass
class Context:
    """What the steps share."""

    deadline: float  # on time.monotonic()'s clock
    tmp: Path
    tune: bool = False
    quick: bool = False
    card: Card | None = None  # what bench/predict.py knows of the device, once the machine was looked at
    limits: dict | None = None  # copy_gb_per_s and cublas_tflops, once the ladder has measured them

    def time_for(self, seconds: float) -> float:
        """That many seconds, or what is left."""
        return max(1.0, min(seconds, self.deadline - time.monotonic()))


def tool(name: str) -> str:
    """A program of the CUDA toolkit: on the PATH, beside nvcc, or where the toolkit is by default."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which(os.environ.get("NVCC", "nvcc"))
    if nvcc:
        folders.append(str(Path(nvcc).resolve().parent))
    return shutil.which(name, path=os.pathsep.join(folders)) or name


def matmuls(program: Path, context: Context) -> list[str]:
    """The values that --matmul takes, which depend on whether the program was built with cuBLAS."""
    text = run([program, "--help"], context.time_for(10)).out
    found = re.search(r"--matmul .*\n +(.*)", text)
    return re.findall(r"[\w-]+", found[1].replace("(default)", "")) if found else ["fused"]


def table(heads: list[str], rows: list[list[object]]) -> list[str]:
    """Markdown; all columns but the first to the right."""
    lines = [" | ".join(heads), " | ".join(["---"] + ["---:"] * (len(heads) - 1))]
    lines += [" | ".join(str(cell) for cell in row) for row in rows]
    return ["", *(f"| {line} |" for line in lines), ""]


# ----------------------------------------------------------------------------
# machine and build


def card_of(device: str) -> Card | None:
    """The data sheet of a device that nvidia-smi names so; None: bench/predict.py has none."""
    names = {"H100 80GB HBM3": "h100", "H200": "h200", "A100-SXM4-80GB": "a100", "GeForce RTX 4090": "4090"}
    return next(
        (CARDS[card] for name, card in names.items() if re.search(rf"{name}(?! *(NVL|D|Laptop))\b", device)), None
    )


def machine(context: Context) -> Result:
    """Device, driver, compiler, date and commit."""
    result = Result()
    query = "name,driver_version,memory.total,compute_cap"
    gpu = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], context.time_for(30))
    context.card = card_of(gpu.out)
    if gpu.code != 0:
        result.failures.append("nvidia-smi shows no device")
        result.details("nvidia-smi", gpu.tail)
    nvcc = run([tool("nvcc"), "--version"], context.time_for(30))
    release = re.search(r"release .*", nvcc.out)
    commit = run(["git", "log", "-1", "--format=%h %cs"], context.time_for(10))
    changed = run(["git", "status", "--porcelain"], context.time_for(10))
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    at = "unknown"
    if commit.code == 0:
        at = commit.out.strip() + (", with changes" if changed.out.strip() else "")
    facts = {
        "device": " / ".join(gpu.out.strip().splitlines()) or "none",
        "nvcc": release[0] if release else "none",
        "processor": f"{cpu[1] if cpu else 'unknown'}, {os.cpu_count()} threads",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),  # noqa: UP017  (Python 3.10 has no datetime.UTC)
        "commit": at,
        "command": " ".join(["python3 -m bench.gpu_check", *sys.argv[1:]]),
    }
    result.report += table(["", ""], [[name, value] for name, value in facts.items()])
    return result


TESTS = ("runq_awq_test", "awq_kernels_test", "backend_gpu_test")
PROGRAMS = (*TESTS, "runq_awq", "runq_gptq", "awq_kernels", "backends/quant_gemm_cuda.so")


def build(context: Context) -> Result:
    """What `make gpu-check` compiled before, and wrote into build.log. The other steps run with what there is."""
    log = BUILD / "build.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    result = Result([f"{name} was not built" for name in PROGRAMS if not (BUILD / name).exists()])
    result.failures += re.findall(r"^make.*\*\*\* (\[.*)", text, re.M)
    errors = [line for line in text.splitlines() if re.search(r"error|warning|undefined reference", line)]
    if errors:
        result.details("what the compilers said", "\n".join(errors[:40]))
    return result


# ----------------------------------------------------------------------------
# tests


def case_counts(done: Done) -> tuple[int, int]:
    """Passed and failed test cases; a program that died, or ran no test at all, has one failed."""
    passed, failed, _ = doctest_counts(done.code, done.out)
    return passed, failed if passed + failed else 1


def tests(context: Context) -> Result:
    """The C++ tests on the device."""
    result, rows = Result(), []
    for name in MODELS + BACKEND_MODELS:
        find_model(name)  # the tests look into build/models
    for name in TESTS:
        done = run([BUILD / name, "--no-colors=1"], context.time_for(90))
        passed, failed = case_counts(done)
        rows.append([name, passed, failed, f"{done.seconds:.1f}"])
        if failed:
            result.failures.append(f"{name}: {failed} failed")
            result.details(name, done.tail)
    result.report[:0] = table(["tests", "passed", "failed", "s"], rows)
    return result


# ----------------------------------------------------------------------------
# models

MODELS = tuple(f"tiny-{model}.{scheme}" for model in ("llama", "qwen3") for scheme in ("awq", "awq-g64"))
NEW_TOKENS = 64
CLEAR_LEAD = 2e-2  # two logits may each be off by 1e-2 of the largest: a smaller lead decides nothing
LOGIT_TOLERANCE = 1e-2


def distance(expected: np.ndarray, found: np.ndarray) -> float:
    """Largest difference over the largest absolute value; infinity if shapes differ or anything is not finite."""
    if expected.shape != found.shape or not np.isfinite(found.astype("f8")).all():
        return float("inf")
    difference = np.abs(expected.astype("f8") - found.astype("f8")).max(initial=0)
    return float(difference / max(np.abs(expected.astype("f8")).max(initial=0), 1e-30))


def compare_traces(golden: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> tuple[float, str, float]:
    """Distance of the logits; the step that is farthest off, and how far."""
    missing = [name for name in golden if name not in found]
    if missing:
        return float("inf"), missing[0] + " is missing", float("inf")
    distances = {name: distance(golden[name], found[name]) for name in golden}
    worst = max(distances, key=distances.get)
    return distances["logits"], worst, distances[worst]


def find_model(name: str) -> Path:
    """Where the model's file is; it is copied from what was carried along if it has to be."""
    path, carried = ROOT / "build" / "models" / f"{name}.bin", CARRIED / "models" / f"{name}.bin"
    if not path.exists() and carried.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(carried, path)
    return path


def determined(leads: list[float]) -> int:
    """How many of the ids are sure."""
    return next((i for i, lead in enumerate(leads) if lead < CLEAR_LEAD), len(leads))


def n_equal(a: list[int], b: list[int]) -> int:
    """How many ids both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ids_of(text: str) -> list[int]:
    """Reads "1,2,3"; nothing is an empty list."""
    return [int(part) for part in re.findall(r"-?\d+", text)]


def models(context: Context) -> Result:
    """The whole program on the tiny models."""
    result, program = Result(), BUILD / "runq_awq"
    absent = [path for path in (program, *map(find_model, MODELS)) if not path.exists()]
    if absent:
        return Result([f"{absent[0]} is not there"])
    cases, commands, matmul_values = [], [], matmuls(program, context)
    if "dequant" not in matmul_values:
        result.report.append("The program was built without cuBLAS.")
    for name in MODELS:
        golden = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        trace = read_safetensors(DATA / f"{name}.trace.safetensors")
        for matmul in matmul_values:
            common = [program, find_model(name), "-t", 0, "--print-ids", "--matmul", matmul]
            for generation in golden["generations"]:
                cases.append((name, matmul, generation, None))
                commands.append([*common, "-n", NEW_TOKENS, "--ids", ",".join(map(str, generation["prompt_ids"]))])
            path = context.tmp / f"{name}.{matmul}.safetensors"
            cases.append((name, matmul, trace, path))
            commands.append([*common, "-n", 1, "--ids", ",".join(map(str, trace["tokens"])), "--trace", path])
    rows = {(name, matmul): [name, matmul, [], "-", "-"] for name in MODELS for matmul in matmul_values}
    for (name, matmul, golden, path), done in zip(cases, run_all(commands, context.time_for(60), 4), strict=True):
        row, what = rows[name, matmul], f"{name} --matmul {matmul}"
        if done.code != 0:
            result.failures.append(f"{what}: exit code {done.code}")
            result.details(what, done.tail)
        elif path is None:
            sure, ids = determined(golden["leads"]), ids_of(done.out)
            same = n_equal(ids, golden["new_ids"])
            row[2].append(f"{same} ({sure})")
            if same < sure:
                result.failures.append(f"{what}: id {same + 1} after {golden['prompt']!r} differs")
        else:
            logits, worst, how_far = compare_traces(golden, read_safetensors(path))
            row[3], row[4] = f"{logits:.1e}", f"{worst} {how_far:.1e}"
            if not logits < LOGIT_TOLERANCE:
                result.failures.append(f"{what}: logits are off by {logits:.1e}, {worst} by {how_far:.1e}")
    text = (
        f"Greedy ids that are the golden's (as many have to be: up to the first lead below {CLEAR_LEAD:g}); "
        f"largest difference of a trace's logits (at most {LOGIT_TOLERANCE:g}) and of any step, over the largest value."
    )
    cells = [[row[0], row[1], ", ".join(row[2]), row[3], row[4]] for row in rows.values()]
    result.report += [text, *table(["model", "--matmul", "ids", "logits", "worst step"], cells)]
    return result


# ----------------------------------------------------------------------------
# backend

BACKEND_MODELS = tuple(f"tiny-{model}.gptq-{form}" for model in ("llama", "qwen3") for form in ("ladder", "w8"))
BACKEND_SHAPE, BACKEND_BENCH = config_of("qwen3-0.6b"), "512,32"


def backend(context: Context) -> Result:
    """The back end for CUDA in runq_gptq: ids of tiny models, and speed beside the processor's own kernels."""
    result, program = Result(), BUILD / "runq_gptq"
    if not program.exists():
        return Result([f"{program} is not there"])
    rows = []
    for name in BACKEND_MODELS:
        golden, same = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")), []
        for generation in golden["generations"]:
            ids = ",".join(map(str, generation["prompt_ids"]))
            command = [program, find_model(name), "--backend", "cuda", "-t", 0, "--print-ids", "-n", NEW_TOKENS]
            done = run([*command, "--ids", ids], context.time_for(60))
            sure, n = determined(generation["leads"]), n_equal(ids_of(done.out), generation["new_ids"])
            same.append(f"{n} ({sure})")
            if done.code != 0 or n < sure:
                wrong = f"exit code {done.code}" if done.code else f"id {n + 1} after {generation['prompt']!r} differs"
                result.failures.append(f"{name} --backend cuda: {wrong}")
                result.details(result.failures[-1], done.tail)
        rows.append([name, ", ".join(same)])
    result.report += table(["model", "ids equal (sure)"], rows)
    if context.quick:
        return result
    path, rows = context.tmp / "backend.gptq.bin", []
    write_model(BACKEND_SHAPE, path, "gptq", progress=False)
    for name in ("cuda", "builtin"):
        done = run([program, path, "--bench", BACKEND_BENCH, "--backend", name], context.time_for(90))
        bench = parse_bench(done.out, done.err)
        rows.append([name, cell(bench.prefill), cell(bench.decode)])
        if done.code != 0 or bench.prefill is None:
            result.failures.append(f"--bench {BACKEND_BENCH} --backend {name}: exit code {done.code}")
            result.details(result.failures[-1], done.tail)
    path.unlink()
    result.report += table(["back end, Qwen3-0.6B's shape", "prefill tokens/s", "decode tokens/s"], rows)
    return result


# ----------------------------------------------------------------------------
# sanitizer

TOOLS = dict.fromkeys(("memcheck", "initcheck", "synccheck"), r"ERROR SUMMARY: (\d+) error")
TOOLS["racecheck"] = r"RACECHECK SUMMARY: (\d+) hazard"
# Under these tools a test takes many times as long; those that are about kernels alone are enough.
SANITIZED = ("awq_kernels_test", "runq_awq_test")
SANITIZED_CASES = "--test-case=kernel:*"


def sanitizer_findings(check: str, done: Done) -> str | None:
    """What is wrong, or None."""
    summary = re.search(TOOLS[check], done.out + done.err)
    if done.code == 124:
        return "did not finish in time"
    if done.code == 127 or "Device not supported" in done.out + done.err:
        return "compute-sanitizer is not there, or cannot be used on this machine"
    if summary is None:
        return f"exit code {done.code}, no summary"
    if int(summary[1]) > 0:
        return f"{summary[1]} found"
    _, failed = case_counts(done)
    return f"{failed} tests failed, or there were none" if failed else None


def sanitizer(context: Context) -> Result:
    """compute-sanitizer over the tests of kernels."""
    result, rows = Result(), []
    cases = [(check, name) for name in SANITIZED for check in TOOLS]
    commands = [
        [tool("compute-sanitizer"), "--tool", check, "--print-limit", 10, "--error-exitcode", 9,
         BUILD / name, "--no-colors=1", SANITIZED_CASES]
        for check, name in cases
    ]  # fmt: skip
    for (check, name), done in zip(cases, run_all(commands, context.time_for(100), 4), strict=True):
        found = sanitizer_findings(check, done)
        rows.append([f"{check} {name}", case_counts(done)[0], found or "clean", f"{done.seconds:.1f}"])
        if found:
            result.failures.append(f"{check} {name}: {found}")
            result.details(f"{check} {name}", done.tail)
    result.report[:0] = table(["tool", "tests passed", "found", "s"], rows)
    return result


# ----------------------------------------------------------------------------
# ladder


def ladder(context: Context) -> Result:
    """Every kernel on the real shapes."""
    result, path = Result(), ROOT / "build" / "gpu-ladder.json"
    path.unlink(missing_ok=True)
    options = ["--tune"] if context.tune else []
    done = run([BUILD / "awq_kernels", "--json", path, *options], context.time_for(200 + 100 * context.tune))
    result.report += ["", done.out.strip()]
    if done.code != 0:
        wrong = re.findall(r"^WRONG: (.*)", done.out, re.M)
        result.failures += [f"exit code {done.code}"] if not wrong else [f"{len(wrong)} wrong, first: {wrong[0]}"]
        result.details("awq_kernels", done.err.strip() or done.tail)
    if path.exists():
        context.limits = json.loads(path.read_text(encoding="utf-8"))
    return result


# ----------------------------------------------------------------------------
# speed: model files


SHAPES = {"Qwen3-8B": config_of("qwen3-8b"), "Llama-3.2-1B": config_of("llama-3.2-1b")}


def write_random_model(path: Path, config: Config) -> None:
    """An AWQ file of that shape. Qwen3 goes without our extension block, as other programs write it.

    Llama needs it, as a file without is taken for Qwen3.
    """
    write_model(config, path, "awq", progress=False)
    if config.arch == "qwen3":
        with path.open("r+b") as f:
            f.seek(EXTENSION_OFFSET)
            f.write(bytes(HEADER_SIZE - EXTENSION_OFFSET))


def kv_cache_bytes(config: Config) -> int:
    """Keys and values in fp16, in the context that the program takes by default."""
    return work_of(config, "awq").kv_bytes * min(4096, config.max_seq_len)


# ----------------------------------------------------------------------------
# speed: measuring

PROMPTS = (16, 32, 128, 512, 2048, 4096)
N_DECODE = 256  # after the shortest prompt
KEYS, N_AT_KEYS = (1, 1024, 8192), 64  # decode at long contexts, by --matmul fused alone
SPEED_MATMULS = ("fused", "fp16")


@dataclass(frozen=True)
class Bench:
    """One run of --bench; None where the program did not say."""

    prefill: float | None = None  # tokens/s
    decode: float | None = None
    gb_per_s: float | None = None  # in decode
    percent: int | None = None  # that this is of what the device copies
    device_bytes: float | None = None  # at the peak


def parse_bench(out: str, err: str) -> Bench:
    """What `--bench` printed."""

    def number(pattern: str, text: str) -> float | None:
        found = re.search(pattern, text, re.M)
        return float(found[1]) if found else None

    memory = re.search(r"of the device ([\d.]+) (MB|GB)", err)
    percent = number(r"^decode .* GB/s, (\d+)% of the .* that the device can copy$", out)
    return Bench(
        prefill=number(r"^prefill \d+ tokens: ([\d.]+) tokens/s", out),
        decode=number(r"^decode \d+ tokens: ([\d.]+) tokens/s", out),
        gb_per_s=number(r"^decode .* tokens/s, ([\d.]+) GB/s", out),
        percent=None if percent is None else int(percent),
        device_bytes=float(memory[1]) * (1e6 if memory[2] == "MB" else 1e9) if memory else None,
    )


def prefill_limit(work: Work, n_tokens: int, limits: dict) -> float:
    """Tokens/s if every matrix of the layers were read once at the speed of a copy, or multiplied at cuBLAS's."""
    reading = work.layer_bytes / (limits["copy_gb_per_s"] * 1e9)
    multiplying = 2 * work.layer_macs * n_tokens / (limits["cublas_tflops"] * 1e12) if limits["cublas_tflops"] else 0
    return n_tokens / max(reading, multiplying)


def cell(value: float | None, pattern: str = "{:.1f}") -> str:
    """A number, or a dash."""
    return "-" if value is None else pattern.format(value)


def speed_tables(
    work: Work, runs: dict[tuple[str, int], Bench], sizes: dict[str, int], limits: dict | None
) -> list[str]:
    """Prefill, decode and memory. runs: by --matmul and prompt; sizes: of the file and of the KV cache, in bytes."""
    rows = []
    for n in PROMPTS:
        fused, fp16 = (runs.get((matmul, n), Bench()).prefill for matmul in ("fused", "fp16"))
        ratio = fused / fp16 if fused and fp16 else None
        percent = 100 * fused / prefill_limit(work, n, limits) if fused and limits else None
        rows.append([n, cell(fused), cell(fp16), cell(ratio, "{:.2f}"), cell(percent, "{:.0f}%")])
    lines = table(["prompt", "fused tokens/s", "fp16 tokens/s", "ratio", "fused, of the limit"], rows)

    rows = []
    for matmul in ("fused", "fp16"):
        b = runs.get((matmul, PROMPTS[0]), Bench())
        percent = cell(b.percent, "{}%")
        rows.append([matmul, cell(b.decode), cell(b.gb_per_s), percent])
    both = [runs.get((matmul, PROMPTS[0]), Bench()).decode for matmul in ("fused", "fp16")]
    ratio = both[0] / both[1] if both[0] and both[1] else None
    lines += table(["decode", "tokens/s", "GB/s", "of the copy"], rows)
    lines += [f"Decode, fused over fp16: {cell(ratio, '{:.2f}')}."]

    # Not of runs that decode: they take memory for measuring the copy at their end.
    fused_runs = [b for (matmul, _), b in runs.items() if matmul == "fused" and b.decode is None]
    peaks = [b.device_bytes for b in fused_runs if b.device_bytes]
    if peaks and sizes:
        beyond = max(peaks) - sizes["file_bytes"] - sizes["kv_cache_bytes"]
        lines += [
            f"Device memory, fused, at any of these prompts: {max(peaks) / 1e9:.3f} GB. The file has "
            f"{sizes['file_bytes'] / 1e9:.3f}, the KV cache {sizes['kv_cache_bytes'] / 1e9:.3f}, which leaves "
            f"{beyond / 1e6:.0f} MB (at most 300 wanted)."
        ]
    return lines


def prediction_tables(
    card: Card | None, config: Config, prefill: dict[int, Bench], decode: dict[int, Bench]
) -> list[str]:
    """What bench/predict.py expects beside what was measured; by the prompt's tokens, and by keys."""
    rows: list[list[object]] = []
    for phase, runs in (("prefill", prefill), ("decode", decode)):
        for n, bench in runs.items():
            # In the middle of what was generated.
            keys = n if phase == "prefill" else n + N_AT_KEYS // 2
            expected = tokens_per_s(card, read_counts(), config, phase, keys) if card else None
            found = bench.prefill if phase == "prefill" else bench.decode
            ratio = found / expected if found and expected else None
            rows.append([f"{phase} {n}", cell(expected, "{:.0f}"), cell(found), cell(ratio, "{:.2f}")])
    note = f"Predicted for {card.name} by bench/predict.py." if card else "bench/predict.py does not know this device."
    return [note, *table(["fused", "predicted tokens/s", "measured", "measured / predicted"], rows)]


def speed(context: Context) -> Result:
    """--bench on the real shapes."""
    result, program = Result(), BUILD / "runq_awq"
    if not program.exists():
        return Result([f"{program} is not there"])
    modes = [matmul for matmul in SPEED_MATMULS if matmul in matmuls(program, context)]
    for name, config in SHAPES.items():
        path = context.tmp / f"{name}.awq.bin"
        try:
            start = time.monotonic()
            write_random_model(path, config)
            result.report += ["", f"### {name}", "", f"(The file was written in {time.monotonic() - start:.1f} s.)"]
            sizes = {"file_bytes": path.stat().st_size, "kv_cache_bytes": kv_cache_bytes(config)}
            runs = {}
            for matmul in modes:
                for n in PROMPTS:
                    if time.monotonic() > context.deadline:
                        result.failures.append(f"{name} --matmul {matmul}, {n} tokens: no time was left")
                        continue
                    bench = f"{n},{N_DECODE if n == PROMPTS[0] else 0}"
                    done = run([program, path, "--bench", bench, "--matmul", matmul], context.time_for(60))
                    runs[matmul, n] = parse_bench(done.out, done.err)
                    if done.code != 0 or runs[matmul, n].prefill is None:
                        result.failures.append(f"{name} --bench {bench} --matmul {matmul}: exit code {done.code}")
                        result.details(result.failures[-1], done.tail)
            result.report += speed_tables(work_of(config, "awq"), runs, sizes, context.limits)
            prefill, decode = {n: b for (matmul, n), b in runs.items() if matmul == "fused"}, {}
            for keys in KEYS:
                bench = f"0,{N_AT_KEYS},{keys - 1}"
                ctx = min(config.max_seq_len, max(4096, keys + N_AT_KEYS))
                command = [program, path, "--bench", bench, "--ctx", ctx]
                done = run(command, context.time_for(60))
                decode[keys] = parse_bench(done.out, done.err)
                if done.code != 0 or decode[keys].decode is None:
                    result.failures.append(f"{name} --bench {bench}: exit code {done.code}")
                    result.details(result.failures[-1], done.tail)
            result.report += prediction_tables(context.card, config, prefill, decode)
        finally:
            path.unlink(missing_ok=True)
    return result


# ----------------------------------------------------------------------------

STEPS: dict[str, Callable[[Context], Result]] = {
    "machine": machine,
    "build": build,
    "tests": tests,
    "models": models,
    "backend": backend,
    "sanitizer": sanitizer,
    "ladder": ladder,
    "speed": speed,
}
QUICK = ("machine", "build", "tests", "models", "backend")


@dataclass(frozen=True)
class Finished:
    """A step that was run."""

    name: str
    result: Result
    seconds: float


def run_steps(
    names: list[str], context: Context, steps: dict[str, Callable[[Context], Result]], out: Path | None = None
) -> list[Finished]:
    """Runs them in order, whatever happens. The report in `out` grows with each, in case the next is cut off."""
    finished = []
    for name in names:
        print(f"--- {name}", flush=True)
        start = time.monotonic()
        if start > context.deadline:
            result = Result(["no time was left"])
        else:
            try:
                result = steps[name](context)
            except Exception as error:  # a step that breaks is a finding like any other
                result = Result([f"{type(error).__name__}: {error}"])
        finished.append(Finished(name, result, time.monotonic() - start))
        if out is not None:
            out.write_text(format_report(finished), encoding="utf-8")
        for failure in result.failures[:5]:
            print(f"FAILED: {failure}", flush=True)
        if len(result.failures) > 5:
            print(f"... {len(result.failures)} in all")
        print(f"{finished[-1].seconds:.1f} s", flush=True)
    return finished


def verdict(finished: list[Finished]) -> str:
    """One line."""
    failed = [f.name for f in finished if f.result.failures]
    seconds = sum(f.seconds for f in finished)
    return (
        f"FAILED: {', '.join(failed)}" if failed else "passed"
    ) + f", {len(finished)} step{'s' * (len(finished) != 1)} in {seconds:.0f} s"


def format_report(finished: list[Finished]) -> str:
    """The whole report in Markdown."""
    lines = [f"# GPU check: {verdict(finished)}"]
    rows = [[f.name, "FAILED" if f.result.failures else "passed", f"{f.seconds:.1f}"] for f in finished]
    lines += table(["step", "result", "s"], rows)
    for f in finished:
        lines += ["", f"## {f.name}", *(f"- FAILED: {failure}" for failure in f.result.failures), *f.result.report]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def main(arguments: list[str] | None = None, steps: dict[str, Callable[[Context], Result]] | None = None) -> int:
    """Command line; see the module's docstring."""
    steps = steps or STEPS
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", choices=list(steps), metavar="STEP", help=f"of {', '.join(steps)}")
    parser.add_argument("--tune", action="store_true", help="ladder: also every tile and number of splits")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-report.md", help="the report (%(default)s)")
    parser.add_argument("--tmp", type=Path, default=ROOT / "build" / "gpu-tmp", help="for model files of up to 6 GB")
    parser.add_argument("--minutes", type=float, default=12, help="when to give up (%(default)s)")
    args = parser.parse_args(arguments)
    names = args.only or [name for name in steps if not args.quick or name in QUICK]
    args.tmp.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        context = Context(time.monotonic() + 60 * args.minutes, Path(folder).resolve(), args.tune, args.quick)
        finished = run_steps(names, context, steps, args.out)
    print(f"gpu-check: {verdict(finished)}; report in {args.out}")
    return 1 if any(f.result.failures for f in finished) else 0


if __name__ == "__main__":
    sys.exit(main())

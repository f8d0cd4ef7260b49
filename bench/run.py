"""Measures a program on models of real sizes against what this machine can do at most; `make bench` runs it.

    python -m bench.run [--models llama-3.2-1b qwen3-0.6b] [--runs 3] [--threads N] [--json FILE] [--svg FILE]
    python -m bench.run --scheme w8a8 --program runq_w8a8 ...

The limits come from build/limits: how fast all threads read memory and how many int8 multiply-adds they do. They are
measured anew before every model of every round, because a machine is not always equally fast; and a run that decodes
reads as many bytes between any two tokens, and counts against the average of that. The models have random weights
(models/by_rule.py). Rounds interleave, so that a slow minute hurts everything alike.

What counts, for prefill and decode alike: each token's multiply-adds in the layers' matrices, and the classifier's
for the tokens that need logits (in prefill the last one); the bytes of the layers' matrices once a pass, of the
classifier once, and in decode of all keys and values held.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.random_checkpoint import MODELS, config_of
from bench.roofline import roofline
from formats.checkpoint import Config
from formats.tensors import matrix_shapes
from models.by_rule import SCHEMES, write_model

N_DECODE = 24
# (prompt, tokens generated after it, phases to report), and how many positions that are made up stand before
Case = tuple[int, int, tuple[str, ...]] | tuple[int, int, tuple[str, ...], int]
CASES: list[Case] = [
    (1, 0, ("prefill",)),
    (2, 0, ("prefill",)),
    (4, 0, ("prefill",)),
    (8, 0, ("prefill",)),
    (16, N_DECODE, ("prefill", "decode")),
    (128, 0, ("prefill",)),
    (512, N_DECODE, ("prefill", "decode")),
    (2048, N_DECODE, ("prefill", "decode")),
    (0, N_DECODE, ("decode",), 8192),
    (0, N_DECODE, ("decode",), 32768),
]
PHASES = ("prefill", "decode")
ROOT = Path(__file__).resolve().parent.parent
CPU_SCHEMES = tuple(name for name, s in SCHEMES.items() if (ROOT / f"{s.format.program}.cpp").is_file())


@dataclass(frozen=True)
class Work:
    """What one token costs in a model, whatever the machine."""

    layer_macs: int  # multiply-adds in the layers' matrices
    layer_bytes: int  # of these matrices, codes and scales
    classifier_macs: int
    classifier_bytes: int
    kv_bytes: int  # of one position in the KV cache, all layers


def work_of(config: Config, scheme: str) -> Work:
    """Counted from the tensors of a file."""
    storage, table = SCHEMES[scheme], "embed" if config.tied else "classifier"
    tensors = storage.tensors(config)
    return Work(
        layer_macs=sum(n_out * n_in for name, (n_out, n_in) in matrix_shapes(config) if name.startswith("layers.")),
        layer_bytes=sum(t.n_bytes for t in tensors if "_proj." in t.name),
        classifier_macs=config.vocab_size * config.dim,
        classifier_bytes=sum(t.n_bytes for t in tensors if t.name.split(".")[0] == table),
        kv_bytes=2 * config.n_layers * config.kv_dim * storage.kv_value_bytes,
    )


@dataclass(frozen=True)
class Sample:
    """One phase of one run of a program's `--bench`."""

    tokens: int
    tokens_per_s: float
    seconds: float
    matmul: float | None  # seconds in it; None if the program does not say
    attention: float | None
    chunk: int | None  # tokens that go through together in prefill
    memory_gb: float | None
    read_gb_per_s: float | None = None  # what the program itself measured between the tokens


def parse_bench(text: str) -> dict[str, Sample]:
    """What `--bench` printed, by phase."""
    samples = {}
    memory = re.search(r"^memory ([\d.]+) GB", text, re.M)
    read = re.search(r"% of the ([\d.]+) GB/s that", text)
    for phase in PHASES:
        rate = re.search(rf"^{phase} (\d+) tokens: ([\d.]+) tokens/s(?:.* at most (\d+) tokens at a time)?", text, re.M)
        if not rate:
            continue
        split = re.search(rf"^{phase} took ([\d.]+) s: matmul ([\d.]+), attention ([\d.]+), ", text, re.M)
        tokens, per_s = int(rate[1]), float(rate[2])
        samples[phase] = Sample(
            tokens=tokens,
            tokens_per_s=per_s,
            seconds=float(split[1]) if split else tokens / per_s,
            matmul=float(split[2]) if split else None,
            attention=float(split[3]) if split else None,
            chunk=int(rate[3]) if rate[3] else None,
            memory_gb=float(memory[1]) if memory else None,
            read_gb_per_s=float(read[1]) if read else None,
        )
    return samples


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and greatest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine_limits(limits: list[dict]) -> dict:
    """All that build/limits said, as one."""
    kernel = limits[0]["kernel"]
    return {
        "threads": limits[0]["threads"],
        "kernel": kernel,
        "read_gb_per_s": spread(m["read_gb_per_s"] for m in limits),
        "peak_gmac_per_s": spread(m["peak_gmac_per_s"][kernel] for m in limits),
        "peaks_of_all_kernels": {
            k: spread(m["peak_gmac_per_s"][k] for m in limits) for k in limits[0]["peak_gmac_per_s"]
        },
    }


def summarize(model: str, phase: str, context: int, samples: list[Sample], work: Work, machine: dict) -> dict:
    """One line of the table. `context` is the prompt's length, or how many tokens decode starts behind."""
    w, first = work, samples[0]
    if phase == "prefill":
        passes = -(-first.tokens // (first.chunk or first.tokens))
        macs = first.tokens * w.layer_macs + w.classifier_macs
        weights = passes * w.layer_bytes + w.classifier_bytes
        kv = 0.0
    else:  # token i of n reads the keys and values of context + i + 1 positions
        macs = first.tokens * (w.layer_macs + w.classifier_macs)
        weights = first.tokens * (w.layer_bytes + w.classifier_bytes)
        kv = first.tokens * (context + (first.tokens + 1) / 2) * w.kv_bytes
    # From the rate, not from the seconds, which are rounded.
    seconds = [s.tokens / s.tokens_per_s for s in samples]
    peak = machine["peak_gmac_per_s"]["median"]
    # A machine's bandwidth may change from one second to the next, so a run counts against its own if it has one.
    read = [s.read_gb_per_s or machine["read_gb_per_s"]["median"] for s in samples]
    gb = spread((weights + kv) / s / 1e9 for s in seconds)
    gmac = spread(macs / s / 1e9 for s in seconds)
    row = {
        "model": model,
        "phase": phase,
        "tokens": context,
        "tokens_per_s": spread(s.tokens_per_s for s in samples),
        "gb_per_s": gb,
        "percent_of_read": spread(100 * (weights + kv) / s / 1e9 / r for s, r in zip(seconds, read, strict=True)),
        "gmac_per_s": gmac,
        "percent_of_peak": spread(100 * v / peak for v in gmac.values()),
        "macs_per_byte": macs / (weights + kv),
    }
    if all(s.matmul is not None for s in samples):
        for part in ("matmul", "attention"):
            row[part + "_percent"] = spread(100 * getattr(s, part) / s.seconds for s in samples)
        row["rest_percent"] = spread(100 * (1 - (s.matmul + s.attention) / s.seconds) for s in samples)
        if phase == "decode":
            row["attention_per_kv_read"] = spread(
                s.attention / (kv / r / 1e9) for s, r in zip(samples, read, strict=True)
            )
    if all(s.memory_gb is not None for s in samples):
        row["memory_gb"] = spread(s.memory_gb for s in samples)
    return row


# ----------------------------------------------------------------------------
# Printing


def with_spread(value: dict[str, float], digits: int = 1, unit: str = "") -> str:
    """e.g. "20.1 GB/s (19.8-20.3)"."""
    v = {k: f"{x:.{digits}f}" for k, x in value.items()}
    return f"{v['median']}{unit} ({v['min']}-{v['max']})"


def table(program: str, machine: dict, rows: list[dict], runs: int) -> str:
    """Everything as text: the limits, a block for each model, and a closing line on decode."""
    lines = [
        f"{program}: {machine.get('cpu', 'this machine')}, {machine['threads']} threads, kernel {machine['kernel']}",
        f"reads       {with_spread(machine['read_gb_per_s'], 1, ' GB/s')}",
        f"multiplies  {with_spread(machine['peak_gmac_per_s'], 1, ' GMAC/s')}",
        f"Medians of {runs} run{'s' if runs > 1 else ''} (least-greatest); % of these two limits; "
        "matmul, attention and rest in % of the time.",
        "In runs that decode, % of what the run itself read between its tokens.",
    ]

    def number(row: dict, field: str, digits: int) -> str:
        return f"{row[field]['median']:.{digits}f}" if field in row else "-"

    heads = ("", "tokens/s", "", "GB/s", "%", "GMAC/s", "%", "matmul", "attention", "rest", "memory GB")
    widths = (13, 9, 16, 8, 5, 8, 5, 8, 10, 6, 10)

    def line(cells: Iterable[str]) -> str:
        cells = list(cells)
        left = [cells[0].ljust(widths[0])]
        return "".join(left + [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]).rstrip()

    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        lines += ["", model, line(heads)]
        for row in own:
            rate = row["tokens_per_s"]
            digits = 2 if rate["median"] < 100 else 1
            lines.append(
                line(
                    [
                        f"{row['phase']} {row['tokens']:4}",
                        f"{rate['median']:.{digits}f}",
                        f"({rate['min']:.{digits}f}-{rate['max']:.{digits}f})",
                        number(row, "gb_per_s", 1),
                        number(row, "percent_of_read", 0),
                        number(row, "gmac_per_s", 1),
                        number(row, "percent_of_peak", 0),
                        number(row, "matmul_percent", 1),
                        number(row, "attention_percent", 1),
                        number(row, "rest_percent", 1),
                        number(row, "memory_gb", 2),
                    ]
                )
            )
        long = [row for row in own if row["phase"] == "decode"][-1:]
        if long and "attention_per_kv_read" in long[0]:
            ratio = long[0]["attention_per_kv_read"]["median"]
            lines.append(
                f"Attention at context {long[0]['tokens']} takes {ratio:.2f} times as long as reading the KV cache."
            )
    return "\n".join([*lines, "", closing_line(rows)])


def closing_line(rows: list[dict]) -> str:
    """Decode against the read bandwidth, at each model's shortest context."""
    shortest = {}
    for row in rows:
        if row["phase"] == "decode":
            shortest.setdefault(row["model"], row)
    parts = [f"{m} {with_spread(row['percent_of_read'], 0, ' %')}" for m, row in shortest.items()]
    contexts = sorted({row["tokens"] for row in shortest.values()})
    at = " and ".join(map(str, contexts))
    return f"Decode at context {at}, of the read bandwidth: " + ", ".join(parts)


# ----------------------------------------------------------------------------
# Measuring


def output_of(command: list) -> str:
    """Standard output of a command that has to succeed; what it says on standard error shows only if it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stdout


def cpu_name() -> str:
    """What /proc/cpuinfo calls the processor."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    return found[1] if found else "unknown CPU"


def measure(
    files: dict[str, Path],
    work: dict[str, Work],
    runs: int,
    threads: int | None,
    program: Path,
    limits_program: Path,
    cases: list[Case] = CASES,
) -> tuple[dict, list[dict]]:
    """Runs everything. Returns the machine's limits and the rows of the table."""
    limits: list[dict] = []
    samples: dict[tuple[str, str, int], list[Sample]] = {}
    for run in range(runs):
        for model, file in files.items():
            limits.append(json.loads(output_of([limits_program, *([threads] if threads else [])])))
            for n_prompt, n_new, phases, *more in cases:
                before = more[0] if more else 0
                sizes, context = f"{n_prompt},{n_new},{before}", n_prompt + before
                print(f"\r\033[Kround {run + 1} of {runs}: {model} {sizes}", end="", file=sys.stderr)
                command = [program, file, "--bench", sizes, "--ctx", context + max(n_new, 1)]
                found = parse_bench(output_of([*command, "--threads", limits[0]["threads"]]))
                for phase in phases:
                    samples.setdefault((model, phase, context), []).append(found[phase])
    print("\r\033[K", end="", file=sys.stderr)
    machine = {"cpu": cpu_name(), **machine_limits(limits)}
    rows = [
        summarize(model, phase, n, found, work[model], machine)
        for (model, phase, n), found in sorted(
            samples.items(), key=lambda item: (list(files).index(item[0][0]), PHASES.index(item[0][1]), item[0][2])
        )
    ]
    return machine, rows


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3.2-1b", "qwen3-0.6b"], metavar="MODEL")
    parser.add_argument("--scheme", choices=CPU_SCHEMES, default="q8", help="of the model files (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="rounds (%(default)s)")
    parser.add_argument("--threads", type=int, help="all physical cores")
    parser.add_argument("--program", type=Path, default=Path("runq"), help="one that runs the scheme (%(default)s)")
    parser.add_argument("--limits", type=Path, default=Path("build/limits"))
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="where the model files are or go")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the roofline")
    args = parser.parse_args()
    if args.runs < 1 or (args.threads is not None and args.threads < 1):
        parser.error("--runs and --threads are at least 1")

    args.folder.mkdir(parents=True, exist_ok=True)
    files = {model: args.folder / f"{model}.{args.scheme}.bin" for model in args.models}
    for model, file in files.items():
        if not file.exists():
            print(f"writing {file}", file=sys.stderr)
            write_model(config_of(model), file, args.scheme, sys.stderr.isatty())
    work = {model: work_of(config_of(model), args.scheme) for model in files}
    machine, rows = measure(files, work, args.runs, args.threads, args.program.resolve(), args.limits.resolve())
    print(table(args.program.name, machine, rows, args.runs))
    results = {"program": args.program.name, "scheme": args.scheme, "machine": machine, "runs": args.runs, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.svg:
        args.svg.write_text(roofline(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

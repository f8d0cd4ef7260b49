"""What each part of the engine brings to runq, one after the other: `make ladder` runs it (docs/engine.md).

    python -m bench.ladder [--model FILE] [--prompts 128 512] [--tokens 16] [--rounds 5] [--threads N]

Runs a prompt and some new tokens by each of the forms of runq: from its one file alone, then over the engine with one
part more each time. Forms take turns, so that a slow minute hurts all alike; a factor is the median of the rounds, of
speeds in the same round. Without --model the file has the shape of Llama 3.2 1B and random weights.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.random_checkpoint import config_of
from bench.versions import positive
from models.by_rule import write_model

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "build" / "bench" / "llama-3.2-1b.q8.bin"
PHASES = ("prefill", "decode")
SPEED = re.compile(r"^(prefill|decode) +\d+ tokens?(?: in [\d.]+ s)?, ([\d.]+) tokens/s", re.M)


@dataclass(frozen=True)
class Form:
    """A program, its options, and in how many threads it runs: 0 means all."""

    name: str
    program: str
    options: tuple[str, ...]
    threads: int
    base: int | None = None  # the form of which its speed is a multiple; None: the one before


FORMS = (
    Form("plain", "build/plain/runq", (), 1),
    Form("+ vector instructions", "build/ladder/runq", ("--mmap",), 1),
    Form("+ packing", "build/ladder/runq", (), 1),
    Form("+ attention's tiles", "runq", (), 1),
    Form("+ threads", "runq", (), 0),
    Form("plain, threads", "build/plain/runq", (), 0, base=0),
)


def speeds(printed: str) -> dict[str, float]:
    """Tokens per second by phase, of what a program has written to standard error."""
    return {phase: float(speed) for phase, speed in SPEED.findall(printed)}


def run(form: Form, model: Path, prompt: int, tokens: int, threads: int) -> dict[str, float]:
    """Tokens per second of one run. Raises ValueError if it fails."""
    ids = ",".join(str(1 + i % 1000) for i in range(prompt))
    command = [ROOT / form.program, model, "--ids", ids, "-n", tokens + 1, "-c", prompt + tokens + 1, "-t", 0]
    command += ["-j", form.threads or threads, "--print-ids", *form.options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    found = speeds(done.stderr)
    if done.returncode != 0 or set(found) != set(PHASES):
        raise ValueError(f"{form.program}: exit code {done.returncode}: {done.stderr.strip()}")
    return found


def table(prompt: int, rounds: list[list[dict[str, float]]], threads: int) -> str:
    """A line for each form: medians of its speeds, and of their ratios to those of the form before and of the first."""
    lines = [
        f"{f'prompt of {prompt} tokens':<24}{'prefill':^27}{'decode':^27}",
        f"{'':<24}" + f"{'tokens/s':>9}{'factor':>9}{'of plain':>9}" * 2,
    ]
    for i, form in enumerate(FORMS):
        name = form.name.replace("threads", f"{threads} threads")
        line = f"{name:<24}"
        base = i - 1 if form.base is None else form.base
        for phase in PHASES:
            line += f"{statistics.median(r[i][phase] for r in rounds):9.1f}"
            for other in (base, 0):
                ratio = statistics.median(r[i][phase] / r[other][phase] for r in rounds) if i > 0 else 1
                line += f"{ratio:9.2f}" if i > 0 else f"{'':>9}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Prints a table for each prompt. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.ladder", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help=f"a Q8 file ({MODEL.relative_to(ROOT)}, made if it is not there)")
    parser.add_argument("--prompts", type=positive, nargs="+", default=[128, 512], help="tokens (128 512)")
    parser.add_argument("--tokens", type=positive, default=16, help="new tokens (16)")
    parser.add_argument("--rounds", type=positive, default=5, help="(5)")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="(all)")
    options = parser.parse_args(arguments)
    model = options.model or MODEL
    if options.model is None and not MODEL.exists():
        MODEL.parent.mkdir(parents=True, exist_ok=True)
        write_model(config_of("llama-3.2-1b"), MODEL)
    try:
        for prompt in options.prompts:
            rounds = []
            for k in range(options.rounds):
                order = range(len(FORMS)) if k % 2 == 0 else reversed(range(len(FORMS)))
                found = {i: run(FORMS[i], model, prompt, options.tokens, options.threads) for i in order}
                rounds.append([found[i] for i in range(len(FORMS))])
            print(table(prompt, rounds, options.threads), end="\n\n", flush=True)
        print(f"Medians of {options.rounds} rounds; factor: the line before is 1, and the first for plain in threads.")
    except (ValueError, OSError) as e:
        print(f"bench.ladder: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

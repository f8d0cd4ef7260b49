"""What nvcc made of the kernels of runq_awq.cu, for bench/predict.py: registers, shared memory, instructions, loads.

    python -m bench.sass --nvdisasm NVDISASM [--nvcc NVCC] [--out bench/kernel_counts.json]

Registers and static shared memory are ptxas's own (-Xptxas -v). The rest is read in SASS, what the GPU executes, as
nvdisasm prints it; the Python package nvidia-cuda-nvdisasm has this program. No GPU is needed.

A loop is what lies between a label and a branch back to it. A kernel's *main* loop is the innermost one with most mma
instructions, or with most loads where there are none; *first* is the first innermost loop that loads, *last* the last
behind the main loop that has at least four loads, and so is not the remainder of an unrolled one. *In flight* are
the loads of a warp that have begun when it first has to wait for one of them: when an instruction takes a register that
a load has still to fill. Instructions are counted on the shortest way: of two branches, the one that takes less.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90")
OUT = ROOT / "bench" / "kernel_counts.json"
NVCC_OPTIONS = ["-std=c++20", "-O3", "-I.", "-DENGINE", "-DNO_TOKENIZER", "-DNO_CUBLAS", "-Xptxas", "-v"]
LOAD = re.compile(r"(?:LDG|LD)\.E\S*$")  # from global memory into registers


def kernel_name(mangled: str) -> str:
    """`awq_gemv<4, 8>` of `_Z8awq_gemvILi4ELi8EEv...`."""
    n, rest = re.match(r"_Z(?:N\d+_INTERNAL_\w+?E?|L)?(\d+)(\w+)", mangled).groups()
    name, after = rest[: int(n)], rest[int(n) :]
    arguments = re.match(r"I((?:Li\d+E)+)", after)
    return f"{name}<{', '.join(re.findall(r'[0-9]+', arguments[1]))}>" if arguments else name


def resources(log: str) -> dict[str, dict[str, dict[str, int]]]:
    """By architecture and kernel, of what `ptxas -v` says: registers of a thread, static shared bytes of a block."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for part in log.split("Compiling entry function '")[1:]:
        mangled, arch = re.match(r"(\w+)' for '(\w+)'", part).groups()
        shared = re.search(r"(\d+) bytes smem", part)
        found.setdefault(arch, {})[kernel_name(mangled)] = {
            "registers": int(re.search(r"Used (\d+) registers", part)[1]),
            "shared": int(shared[1]) if shared else 0,
        }
    return found


@dataclass(frozen=True)
class Step:
    """An instruction of SASS."""

    label: str  # that stands before it, or ""
    guarded: bool  # by a predicate: it may not take place
    opcode: str
    operands: str


def functions(text: str) -> dict[str, list[Step]]:
    """The kernels in nvdisasm's listing."""
    found: dict[str, list[Step]] = {}
    code: list[Step] = []
    label = ""
    for line in text.splitlines():
        if begin := re.match(r"\.text\.(\w+):", line):
            code = found.setdefault(kernel_name(begin[1]), [])
        elif begin := re.match(r"(\.L\w+):", line):
            label = begin[1]
        elif step := re.match(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*([^;]*);", line):
            code.append(Step(label, bool(step[1]), step[2], step[3]))
            label = ""
    return found


def target(step: Step) -> str | None:
    """Where a branch goes."""
    to = re.search(r"\((\.L\w+)\)", step.operands) if step.opcode.startswith("BRA") else None
    return to[1] if to else None


def shortest_way(code: list[Step], begin: int, end: int) -> int:
    """Instructions from `begin` on until `end` comes, by the branches that make it shortest. No way: all between."""
    at = {step.label: i for i, step in enumerate(code) if step.label}
    seen, front, n = {begin}, [begin], 0
    while front and end not in seen:
        following = []
        for i in front:
            to = target(code[i])
            ends = code[i].opcode == "EXIT" or code[i].opcode.startswith("BRA")
            following += [at[to]] if to in at else []
            following += [i + 1] if (code[i].guarded or not ends) and i + 1 < len(code) else []
        front = [i for i in dict.fromkeys(following) if i not in seen]
        seen.update(front)
        n += 1
    return n if end in seen else end - begin


def registers_of(operands: str) -> set[int]:
    """The numbers of the registers that are named."""
    return {int(n) for n in re.findall(r"\bR(\d+)\b", operands)}


def in_flight(body: list[Step]) -> int:
    """The most loads of one warp that are under way at once. The body is walked twice: it is a loop."""
    waiting: list[set[int]] = []
    most = 0
    for step in body * 2:
        first, _, sources = step.operands.partition(",")
        used = registers_of(step.operands if step.opcode.startswith("ST") else sources)
        # Loads come back in the order in which they began.
        done = max((i + 1 for i, filled in enumerate(waiting) if filled & used), default=0)
        del waiting[:done]
        if LOAD.match(step.opcode):
            n = 4 if ".128" in step.opcode else 2 if ".64" in step.opcode else 1
            low = min(registers_of(first), default=-8)
            waiting.append(set(range(low, low + n)))
            most = max(most, len(waiting))
    return most


def loop_counts(code: list[Step], begin: int, end: int) -> dict[str, int]:
    """Of the loop code[begin:end]; instructions are those of the shortest way that passes all mma and most copies:
    the first and the last wide one, and any that is the fourth of a few lines, as those of a step's rows are."""
    body = code[begin:end]
    mma = [i for i in range(begin, end) if code[i].opcode.startswith("HMMA")]
    copies = [i for i in range(begin, end) if re.match(r"LDGSTS.*128", code[i].opcode)]
    rows = [i for i in copies if sum(i - 16 < other <= i for other in copies) == 4]
    stops = sorted({begin, *copies[:1], *copies[-1:], *rows, *mma, end - 1})
    return {
        "instructions": 1 + sum(shortest_way(code, a, b) for a, b in itertools.pairwise(stops)),
        "loads": sum(bool(LOAD.match(step.opcode)) for step in body),
        "mma": len(mma),
        "in_flight": in_flight(body),
    }


def count(code: list[Step]) -> dict:
    """straight: the instructions outside the main loop, of the shortest way to the last store. Loops: see the top."""
    at = {step.label: i for i, step in enumerate(code) if step.label}
    spans = [(at[to], i + 1) for i, step in enumerate(code) if (to := target(step)) in at and at[to] <= i]
    loops = {span: loop_counts(code, *span) for span in sorted(spans)}
    work = [span for span, loop in loops.items() if loop["loads"] or loop["mma"]]
    main = max(work, key=lambda s: (loops[s]["mma"], not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in work),
                                    loops[s]["loads"], s[0] - s[1]), default=None)  # fmt: skip
    inner = [s for s in work if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in work)]
    last = [s for s in inner if main and s[0] >= main[1]]
    last = [s for s in last if loops[s]["loads"] >= 4] or last
    first = next(iter(inner), None)
    store = max((i for i, step in enumerate(code) if step.opcode.startswith("STG")), default=len(code) - 1)
    stops = [0, store] if main is None else [0, main[0], main[1], max(store, main[1])]
    straight = sum(shortest_way(code, a, b) for a, b in zip(stops[::2], stops[1::2], strict=True))
    found = {"first": first, "main": main, "last": last[-1] if last else None}
    return {"straight": straight} | {name: loops[span] for name, span in found.items() if span}


def compile_and_count(nvcc: str, nvdisasm: str) -> dict:
    """{architecture: {kernel: counts}} of runq_awq.cu as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        fatbin = Path(folder) / "kernels.fatbin"
        targets = (f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in ARCHS)
        command = [nvcc, *NVCC_OPTIONS, *targets, "-fatbin", "--keep", "--keep-dir", folder, "runq_awq.cu",
                   "-o", fatbin]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"nvcc: exit code {done.returncode}\n{done.stderr}")
        counts = resources(done.stderr + done.stdout)
        for cubin in Path(folder).glob("*.cubin"):
            arch = "sm_" + re.findall(r"_(\d+)", cubin.name)[-1]
            listing = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
            for kernel, code in functions(listing).items():
                counts[arch][kernel] |= count(code)
    return counts


def write(counts: dict, out: Path) -> None:
    """JSON with a line for each kernel."""
    archs = (
        f' "{arch}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in sorted(counts[arch].items()))
        + "\n }"
        for arch in sorted(counts)
    )
    out.write_text("{\n" + ",\n".join(archs) + "\n}\n", encoding="utf-8")


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.sass", description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--nvdisasm", default="nvdisasm")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    write(compile_and_count(args.nvcc, args.nvdisasm), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

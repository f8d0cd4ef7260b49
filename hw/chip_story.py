"""A whole token in RTL, from its id to its logits: the goldens' ids, a trace, and the clocks of each step.

    python -m hw.chip_story [--hw build/hw] [--array 16x16] [--ids 24] [--models q8 ...] [--latency 20]
                            [--pauses 0] [--faults] [--record docs/chip.json]

make chip-story builds what this runs (hw/sim/chip_run.cpp). For each model two runs: greedy ids from the prompt of the
golden generation, which have to be the golden's; and the tokens of the golden trace, each step of which has to pass
`golden diff --model`: equal to the bit but for attention's fp32 steps and SwiGLU, which are within 1e-5. Then a table:
clocks of each step of the last token of the story, in a layer and outside of the layers, beside `model_clocks`, which
have to be equal if memory does not pause. Otherwise the exit code is 1.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.systolic import Array, Stream, decode_cycles, default_scalers
from golden.schemes import read_file
from golden.trace import write_trace
from hw.chip_program import Image, Step, build

ROOT = Path(__file__).resolve().parent.parent
# Golden, model file, KV cache, and how many ids are compared: tiny-qwen3's 24th has a lead of 0.001, so that the
# contract lets either of two win.
MODELS = {
    "q8": ("tiny-llama.q8", "tiny-llama.q8", "fp32", 64),
    "qwen3": ("tiny-qwen3.q8", "tiny-qwen3.q8", "fp32", 23),
    "w8a8-attn8": ("tiny-llama.w8a8-attn8", "tiny-llama.w8a8", "int8", 64),
}
RESULT, CODE, SCALE, SCORE, PROB, WEIGHT, ATTENTION_CODE, ATTENTION_SCALE = range(8)  # hw/sim/chip_trace.sv
SUMS = 256  # and the number of the scaler

Made = dict[tuple[int, int, int], np.ndarray]  # by token, step and kind: words of 32 bits


@dataclass(frozen=True)
class Run:
    """What chip_run gave: new ids, what steps made, and (begin, end) of each step, by token, in clocks."""

    ids: list[int]
    made: Made
    clocks: list[list[tuple[int, int]]]


LIMITS = {"*": 0} | dict.fromkeys(("*.attn.scores", "*.attn.probs", "*.attn.mix", "*.ffn.swiglu"), 1e-5)
TOLERANCES = [word for step, limit in LIMITS.items() for word in ("--tolerance", f"{step}={limit}")]


def run(program: Path, image: Image, ids: list[int], new: int, args: argparse.Namespace) -> Run:
    """Runs the chip. Raises RuntimeError with the program's line if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        memory, record = Path(folder) / "memory", Path(folder) / "record"
        image.memory.tofile(memory)
        command = [program, memory, image.program, image.logits, image.config.vocab_size,
                   ",".join(map(str, ids)), new, record, args.latency, args.pauses, int(args.faults)]  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip() or f"{program} ended with {done.returncode}")
        words = np.fromfile(record, np.uint32)
    made, at = {}, 0
    while at < len(words):
        token, step, kind, n = map(int, words[at : at + 4])
        made[token, step, kind] = words[at + 4 : at + 4 + n]
        at += 4 + n
    clocks: dict[int, list] = defaultdict(list)
    new_ids = []
    for line in done.stdout.splitlines():
        kind, *numbers = line.split()
        if kind == "id":
            new_ids.append(int(numbers[0]))
        else:
            clocks[int(numbers[0])].append(tuple(map(int, numbers[2:])))
    return Run(new_ids, made, [clocks[t] for t in sorted(clocks)])


def sums_of(made: Made, token: int, number: int, step: Step, groups: int, array: Array) -> np.ndarray:
    """The integer sums of a product, (n, groups) int32, from what its scalers took, each for some columns."""
    scalers = [made[token, number, kind] for kind in range(SUMS, SUMS + array.cols) if (token, number, kind) in made]
    share = array.cols // len(scalers)
    sums = np.stack(
        [s.view(np.int32).reshape(-1, groups, share) for s in scalers], axis=1
    )  # tile, scaler, group, column
    return sums.transpose(0, 1, 3, 2).reshape(-1, groups)[: step.n]


def trace(image: Image, found: Run, ids: list[int], array: Array) -> dict[str, np.ndarray]:
    """The trace of a run over `ids`, with the names of docs/numerics.md."""
    c, n = image.config, len(ids)
    rows: dict[str, list] = defaultdict(list)  # by step: a row, or part of one, for each token
    for token in range(n):
        groups = 0
        heads: dict[str, list] = defaultdict(list)  # what comes head by head
        for number, step in enumerate(image.steps[:-1]):

            def get(kind: int, dtype: type, number: int = number) -> np.ndarray:
                words = found.made.get((token, number, kind), np.zeros(0, np.uint32))  # noqa: B023
                return words.astype(np.uint8).view(np.int8) if dtype == np.int8 else words.view(dtype)

            name, result = step.result, get(RESULT, np.float32)
            if step.kind == "quantize":
                groups = step.groups
            if step.kind in ("quantize", "store") and len(codes := get(CODE, np.int8)):
                heads[name + ".q"].append(codes)
                heads[name + ".s"].append(get(SCALE, np.float32))
            if step.kind == "attend":
                layer = name.removesuffix("mix")
                for kind, part in ((SCORE, "scores"), (PROB, "probs"), (WEIGHT, "weights")):
                    if len(values := get(kind, np.float32)):
                        heads[layer + part].append(np.pad(values, (0, n - len(values))))
                if len(codes := get(ATTENTION_CODE, np.int8)):
                    scales = get(ATTENTION_SCALE, np.float32)
                    heads[layer + "q_rope.q"].append(codes[: step.n])
                    heads[layer + "q_rope.s"].append(scales[:1])
                    weights = codes[step.n :]
                    heads[layer + "weights.q"].append(np.pad(weights, (0, n - len(weights))))
                    heads[layer + "weights.s"].append(scales[-1:])
            if len(result) and name:
                heads[name].append(result)
            if step.kind == "multiply" and name.startswith("layers.1."):
                rows[name + ".acc"].append(sums_of(found.made, token, number, step, groups, array))
        for name, parts in heads.items():
            by_head = name.endswith(("scores", "probs", "weights", "weights.q", "weights.s", "rope.s", "rope.q"))
            row = np.stack(parts) if by_head else np.concatenate(parts)
            rows[name].append(row.reshape(-1, c.head_dim) if name.endswith(("_rope", "q_norm", "k_norm")) else row)
    return {"tokens": np.array(ids, np.int32)} | {name: np.stack(parts) for name, parts in rows.items()}


def model_clocks(step: Step, array: Array, inputs: int, group: int, position: int, latency: int) -> int | None:
    """Clocks of a step, from its begin to its end, if memory never pauses; None: there is no model of it.

    latency: clocks until memory answers. A product is `decode_cycles` of the array, and before it the way to memory and
    back, behind it the scaling of a group's last sums and the last `cols` words' way out. inputs, group: of what was
    quantized last.
    """
    n = step.n
    if step.kind == "multiply":
        share = array.cols // default_scalers(array)
        answer = latency + 4 if step.to_memory else 0
        return decode_cycles(array, inputs, n, group, Stream()) + latency + share + array.cols + 23 + answer
    if step.kind == "quantize":  # two halves of a buffer
        groups = n // step.group
        return 42 + 2 * n if groups == 1 else 11 + step.group + (2 * step.group + 32) * groups // 2
    return {"rotate": 19 * n // 2 + 3, "gate": 32 * n + 27, "add": 2 * n + 8}.get(step.kind)


def layer_table(image: Image, found: Run, array: Array, layer: int, latency: int) -> list[dict]:
    """Steps of a layer (-1: outside) of the last token: name, kind, begin and end in clocks, and the model's."""
    clocks, steps = found.clocks[-1], image.steps
    inputs = group = 0
    table = []
    for (begin, end), step in zip(clocks, steps[:-1], strict=True):
        if step.kind == "quantize":
            inputs, group = step.n, step.group
        is_layers = step.result.startswith("layers.")
        if step.result.startswith(f"layers.{layer}.") if layer >= 0 else not is_layers:
            wanted = model_clocks(step, array, inputs, group, len(found.clocks) - 1, latency)
            name = step.result.split(".", 2)[-1] if is_layers else step.result or "turn"
            table.append({"name": name, "kind": step.kind, "begin": begin, "end": end, "model": wanted})
    return table


def tell(name: str, args: argparse.Namespace) -> tuple[bool, dict]:
    """Runs a model; whether ids and trace are the golden's, and what docs/chip.json has of it."""
    golden, stem, kv, clear = MODELS[name]
    rows, cols = map(int, args.array.split("x"))
    array = Array(rows, cols)
    program = ROOT / args.hw / f"chip-{args.array}" / "chip_run"
    file = ROOT / "build" / "models" / f"{stem}.bin"
    image = build(read_file(file), rows, cols, kv)
    vectors = ROOT / "golden" / "data" / golden
    goldens = json.loads(vectors.with_name(vectors.name + ".json").read_text())
    generation = goldens["generations"][0]
    n = min(args.ids, clear)
    story = run(program, image, generation["prompt_ids"], n, args)
    same = story.ids == generation["new_ids"][:n]
    are = "are" if same else "are NOT"
    print(f"{name}, {args.array}: {n} ids {are} the golden's: {','.join(map(str, story.ids))}")

    made = run(program, image, goldens["trace_ids"], 0, args)
    path = ROOT / args.hw / f"chip-{args.array}" / f"{name}.trace.safetensors"
    write_trace(path, trace(image, made, goldens["trace_ids"], array))
    model = file if kv == "int8" else ROOT / "models" / stem.removesuffix(".q8")
    golden_trace = vectors.with_name(vectors.name + ".trace.safetensors")
    int8 = ["--attn", "int8"] if kv == "int8" else []
    diff = subprocess.run(
        [sys.executable, "-m", "golden", "diff", golden_trace, path, "--model", model, *int8, *TOLERANCES],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print("  golden diff:", (diff.stdout.strip() or diff.stderr.strip()).splitlines()[-1])

    layer, last = (layer_table(image, story, array, i, args.latency) for i in (1, -1))
    token = story.clocks[-1]
    total = token[-1][1] - token[0][0]
    n_wrong = 0
    print(f"  {'step':<11}{'result':<16}{'clocks':>8}   model")
    for e in [*layer, *last]:
        took = e["end"] - e["begin"]
        differs = args.pauses == 0 and e["model"] not in (None, took)
        n_wrong += differs
        wanted = "" if e["model"] is None else f"{'!' if differs else '='} {e['model']:,}"
        print(f"  {e['kind']:<11}{e['name']:<16}{took:>8,} {wanted}")
    kinds: dict[str, int] = defaultdict(int)
    for (begin, end), step in zip(token, image.steps[:-1], strict=True):
        kinds[step.kind] += end - begin
    kinds["instructions"] = total - sum(kinds.values())
    print(f"  a token at position {len(story.clocks) - 1}: {total:,} clocks:",
          ", ".join(f"{kind} {n:,}" for kind, n in sorted(kinds.items(), key=lambda x: -x[1])), "\n")  # fmt: skip
    found = {"position": len(story.clocks) - 1, "clocks": total, "kinds": kinds, "layer": layer}
    return same and diff.returncode == 0 and n_wrong == 0, found


def main() -> int:
    """Tells the stories; the exit code is 1 if an id or a step is another."""
    parser = argparse.ArgumentParser(prog="python -m hw.chip_story", description=__doc__.splitlines()[0])
    parser.add_argument("--hw", default="build/hw", help="where the chip was built: HW of make's command line")
    parser.add_argument("--array", default="16x16", help="rows x columns of cells, of a chip that was built")
    parser.add_argument("--ids", type=int, default=24, help="new ids of each story")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--latency", type=int, default=20, help="clocks until memory answers")
    parser.add_argument("--faults", action="store_true", help="first errors of memory, resets, and what is refused")
    parser.add_argument("--record", type=Path, help="a JSON file, docs/chip.json: renews what it has of these runs")
    parser.add_argument("--pauses", type=float, default=0, help="share of clocks in which a channel of memory pauses")
    args = parser.parse_args()
    n_failed = 0
    for name in args.models:
        try:
            passed, found = tell(name, args)
        except (OSError, RuntimeError, ValueError) as e:
            print(f"{name}: {e}", file=sys.stderr)
            return 1
        n_failed += not passed
        if args.record:
            runs = json.loads(args.record.read_text()) if args.record.exists() else {}
            runs[f"{name}, {args.array}"] = found
            lines = [f"{json.dumps(run)}: {json.dumps(of)}" for run, of in sorted(runs.items())]
            args.record.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())

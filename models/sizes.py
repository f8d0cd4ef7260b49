"""Goldens at the size of real models: of files by a rule (models/by_rule.py), a digest of every step.

    python -m models.sizes make [--all] [--only CASE]       makes golden/sizes.json
    python -m models.sizes write CASE OUT.bin               writes the file of a case
    python -m models.sizes step CASE STEP OUT.safetensors   a step's numbers, where a digest differs

golden/digests.py says what a digest is, and docs/real-size.md how a port is judged by them.
"""

import argparse
import json
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.random_checkpoint import config_of
from formats.checkpoint import Config, linear, yarn
from formats.errors import ModelError, one_line
from formats.files import replacing
from formats.gptq import FORMATS, MatrixFormat
from formats.moe import MoeLayout
from formats.schemes import MOE_FILE, Q8_FILE, W8A8_FILE
from golden.attention_int8 import attention_int8
from golden.digests import StepDigests
from golden.forward import Past, Scheme, forward
from golden.fp32 import digest
from golden.kv_cache import attention_kept
from golden.schemes import read_file
from golden.trace import Recorder, write_trace
from models.by_rule import SCHEMES, Storage, floats, ladder, mixed, token_ids, words, write_stored

GOLDENS = Path(__file__).resolve().parent.parent / "golden" / "sizes.json"
QUANTIZED_CACHE = ("attn.k_rope.q", "attn.k_rope.s", "attn.v_proj.q", "attn.v_proj.s")
CACHE_TENSOR = 1 << 22  # the number of layer 0's keys, where they are made up

# ----------------------------------------------------------------------------
# Cases


@dataclass(frozen=True)
class Case:
    """A file by the rule, and the run of it that has a golden."""

    like: str  # the model whose shape it has
    storage: Storage
    n_prompt: int = 40  # tokens by the rule
    n_new: int = 6  # greedy ids behind them
    attend: str = ""  # "int8", or the type of the KV cache, "f16" or "q8"
    n_before: int = 0  # positions in front of the prompt, whose keys and values are `made_up`
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the Config that are not the model's
    takes_long: bool = False  # whether `make test` leaves it out

    @property
    def config(self) -> Config:
        config = config_of(self.like, 2)
        changes = dict(self.changes)
        if (n_rows := changes.pop("moe_hidden_dim", None)) is not None:
            assert config.moe is not None
            changes["moe"] = replace(config.moe, hidden_dim=n_rows)
        return replace(config, **changes)

    @property
    def program(self) -> str:
        """Which runs it."""
        return "runq" if self.storage.format is Q8_FILE else f"runq_{self.storage.format.scheme}"

    @property
    def options(self) -> list[str]:
        """Of the program, but for the model, the tokens and how many."""
        attend = [] if not self.attend else ["--attn", "int8"] if self.attend == "int8" else ["--kv", self.attend]
        n = self.n_before + self.n_prompt + self.n_new
        return attend + (["--cache-rule", str(self.n_before), "--ctx", str(n)] if self.n_before else [])

    @property
    def n_run(self) -> int:
        """Tokens that are run: the last id is not."""
        return self.n_prompt + self.n_new - 1

    def past(self) -> Past:
        """What comes before the prompt."""
        past, config = Past(), self.config
        if self.n_before:
            layers = range(config.n_layers)
            rows = {f"layers.{i}.": tuple(made_up(config, i, part, self.n_before) for part in (0, 1)) for i in layers}
            past.begin_behind(self.n_before, rows)
        return past

    def write(self, path: Path) -> None:
        """Writes the file."""
        write_stored(self.config, path, self.storage)

    def read(self, path: Path) -> Scheme:
        """The reference of the file."""
        scheme = read_file(path)
        if self.attend:
            scheme.attend = attention_int8 if self.attend == "int8" else partial(attention_kept, self.attend)  # type: ignore[attr-defined]
        return scheme


def made_up(config: Config, layer: int, part: int, n: int) -> np.ndarray:
    """Keys (part 0) or values (part 1) of n positions that were not run, (n, G, head_dim) fp32 from 0.5 to 1."""
    size = n * config.kv_dim
    u = words(CACHE_TENSOR + 2 * layer + part, 0, size // 2).view("<u4")
    return floats(u, -1, signed=True).reshape(n, config.n_kv_heads, config.head_dim)


SMALL = {"vocab_size": 1024}  # the classifier would be most of the work
CHUNK = 131  # tokens: more than a program runs at a time, 128
LONG = {"n_prompt": CHUNK, "changes": SMALL}
FEW = {"n_prompt": 2, "n_new": 3, "changes": SMALL}  # tokens, behind many that are made up
PARTS = {**SMALL, "moe_hidden_dim": 128}  # all 128 experts of a 30B-A3B, with few rows each


def dense_formats(n: int) -> Iterator[list[MatrixFormat]]:
    """Every format of GPTQ files, n to a file, where those in groups of 32 are together; some twice, so that n are."""
    of_32 = sorted(form for form in FORMATS if form.group == 32)
    others = sorted(form for form in FORMATS if form.group != 32)
    for forms in (of_32, others):
        for start in range(0, len(forms), n):
            chosen = forms[start : start + n]
            yield [chosen[i % len(chosen)] for i in range(n)]


def mixture(kind: str, group: int, *, pure: bool = False) -> Storage:
    """A MoE file whose experts are of that kind."""
    return Storage(MOE_FILE, 0, layout=MoeLayout(kind, group, pure=pure))


def cases() -> dict[str, Case]:
    """All, by name."""
    found = {
        "qwen3-0.6b.q8": Case("qwen3-0.6b", SCHEMES["q8"], **LONG),
        "qwen3-0.6b.q8-g32": Case("qwen3-0.6b", Storage(Q8_FILE, 32), changes=SMALL),
        "qwen3-0.6b.q8-400": Case("qwen3-0.6b", SCHEMES["q8"], n_prompt=400, changes={**SMALL, "hidden_dim": 512}),
        "qwen3-0.6b.kv-f16": Case("qwen3-0.6b", SCHEMES["q8"], attend="f16", changes=SMALL),
        "qwen3-0.6b.kv-q8": Case("qwen3-0.6b", SCHEMES["q8"], attend="q8", changes=SMALL),
        "qwen3-0.6b.yarn": Case("qwen3-0.6b", SCHEMES["q8"], changes={
            **SMALL, "rope_scaling": yarn(4.0, 32, 128, 1000000.0), "max_seq_len": 512}),
        "qwen3-0.6b.linear": Case("qwen3-0.6b", SCHEMES["q8"], changes={
            **SMALL, "rope_scaling": linear(2.0, 128, 128), "max_seq_len": 512}),
        "llama-3.2-1b.q8": Case("llama-3.2-1b", SCHEMES["q8"], n_prompt=20),
        "llama-3.2-1b.w8a8": Case("llama-3.2-1b", SCHEMES["w8a8"], **LONG),
        "llama-3.2-1b.w8a8-g32": Case("llama-3.2-1b", Storage(W8A8_FILE, 32), changes=SMALL),
        "llama-3.2-1b.w8a8-static": Case("llama-3.2-1b", Storage(W8A8_FILE, 0, static=True), changes=SMALL),
        "llama-3.2-1b.attn8": Case("llama-3.2-1b", SCHEMES["w8a8"], attend="int8", n_prompt=300, changes=SMALL),
        "llama-3.2-1b.rotated": Case("llama-3.2-1b", SCHEMES["w8a8"], changes={**SMALL, "rotation_block": 2048}),
        "qwen3-0.6b.at-4096": Case("qwen3-0.6b", SCHEMES["q8"], n_before=4096, **FEW),
        "qwen3-0.6b.at-40000": Case("qwen3-0.6b", SCHEMES["q8"], n_before=40000, **FEW),
        "qwen3-0.6b.kv-q8-at-4096": Case("qwen3-0.6b", SCHEMES["q8"], n_before=4096, attend="q8", **FEW),
        "llama-3.2-1b.attn8-at-4096": Case("llama-3.2-1b", SCHEMES["w8a8"], n_before=4096, attend="int8", **FEW),
        "qwen3-14b.q8": Case("qwen3-14b", SCHEMES["q8"], changes={**SMALL, "dim": 1280, "hidden_dim": 1280}),
        "qwen3-30b-a3b.a8w8": Case("qwen3-30b-a3b", mixture("a8w8", 0), n_prompt=CHUNK, changes=PARTS),
        "qwen3-30b-a3b.a8w4-row": Case("qwen3-30b-a3b", mixture("a8w4", 0), changes=PARTS),
        "qwen3-30b-a3b.a8w4-g32": Case("qwen3-30b-a3b", mixture("a8w4", 32), changes=PARTS),
        "qwen3-30b-a3b.a8w4-g128": Case("qwen3-30b-a3b", mixture("a8w4", 128), changes=PARTS),
        "qwen3-30b-a3b.a8w4-pure": Case("qwen3-30b-a3b", mixture("a8w4", 64, pure=True), changes=PARTS),
        "qwen3-30b-a3b.mxfp8": Case("qwen3-30b-a3b", mixture("mxfp8", 32), changes=PARTS),
        "qwen3-30b-a3b.mxfp8-pure": Case("qwen3-30b-a3b", mixture("mxfp8", 64, pure=True), changes=PARTS),
    }  # fmt: skip
    for i, formats in enumerate(dense_formats(8)):  # of q, k, v, o, gate, down and up, of embedding and classifier
        found[f"qwen3-0.6b.gptq-{i}"] = Case(
            "qwen3-0.6b", mixed(formats[-1], *formats), n_prompt=40 if i else CHUNK, changes={**SMALL, "tied": False}
        )
    for i, (first, *others) in enumerate(dense_formats(2)):
        found[f"qwen3-30b-a3b.ladder-{i}"] = Case(
            "qwen3-30b-a3b", ladder(first, first, others[-1]), changes={**PARTS, "dim": 1024}
        )
    whole = {"n_prompt": 20, "takes_long": True, "changes": {"vocab_size": 16384}}
    for like, scheme in (("llama-3.2-3b", "w8a8"), ("qwen3-4b", "gptq"), ("qwen3-14b", "q8"), ("qwen3-14b", "gptq")):
        found[f"{like}.{scheme}-whole"] = Case(like, SCHEMES[scheme], **whole)
    found["qwen3-30b-a3b.a8w8-whole"] = Case("qwen3-30b-a3b", mixture("a8w8", 0), **whole)
    found["qwen3-30b-a3b.ladder-whole"] = Case("qwen3-30b-a3b", ladder(*[MatrixFormat(4, 128)] * 2), **whole)
    return found


CASES = cases()


# ----------------------------------------------------------------------------
# Goldens


def golden_of(case: Case, path: Path) -> dict[str, Any]:
    """What the reference says of a case, whose file is `path`."""
    scheme, config = case.read(path), case.config
    past, digests, chained = case.past(), StepDigests(case.n_before), digest(np.empty(0))
    tokens, ids = token_ids(case.n_prompt, config.vocab_size), []

    def step(name: str, value: np.ndarray) -> np.ndarray:
        is_of_all = name.endswith(QUANTIZED_CACHE)  # also of keys and values of earlier passes
        digests(name, value[-len(tokens) :] if is_of_all else value)
        return value

    while len(ids) < case.n_new:
        last = forward(config, scheme, np.array(tokens), step, past)[-1]
        chained = digest(last, chained)
        tokens = [int(last.argmax())]
        ids += tokens
    before = {"n_before": case.n_before} if case.n_before else {}
    about = {"header": case.storage.header(config).hex(), "n_prompt": case.n_prompt}
    return about | before | {"file_crc32": crc32(path), "ids": ids, "logits": f"{chained:016x}", "steps": digests.hex()}


def crc32(path: Path) -> int:
    """Of a whole file."""
    found = 0
    with path.open("rb") as f:
        while part := f.read(1 << 22):
            found = zlib.crc32(part, found)
    return found


def make_sizes(only: str | None, takes_long: bool, out: Path = GOLDENS) -> None:
    """Writes the goldens of all cases, or of those that match `only`, into the file `out`, which keeps the others."""
    goldens = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    chosen = [n for n, case in CASES.items() if fnmatchcase(n, only or "*") and (takes_long or not case.takes_long)]
    if not chosen:
        raise ModelError(f"--only {only}: no case{'' if takes_long else '; those in -whole need --all'}")
    for name in chosen:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.bin"
            case.write(path)
            goldens[name] = golden_of(case, path)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(goldens[key])}" for key in CASES if key in goldens)
        with replacing(out) as f:
            f.write(("{\n" + lines + "\n}\n").encode())
        print(f"{name}: digest {goldens[name]['logits']}", flush=True)


def case_of(name: str) -> Case:
    """Raises ModelError for a name that none has."""
    if name not in CASES:
        raise ModelError(f"{name}: no such case; there are {', '.join(CASES)}")
    return CASES[name]


def step_of(name: str, step: str) -> dict[str, np.ndarray]:
    """A step of a case, for all tokens that are run, and these. Raises ModelError."""
    case, recorder = case_of(name), Recorder()
    golden = json.loads(GOLDENS.read_text(encoding="utf-8"))[name]
    config = case.config
    tokens = token_ids(case.n_prompt, config.vocab_size) + golden["ids"][:-1]

    def keep(found: str, value: np.ndarray) -> np.ndarray:
        return recorder(found, value) if found == step else value

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bin"
        case.write(path)
        forward(config, case.read(path), np.array(tokens), keep, case.past())
    if step not in recorder.tensors:
        raise ModelError(f"{name} has no step {step}; golden/sizes.json lists them")
    return {"tokens": np.array(tokens, np.int32)} | recorder.tensors


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m models.sizes", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("make", help="write the goldens")
    p.add_argument("--out", type=Path, default=GOLDENS)
    p.add_argument("--only", metavar="CASE", help="one, or a pattern")
    p.add_argument("--all", action="store_true", help="also those that take minutes and gigabytes")
    p = commands.add_parser("write", help="write the model file of a case")
    p.add_argument("case", metavar="CASE", help=f"{next(iter(CASES))}, or another of golden/sizes.json")
    p.add_argument("out", type=Path, metavar="OUT.bin")
    p = commands.add_parser("step", help="write a step of a case, where a digest differs")
    p.add_argument("case", metavar="CASE")
    p.add_argument("step", metavar="STEP", help="such as layers.1.attn.mix")
    p.add_argument("out", type=Path, metavar="OUT.safetensors")
    args = parser.parse_args(argv)
    try:
        if args.command == "make":
            make_sizes(args.only, args.all, args.out)
        elif args.command == "write":
            case_of(args.case).write(args.out)
        else:
            write_trace(args.out, step_of(args.case, args.step))
    except (ValueError, OSError, MemoryError) as error:
        print(f"sizes: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

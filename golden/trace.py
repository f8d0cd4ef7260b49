"""Traces: every intermediate tensor of a run, by step name, in one safetensors file; and their comparison.

`golden diff A B` says whether every step of B is equal to the bit, and otherwise names the first that is not, and by
how much. With a model, each operation is judged on its own instead: the reference computes every step from B's own
inputs, so that what is behind a wrong operation is judged, too, and a port may approximate a step on purpose.

A trace that has fp16 tensors is AWQ's, whose sums may be taken in any order. Its fp32 tensors are held to 1e-5, by the
norm; those in fp16 to 5e-4, half the distance between neighbours, because a value near the middle of two may go to
either; attn.mix to 1e-3, because attention may round its probabilities to fp16, too. Once an fp16 tensor differs,
everything after it is held to 1e-2, behind hundreds of tokens to 5e-2.

A trace may be of some positions only, those in its tensor `positions`. Each step then has a row for each of them, but
for what attention reads of earlier tokens, `attn.k_rope` and `attn.v_proj`: these have a row for every token.

B need not have every step. What it has is judged; where the input of a step is not there, the reference goes on with
its own. `Tolerances` can give a step a limit of its own, for a port that approximates it on purpose.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from formats.checkpoint import Config
from formats.errors import ModelError, one_line
from formats.files import check_file, replacing
from golden.forward import Step

OP_TOLERANCE = 1e-5  # one operation, relative by norm
HALF_TOLERANCE = 5e-4  # one operation whose result is rounded to fp16: about 2^-11
HALF_MIX_TOLERANCE = 1e-3  # attention, where probabilities may be rounded as well
HALF_PASS_TOLERANCE = 1e-2  # a whole pass with fp16 between the operations
HALF_PAST_TOLERANCE = 5e-2  # keys and values of hundreds of tokens


def is_close(trace: Mapping[str, np.ndarray]) -> bool:
    """Whether a trace is of a scheme whose sums may be taken in any order: AWQ's, which has fp16 tensors."""
    return any(value.dtype == np.float16 for value in trace.values())


def op_tolerance(name: str, value: np.ndarray) -> float:
    """What the result of one operation is held to in such a trace, relative by norm."""
    if value.dtype.kind != "f":
        return 0
    if value.dtype != np.float16:
        return OP_TOLERANCE
    return HALF_MIX_TOLERANCE if name.endswith("attn.mix") else HALF_TOLERANCE


@dataclass(frozen=True)
class Tolerances:
    """Limits of a port's own, by patterns of step names: `attn.probs`, `layers.3.ffn.*`, `ffn.swiglu.q`.

    The last pattern that matches a step's name, with or without `layers.N.`, counts. The limit is a relative error by
    norm; of codes, the share that may differ.
    """

    by_pattern: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str, otherwise: float) -> float:
        """The limit of a step; `otherwise` if no pattern matches."""
        short = name.split(".", 2)[-1] if name.startswith("layers.") else name
        limits = [
            limit
            for pattern, limit in self.by_pattern.items()
            if fnmatchcase(name, pattern) or fnmatchcase(short, pattern)
        ]
        return limits[-1] if limits else otherwise

    def has(self, name: str) -> bool:
        """Whether a step has a limit of its own."""
        return self.of(name, -1) >= 0


THE_CONTRACT = Tolerances()  # no step has a limit of its own


def read_tolerances(profile: Path | None, options: Iterable[str]) -> Tolerances:
    """Limits from a profile, a JSON object of patterns and numbers, and then from options `STEP=VALUE`.

    Raises ValueError naming the file or the option, and the value, if one is no number of 0 or more.
    """
    limits: dict[str, float] = {}

    def add(where: str, pattern: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise ValueError(f"{where}: {pattern} is {value!r}, expected a number of 0 or more")
        limits.pop(pattern, None)  # the last one counts
        limits[pattern] = float(value)

    if profile is not None:
        try:
            loaded = json.loads(profile.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{profile}: {error}") from None
        if not isinstance(loaded, dict):
            raise ValueError(f"{profile}: expected a JSON object of steps and limits")
        for pattern, value in loaded.items():
            add(str(profile), pattern, value)
    for option in options:
        pattern, _, text = option.rpartition("=")
        try:
            value: object = float(text)
        except ValueError:
            value = text
        if not pattern:
            raise ValueError(f"--tolerance: {option!r}, expected STEP=VALUE")
        add("--tolerance", pattern, value)
    return Tolerances(limits)


CACHED = ("attn.k_rope", "attn.v_proj")  # what attention reads of earlier tokens: traces have them of all tokens


def is_cached(name: str) -> bool:
    """Whether a step has a row for every token, even in a trace of some positions."""
    return name == "tokens" or name.endswith(CACHED)


def positions_of(trace: Mapping[str, np.ndarray]) -> np.ndarray:
    """The positions whose steps a trace has, (rows,); all unless it names them. It has tokens."""
    return trace["positions"] if "positions" in trace else np.arange(len(trace["tokens"]))


def at_positions(tensors: Mapping[str, np.ndarray], positions: Iterable[int]) -> dict[str, np.ndarray]:
    """What a trace of some positions has, from the trace of a whole run."""
    rows = np.array(list(positions), np.int32)
    return {name: value if is_cached(name) else value[rows] for name, value in tensors.items()} | {"positions": rows}


class Recorder:
    """A step function that keeps every value, in the order of computation."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}

    def __call__(self, name: str, value: np.ndarray) -> np.ndarray:
        self.tensors[name] = value
        return value


def write_trace(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a trace; safetensors sorts by type and name, the order of steps is rebuilt from the names."""
    with replacing(path) as f:
        f.write(save({name: np.ascontiguousarray(value) for name, value in tensors.items()}))


TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")


def read_trace(path: Path | str) -> dict[str, np.ndarray]:
    """Reads a trace. Raises ModelError naming the file if it is none."""
    check_file(Path(path))
    try:
        with safe_open(path, framework="numpy") as f:
            for name in f.keys():  # noqa: SIM118  (no dict)
                if f.get_slice(name).get_dtype() not in TYPES:
                    kind = f.get_slice(name).get_dtype()
                    raise ModelError(f"{path}: tensor {name} has type {kind}, expected one of {', '.join(TYPES)}")
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from None


def check_tokens(path: Path, trace: dict[str, np.ndarray], config: Config, dimensions: tuple[int, ...] = (1,)) -> None:
    """Refuses a trace whose tokens a model cannot have run on. Raises ModelError.

    dimensions: how many they may have; the last is a sequence.
    """
    tokens = trace.get("tokens")
    if tokens is None:
        raise ModelError(f"{path}: the trace has no tokens")
    if tokens.ndim not in dimensions or tokens.dtype.kind not in "iu":
        raise ModelError(f"{path}: tokens are {tokens.dtype} {tokens.shape}, expected a list of whole numbers")
    if not tokens.size or tokens.shape[-1] > config.max_seq_len:
        found = f"{tokens.shape[-1]} tokens" if tokens.size else "no tokens"
        raise ModelError(f"{path}: {found}, expected 1 to the model's context, {config.max_seq_len}")
    wrong = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
    if wrong.size:
        raise ModelError(f"{path}: token {wrong[0]} is no id below the model's vocab_size, {config.vocab_size}")
    check_positions(path, trace)


def check_positions(path: Path, trace: dict[str, np.ndarray]) -> None:
    """Refuses a trace whose positions, if it names them, are not some of its tokens', in order. Raises ModelError."""
    if "positions" not in trace:
        return
    positions, tokens = trace["positions"], trace.get("tokens")
    if tokens is None or tokens.ndim != 1:
        raise ModelError(f"{path}: the trace has positions and no tokens (n,)")
    if positions.ndim != 1 or positions.dtype.kind not in "iu" or not positions.size:
        raise ModelError(f"{path}: positions are {positions.dtype} {positions.shape}, expected a list of whole numbers")
    if positions.min() < 0 or positions.max() >= len(tokens) or (np.diff(positions.astype(np.int64)) <= 0).any():
        raise ModelError(f"{path}: positions are not ascending numbers from 0 to {len(tokens) - 1}")


_ORDER = [
    "attn.norm", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.q_norm", "attn.k_norm", "attn.q_rope",
    "attn.k_rope", "attn.scores", "attn.probs", "attn.weights", "attn.mix", "attn.o_proj", "attn.residual",
    "ffn.norm", "ffn.gate_proj", "ffn.up_proj", "ffn.swiglu", "ffn.down_proj", "moe.router", "moe.experts",
    "moe.weights", "moe.gate_up_proj", "moe.swiglu", "moe.down_proj", "moe.mix", "ffn.residual",
]  # fmt: skip


_OUTSIDE = ["tokens", "positions", "embed", "rotate", "rotate_back", "norm", "logits"]  # before and behind the layers
_LAYER_STEP = re.compile(r"layers\.(\d{1,5})\.(.+)", re.ASCII | re.DOTALL)


def step_order(name: str) -> tuple[int, int, int]:
    """Sort key that puts step names in the order of computation: accumulators before the tensor that is made of them;
    gathered values, codes and scales after it."""
    base, part = name, 1
    for suffix, place in ((".acc", 0), (".q", 3), (".s", 4)):
        if name.endswith(suffix):
            base, part = name.removesuffix(suffix), place
    if base.endswith(".gathered"):
        base, part = base.removesuffix(".gathered"), max(part, 2)
    if found := _LAYER_STEP.fullmatch(base):
        layer, step = int(found[1]), found[2]
        return 2 + layer, _ORDER.index(step) if step in _ORDER else len(_ORDER), part
    if base in _OUTSIDE[:4]:
        return _OUTSIDE.index(base) - 2, 0, part
    return (1 << 30) + (_OUTSIDE.index(base) if base in _OUTSIDE else len(_OUTSIDE)), 0, part


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |a| by norm; 0 if both are zero, infinite if either is not finite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    norm, difference = np.linalg.norm(a), np.linalg.norm(a - b)
    return float(difference / norm) if norm else (0.0 if difference == 0 else float("inf"))


@dataclass
class StepReport:
    """How one step of two traces compares."""

    name: str
    error: float  # relative by norm; for codes, the share that differ
    note: str
    ok: bool
    missing: bool = False


def missing_step(name: str) -> StepReport:
    """A step that the trace to be judged has not."""
    return StepReport(name, float("inf"), "missing", ok=False, missing=True)


def units_between(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance of two fp32 or fp16 arrays in units in the last place: how many numbers lie between."""
    bits = np.int32 if a.dtype == np.float32 else np.int16
    ordered = [np.where(x < 0, np.iinfo(bits).min - x.astype(np.int64), x) for x in (a.view(bits), b.view(bits))]
    return int(np.abs(ordered[0] - ordered[1]).max())


def judge_step(name: str, a: np.ndarray, b: np.ndarray, limit: float) -> StepReport:
    """Whether b, a step of a port, is what it should be. limit: relative by norm, of integers the share; 0: no bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return StepReport(name, float("inf"), f"{b.dtype} {b.shape}, expected {a.dtype} {a.shape}", ok=False)
    if not a.size:
        return StepReport(name, float("inf"), "no values", ok=False)
    if a.tobytes() == b.tobytes():
        return StepReport(name, 0.0, "", ok=True)
    differ = a != b if a.dtype.kind != "f" else a.view(f"u{a.itemsize}") != b.view(f"u{a.itemsize}")
    n = int(differ.sum())
    note = f"{n} of {a.size} differ"
    if a.dtype.kind == "f":
        note += f", by up to {units_between(a, b)} units in the last place"
        error = relative_error(a, b)
    else:
        error = n / a.size
    return StepReport(name, error, note, 0 < limit >= error)


def compare(
    a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerances: Tolerances = THE_CONTRACT
) -> list[StepReport]:
    """Every step of the two traces, in the order of computation."""
    reports, close = [], is_close(a)
    behind = 0.0  # the tolerance of what comes behind an fp16 value that was rounded the other way
    for name in sorted(a.keys() | b.keys(), key=step_order):
        if name not in b:
            reports.append(missing_step(name))
        elif name not in a:
            reports.append(StepReport(name, float("inf"), "A has no such step", ok=False))
        else:
            limit = max(behind, op_tolerance(name, a[name])) if close else 0
            if close and "positions" in a and name.endswith(CACHED):
                behind = limit = HALF_PAST_TOLERANCE
            reports.append(judge_step(name, a[name], b[name], tolerances.of(name, limit)))
            if a[name].dtype == np.float16 and reports[-1].error > 0:
                behind = max(behind, HALF_PASS_TOLERANCE)
    return reports


def replay(
    run: Callable[[np.ndarray, Step], object], trace: dict[str, np.ndarray], tolerances: Tolerances = THE_CONTRACT
) -> list[StepReport]:
    """Every step of a trace against the reference, each computed from the trace's own inputs.

    trace: with tokens that the model has (`check_tokens`).
    run(tokens, step) is the reference's forward pass. Steps that the trace has not go on with the reference's own.
    """
    reports, close = [], is_close(trace)
    rows = positions_of(trace)
    is_whole = len(rows) == len(trace["tokens"])

    def step(name: str, value: np.ndarray) -> np.ndarray:
        mine = value if is_whole or is_cached(name) else value[rows]
        if name not in trace:
            reports.append(missing_step(name))
            return value
        found = trace[name]
        limit = 0 if not close else op_tolerance(name, mine) if is_whole else HALF_PAST_TOLERANCE
        reports.append(judge_step(name, mine, found, tolerances.of(name, limit)))
        if found.shape != mine.shape or found.dtype != mine.dtype:
            return value
        if mine is not value:
            value = value.copy()
            value[rows] = found
            return value
        return found

    run(trace["tokens"], step)
    known = {r.name for r in reports} | {"tokens", "positions"}
    reports += [StepReport(name, float("inf"), "no such step", ok=False) for name in sorted(trace.keys() - known)]
    return reports


WITHIN, OUTSIDE, INCOMPLETE = 0, 1, 3  # exit codes of a comparison


def summarize(reports: list[StepReport], verbose: bool) -> tuple[str, int]:
    """A table of the steps (all, or those that are not as they should be) with closing lines, and the exit code.

    INCOMPLETE: what is there is within the contract, but some of it is missing. With nothing there it is OUTSIDE.
    """
    judged, missing = [r for r in reports if not r.missing], [r.name for r in reports if r.missing]
    bad, computed = [r for r in judged if not r.ok], [r for r in judged if r.name != "tokens"]
    rows = judged if verbose else bad
    lines = [f"{'step':<32} {'error':>9}"] if rows else []
    lines += [f"{r.name:<32} {r.error:9.2e} {'  ' if r.ok else '! '}{r.note}".rstrip() for r in rows]
    if missing:
        named = missing if verbose or len(missing) < 5 else [*missing[:2], "...", missing[-1]]
        lines.append(f"{len(missing)} missing: {', '.join(named)}")
    worst = max(judged, key=lambda r: r.error, default=None)
    good = "equal to the bit" if worst is None or worst.error == 0 else "within their tolerances"
    verdict = f"all {len(judged)} steps are {good}"
    if not computed:
        verdict = "nothing to judge"
    elif bad:
        verdict = f"{len(bad)} of {len(judged)} steps differ, the first at {bad[0].name}"
    elif missing:
        verdict = f"{len(judged)} of {len(reports)} steps are there, all {good}"
    if worst is not None and worst.error > 0:
        verdict += f"; largest error {worst.error:.2e} at {worst.name}"
    code = OUTSIDE if bad or not computed else INCOMPLETE if missing else WITHIN
    return "\n".join(one_line(line) for line in [*lines, verdict]), code

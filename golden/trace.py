"""Traces: every intermediate tensor of a run, by step name, in one safetensors file; and their comparison.

`golden diff A B` holds two traces against the numeric contract (docs/numerics.md):

- int8 codes and scales: within each trace, `NAME.q` and `NAME.s` are exactly what quantizing that trace's `NAME`
  gives. Between the traces a code may differ only where a value lies so close to a rounding boundary that the
  allowed fp32 difference decides it. Where A has one scale for all tokens that is not their amax / 127, the scales
  are static (golden/w8a8.py): B has to have the same, and codes are what quantizing with them gives.
- fp32 tensors: within 1e-5 of each other, relative by norm, as long as all codes before them are equal. A code
  that rounded the other way is a difference of one unit, and everything after it can only be held to the
  tolerance of the whole pass, 1e-3.
- fp16 tensors (AWQ): within 5e-4, half the distance between neighbours, because a value near the middle of two may
  go to either; attn.mix within 1e-3, because attention may round its probabilities to fp16, too. Once an fp16
  tensor differs at all, everything after it is held to 1e-2.
- accumulators (`.acc`, int32): equal in every token whose codes are.

With a model, each operation is judged on its own instead: the reference computes every step from B's own inputs,
so one early rounding does not blur the steps behind it, and a wrong operation is named even if others hide it.

A trace may be of some positions only, those in its tensor `positions`. Each step then has a row for each of them, but
for what attention reads of earlier tokens, `attn.k_rope` and `attn.v_proj`: these have a row for every token. Among
hundreds of tokens some have a code that rounds the other way, and in every token behind them a few more do. So those
earlier rows are held to 5e-2; if they differ by more than one operation may, everything behind them as well. With a
model this is so for the earlier rows alone.

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
from golden.channel_scaling import PLACE_READ_BY
from golden.forward import Step
from golden.mx import quantize_mx
from golden.q8 import quantize
from golden.w8a8 import quantize_static

OP_TOLERANCE = 1e-5  # one operation, relative by norm
PASS_TOLERANCE = 1e-3  # a whole int8 pass
HALF_TOLERANCE = 5e-4  # one operation whose result is rounded to fp16: about 2^-11
HALF_MIX_TOLERANCE = 1e-3  # attention, where probabilities may be rounded as well
HALF_PASS_TOLERANCE = 1e-2  # a whole pass with fp16 between the operations
PAST_TOLERANCE = 5e-2  # keys and values of hundreds of tokens, in some of which codes rounded the other way


def op_tolerance(name: str, value: np.ndarray) -> float:
    """What the result of one operation is held to, relative by norm."""
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


def _is_static(scales: np.ndarray) -> bool:
    """Whether the scales of an activation could be static: one for all tokens."""
    return scales.ndim == 2 and scales.shape[1] == 1 and bool((scales == scales[0, 0]).all())


def _own_rounding(
    name: str, a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerances: Tolerances
) -> StepReport | None:
    """What is wrong with codes or scales in either trace as roundings of its own values; None if nothing is."""
    base, static = name[:-2], False
    for which, trace in (("A", a), ("B", b)):
        if base not in trace or base + ".s" not in trace:
            if which == "B":
                return None  # it leaves out what its codes came from
            return StepReport(name, float("inf"), f"A has no {base} or no {base}.s", ok=False)
        if trace[name].size % max(trace[base + ".s"].size, 1) or not trace[base + ".s"].size:
            return StepReport(name, float("inf"), f"{which}'s scales do not divide its codes", ok=False)
        value, codes, is_mx = trace[base], trace[name], trace[name].dtype == np.uint8
        types = value.dtype == np.float32 and (is_mx or codes.dtype == np.int8)
        if not types or value.ndim not in (2, 3) or value.shape != codes.shape:
            what = f"{which}: {codes.dtype} {codes.shape} of {value.dtype} {value.shape}, expected int8 of float32"
            return StepReport(name, float("inf"), what, ok=False)
        group_size = codes.size // trace[base + ".s"].size
        if codes.shape[-1] % group_size:
            return StepReport(name, float("inf"), f"{which}'s scales do not divide its codes", ok=False)
        scales = trace[base + ".s"]
        rows = value.reshape(-1, value.shape[-1])  # of experts' steps there are some a token
        expected = quantize_mx(rows, group_size) if is_mx else quantize(rows, group_size)
        expected = expected._replace(
            codes=expected.codes.reshape(codes.shape), scales=expected.scales.reshape(*codes.shape[:-1], -1)
        )
        if which == "A":
            static = not is_mx and _is_static(scales) and not np.array_equal(expected.scales, scales)
            static_scale = scales[0, 0] if static else None
        if static:
            expected = quantize_static(value, static_scale)
        if scales.shape != expected.scales.shape:
            note = f"{which}: {scales.dtype} {scales.shape}, expected {expected.scales.dtype} {expected.scales.shape}"
            return StepReport(base + ".s", float("inf"), note, ok=False)
        wrong = int((expected.codes != trace[name]).sum())
        if wrong > tolerances.of(name, 0) * trace[name].size:
            note = f"{which}: {wrong} codes are not its own rounding"
            return StepReport(name, wrong / trace[name].size, note, ok=False)
        error = relative_error(expected.scales, scales)
        if not np.array_equal(expected.scales, scales) and error > tolerances.of(base + ".s", -1):
            note = f"{which}: scales are not {'the static one of A' if static else 'its own amax / 127'}"
            return StepReport(base + ".s", float("inf"), note, ok=False)
    return None


def _compare_codes(
    name: str, a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerances: Tolerances, behind: float
) -> StepReport:
    """Judges `name` (ending in .q) and its scales; see the module's docstring. behind: as in `compare`."""
    wrong = _own_rounding(name, a, b, tolerances)
    if wrong is not None:
        return wrong
    steps = np.abs(a[name].astype(int) - b[name].astype(int))
    flipped = int((steps != 0).sum())
    share = flipped / steps.size
    ok = share <= tolerances.of(name, 0) if tolerances.has(name) else steps.max() <= 1 or behind >= PAST_TOLERANCE
    return StepReport(name, share, f"{flipped} codes rounded the other way" if flipped else "", bool(ok))


# What each product of a layer reads, by step names.
_INPUT = PLACE_READ_BY | {"moe.gate_up_proj": "ffn.norm", "moe.down_proj": "moe.swiglu"}


def _compare_accumulators(
    name: str, a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerances: Tolerances
) -> StepReport:
    """Judges `name` (ending in .acc): equal, but for tokens whose codes are not."""
    found = _LAYER_STEP.fullmatch(name.removesuffix(".acc"))
    codes = f"layers.{found[1]}.{_INPUT[found[2]]}.q" if found and found[2] in _INPUT else ""
    differ = (a[name] != b[name]).reshape(len(a[name]), -1).any(axis=1)  # by token
    if codes in a and codes in b and a[codes].shape == b[codes].shape and len(a[codes]) == len(differ):
        excused = (a[codes] != b[codes]).reshape(len(differ), -1).any(axis=1)
    else:
        excused = np.zeros_like(differ)
    wrong = int((a[name] != b[name])[~excused].sum())
    note = f"{wrong} differ" if wrong else f"of other codes in {int(differ.sum())} tokens" if differ.any() else ""
    return StepReport(name, wrong / a[name].size, note, wrong <= tolerances.of(name, 0) * a[name].size)


def compare(
    a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerances: Tolerances = THE_CONTRACT
) -> list[StepReport]:
    """Every step of the two traces, in the order of computation."""
    reports = []
    behind = 0.0  # the tolerance of what comes behind a value that was rounded the other way
    # Rows of earlier tokens, in a trace of some positions. Both have the same, or the shapes do not fit.
    past = np.ones(len(a["tokens"]), bool) if "positions" in a else np.zeros(0, bool)
    if past.size:
        past[a["positions"]] = False
    for name in sorted(a.keys() | b.keys(), key=step_order):
        if name not in b:
            reports.append(missing_step(name))
        elif name not in a:
            reports.append(StepReport(name, float("inf"), "A has no such step", ok=False))
        elif a[name].shape != b[name].shape or a[name].dtype != b[name].dtype:
            shapes = f"{a[name].dtype} {a[name].shape} in A, {b[name].dtype} {b[name].shape} in B"
            reports.append(StepReport(name, float("inf"), shapes, ok=False))
        elif not a[name].size:
            reports.append(StepReport(name, float("inf"), "no values", ok=False))
        elif name.endswith(".q"):
            reports.append(_compare_codes(name, a, b, tolerances, behind))
            behind = max(behind, PASS_TOLERANCE if reports[-1].error > 0 else 0)
        elif name.endswith(".acc") and a[name].dtype.kind == "i" and a[name].ndim > 1:
            reports.append(_compare_accumulators(name, a, b, tolerances))
        elif a[name].dtype.kind in "iu":
            same = bool(np.array_equal(a[name], b[name]))
            reports.append(StepReport(name, 0.0 if same else float("inf"), "" if same else "differ", same))
        else:
            value, other = a[name], b[name]
            if name.endswith(CACHED) and len(value) == len(past):
                reports += _compare_past(name, value[past], other[past], tolerances.of(name, PAST_TOLERANCE))
                if relative_error(value[past], other[past]) > op_tolerance(name, value):
                    behind = PAST_TOLERANCE
                value, other = value[~past], other[~past]
            error = relative_error(value, other)
            limit = tolerances.of(name, max(behind, op_tolerance(name, value)))
            reports.append(StepReport(name, error, "" if error <= limit else f"above {limit:g}", error <= limit))
            if value.dtype == np.float16 and error > 0:
                behind = max(behind, HALF_PASS_TOLERANCE)
    return reports


def _compare_past(name: str, a: np.ndarray, b: np.ndarray, limit: float) -> list[StepReport]:
    """What is wrong with the rows of earlier tokens: one report, or none if nothing is."""
    error = relative_error(a, b)
    return [] if error <= limit else [StepReport(name, error, f"in earlier tokens above {limit:g}", ok=False)]


def replay(
    run: Callable[[np.ndarray, Step], object], trace: dict[str, np.ndarray], tolerances: Tolerances = THE_CONTRACT
) -> list[StepReport]:
    """Every step of a trace against the reference, each computed from the trace's own inputs.

    trace: with tokens that the model has (`check_tokens`).
    run(tokens, step) is the reference's forward pass. Codes and scales have to be equal, fp32 within 1e-5,
    fp16 within 5e-4 (attn.mix: 1e-3). Steps that the trace has not go on with the reference's own values.
    """
    reports = []
    rows = positions_of(trace)
    past = np.delete(np.arange(len(trace["tokens"])), rows)

    def step(name: str, value: np.ndarray) -> np.ndarray:
        if not len(past):
            return judge(name, value)
        if name not in trace or not is_cached(name) or trace[name].shape != value.shape:
            mine = value.copy()
            mine[rows] = judge(name, value[rows])
            return mine
        reports.extend(_compare_past(name, value[past], trace[name][past], tolerances.of(name, PAST_TOLERANCE)))
        judge(name, value[rows], trace[name][rows])
        return trace[name]

    def judge(name: str, value: np.ndarray, found: np.ndarray | None = None) -> np.ndarray:
        found = trace.get(name) if found is None else found
        if found is None:
            reports.append(missing_step(name))
            return value
        if found.shape != value.shape or found.dtype != value.dtype:
            what = f"{found.dtype} {found.shape}, expected {value.dtype} {value.shape}"
            reports.append(StepReport(name, float("inf"), what, ok=False))
            return value
        if value.dtype.kind in "iu" or name.endswith(".s"):
            wrong = int((found != value).sum())
            error = relative_error(value, found) if name.endswith(".s") else wrong / value.size
            ok = wrong == 0 or error <= tolerances.of(name, -1)
            reports.append(StepReport(name, wrong / value.size, f"{wrong} differ" if wrong else "exact", ok))
        else:
            error = relative_error(value, found)
            limit = tolerances.of(name, op_tolerance(name, value))
            reports.append(StepReport(name, error, "" if error <= limit else f"above {limit:g}", error <= limit))
        return found

    run(trace["tokens"], step)
    known = {r.name for r in reports} | {"tokens", "positions"}
    reports += [StepReport(name, float("inf"), "no such step", ok=False) for name in sorted(trace.keys() - known)]
    return reports


WITHIN, OUTSIDE, INCOMPLETE = 0, 1, 3  # exit codes of a comparison


def summarize(reports: list[StepReport], verbose: bool) -> tuple[str, int]:
    """A table of the steps (all, or those outside the contract) with closing lines, and the exit code.

    INCOMPLETE: what is there is within the contract, but some of it is missing. With nothing there it is OUTSIDE.
    """
    judged, missing = [r for r in reports if not r.missing], [r.name for r in reports if r.missing]
    bad, computed = [r for r in judged if not r.ok], [r for r in judged if r.name != "tokens"]
    rows = judged if verbose else bad
    lines = [f"{'step':<32} {'error':>9}"] if rows else []
    lines += [f"{r.name:<32} {r.error:9.2e} {'  ' if r.ok else '! '}{r.note}" for r in rows]
    if missing:
        named = missing if verbose or len(missing) < 5 else [*missing[:2], "...", missing[-1]]
        lines.append(f"{len(missing)} missing: {', '.join(named)}")
    verdict = f"all {len(judged)} steps within the contract"
    if not computed:
        verdict = "nothing to judge"
    elif bad:
        verdict = f"{len(bad)} of {len(judged)} steps outside the contract, the first at {bad[0].name}"
    elif missing:
        verdict = f"{len(judged)} of {len(reports)} steps are there, all within the contract"
    worst = max((r for r in judged if not r.name.endswith(".q")), key=lambda r: r.error, default=None)
    if worst:
        verdict += f"; largest error {worst.error:.2e} at {worst.name}"
    if flips := sum(1 for r in judged if r.name.endswith(".q") and 0 < r.error < 1):
        verdict += f"; {flips} steps have codes that rounded the other way"
    code = OUTSIDE if bad or not computed else INCOMPLETE if missing else WITHIN
    return "\n".join(one_line(line) for line in [*lines, verdict]), code

"""What approximations that hardware likes cost in perplexity, and the ranges of a model's fp32 steps.

    python -m models.approximations MODEL TEXT [--tokens N] [--ranges]

MODEL is a Hugging Face directory or a GGUF file, run in Q8 with groups of 64; products are taken in fp32, of the very
codes and scales (models/quality.py). An approximation takes the place of a step's result; everything else stays exact.
The row `noise` is what differences of one part in a million do: codes round the other way. Less than that is no cost.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from formats.checkpoint import Config
from formats.source import Source, open_model
from golden.accept import log_softmax
from golden.calibration import read_text
from golden.forward import F32, Step, forward, ignore
from golden.perplexity import encode, negative_log_likelihoods, perplexity, windows
from golden.q8 import Q8, Quantized
from models.quality import InFp32

EXP_RANGE = 16.0  # exp(x) of x in -16..0; below it the table has 0
SIGMOID_RANGE = 8.0  # sigmoid(x) of x in -8..8; beyond it the table has 0 and 1
GROUP_SIZE = 64
NOISE = 1e-6  # relative, of the products' results

Exp = Callable[[np.ndarray], np.ndarray]


def exp_table(bits: int) -> Exp:
    """exp(x) for x <= 0 from a table of 2^bits entries: that of the nearest of as many evenly spread arguments."""
    step = EXP_RANGE / 2**bits
    table = np.exp(-step * np.arange(2**bits)).astype(F32)

    def exp(x: np.ndarray) -> np.ndarray:
        index = np.rint(np.minimum(-x, 2 * EXP_RANGE) / step).astype(int)
        return np.where(index < len(table), table[np.minimum(index, len(table) - 1)], F32(0))

    return exp


def sigmoid_table(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """1 / (1 + exp(-x)) from a table of 2^bits entries, each for the middle of its part of the range."""
    step = 2 * SIGMOID_RANGE / 2**bits
    table = (1 / (1 + np.exp(SIGMOID_RANGE - step * (np.arange(2**bits) + 0.5)))).astype(F32)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        index = np.floor((np.clip(x, -SIGMOID_RANGE, SIGMOID_RANGE) + SIGMOID_RANGE) / step).astype(int)
        inside = table[np.clip(index, 0, len(table) - 1)]
        return np.where(x <= -SIGMOID_RANGE, F32(0), np.where(x >= SIGMOID_RANGE, F32(1), inside))

    return sigmoid


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bf16, as fp32."""
    return x.astype(ml_dtypes.bfloat16).astype(F32)


class Approximate:
    """A step function that puts approximations in the place of results. `last` has the step results that they need."""

    def __init__(self, approximations: dict[str, Callable[["Approximate", str, np.ndarray], np.ndarray]]):
        self._approximations = approximations
        self.last: dict[str, np.ndarray] = {}

    def __call__(self, name: str, value: np.ndarray) -> np.ndarray:
        short = name.split(".", 2)[-1] if name.startswith("layers.") else name
        for ending, approximation in self._approximations.items():
            if short.endswith(ending):
                value = approximation(self, name, value)
        self.last[short] = value
        if short in ("embed", "attn.residual", "ffn.residual"):
            self.last["x"] = value
        return value


def probabilities(exp: Exp, reciprocal: bool, a: Approximate, _name: str, _value: np.ndarray) -> np.ndarray:
    """Softmax of the scores with another exp, or with a product by 1 / sum for the quotient."""
    scores = a.last["attn.scores"]
    n = len(scores)
    seen = np.tril(np.ones((n, n), bool))[:, None, :]
    x = np.where(seen, scores, F32(-1e30))
    e = np.where(seen, exp(x - x.max(axis=-1, keepdims=True)), F32(0)).astype(F32)
    total = e.sum(axis=-1, keepdims=True, dtype=F32)
    return e * (F32(1) / total) if reciprocal else e / total


def gated(sigmoid: Callable[[np.ndarray], np.ndarray], a: Approximate, _name: str, _value: np.ndarray) -> np.ndarray:
    """SwiGLU with another sigmoid."""
    gate = a.last["ffn.gate_proj"]
    return (gate * sigmoid(gate) * a.last["ffn.up_proj"]).astype(F32)


def codes_by_reciprocal(a: Approximate, name: str, _value: np.ndarray) -> np.ndarray:
    """int8 codes with 127 * (1 / amax) for 127 / amax: one reciprocal, and a second rounding."""
    x = a.last[name.removesuffix(".q").split(".", 2)[-1] if name.startswith("layers.") else name.removesuffix(".q")]
    groups = x.reshape(len(x), -1, GROUP_SIZE)
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    inv = F32(127) * (F32(1) / np.where(amax > 0, amax, F32(1)))
    return np.clip(np.rint(groups * inv), -127, 127).astype(np.int8).reshape(x.shape)


def norm_in_fp32(config: Config, scheme: Q8, a: Approximate, name: str, _value: np.ndarray) -> np.ndarray:
    """RMSNorm with sum, root and quotient in fp32."""
    x = a.last["x"]
    mean = np.einsum("nk,nk->n", x, x)[:, None] / F32(x.shape[1])
    return scheme.vector(name) * (x * (F32(1) / np.sqrt(mean + F32(config.norm_eps))))


class Bf16Scales(Q8):
    """Q8 whose weights' scales are rounded to bf16."""

    def matrix(self, name: str) -> Quantized:
        exact = super().matrix(name)
        return Quantized(exact.codes, bf16(exact.scales))


def variants(config: Config, source: Source) -> Iterator[tuple[str, Q8, Step]]:
    """Each row of the table: its name, the scheme and the step function."""
    q8, rounded = Q8(source, GROUP_SIZE), Bf16Scales(source, GROUP_SIZE)
    yield "exact", q8, ignore
    rng = np.random.default_rng(0)
    noise = Approximate({"proj": lambda _a, _name, x: x * (1 + NOISE * rng.standard_normal(x.shape)).astype(F32)})
    yield "noise of 1e-6", q8, noise
    for bits in (8, 10, 12):
        yield (
            f"exp of softmax, table of {bits} bits",
            q8,
            Approximate({"attn.probs": partial(probabilities, exp_table(bits), False)}),
        )
    for bits in (8, 10, 12):
        yield f"sigmoid, table of {bits} bits", q8, Approximate({"swiglu": partial(gated, sigmoid_table(bits))})
    yield (
        "reciprocals: softmax and quantizing",
        q8,
        Approximate({"attn.probs": partial(probabilities, np.exp, True), ".q": codes_by_reciprocal}),
    )
    yield "bf16 scales: activations", q8, Approximate({".s": lambda _a, _name, value: bf16(value)})
    yield "bf16 scales: weights", rounded, ignore
    norm = partial(norm_in_fp32, config, q8)
    yield "RMSNorm in fp32", q8, Approximate({"attn.norm": norm, "ffn.norm": norm, "norm": norm_of_x(norm)})


def norm_of_x(norm: Callable) -> Callable:
    """`norm` for the last norm alone: the others end in the same word."""
    return lambda a, name, value: norm(a, name, value) if name == "norm" else value


def print_costs(config: Config, source: Source, ids: list[int], bos: int | None, context: int) -> None:
    """The table: perplexity, and the mean KL divergence from the exact run's probabilities, in nats."""
    exact: list[np.ndarray] = []  # log probabilities of each window
    base = 0.0
    for name, scheme, step in variants(config, source):
        fast = InFp32(scheme)
        found, nll = [], []
        for tokens in windows(ids, bos, context):
            logits = forward(config, fast, tokens, step)
            nll.append(negative_log_likelihoods(logits, tokens))
            found.append(log_softmax(logits).astype(F32))
        exact = exact or found
        kl = np.concatenate([(np.exp(p) * (p - q)).sum(axis=-1) for p, q in zip(exact, found, strict=True)]).mean()
        scored = np.concatenate(nll)
        value = float(np.exp(scored.mean()))
        base = base or value
        many = f"   of {len(scored)} tokens" if name == "exact" else ""
        print(f"{name:<38} {value:8.4f} {value / base - 1:+8.2%} {kl:9.1e}{many}", flush=True)


def print_ranges(config: Config, source: Source, ids: list[int], bos: int | None, context: int) -> None:
    """Prints for every fp32 step its largest magnitude, the layer that has it, the median, and the bits between."""
    largest: dict[str, tuple[float, str]] = {}
    medians: dict[str, list[float]] = {}

    def step(name: str, value: np.ndarray) -> np.ndarray:
        if value.dtype == F32:
            short = name.split(".", 2)[-1] if name.startswith("layers.") else name
            magnitudes = np.abs(value[value != 0])
            found = (float(magnitudes.max(initial=0)), name.split(".")[1] if name.startswith("layers.") else "")
            largest[short] = max(largest.get(short, (0.0, "")), found)
            medians.setdefault(short, []).append(float(np.median(magnitudes)) if magnitudes.size else 0.0)
        return value

    perplexity(lambda tokens: forward(config, InFp32(Q8(source, GROUP_SIZE)), tokens, step), ids, bos, context)
    print(f"{'step':<16} {'largest':>10} {'in layer':>8} {'median':>10} {'log2 of the ratio':>18}")
    for name, (value, layer) in largest.items():
        median = float(np.median(medians[name]))
        print(f"{name:<16} {value:10.4g} {layer:>8} {median:10.3g} {np.log2(value / median):18.1f}")


def main() -> int:
    """Exit code 1 if a file cannot be read, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m models.approximations", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text (2048)")
    parser.add_argument("--ranges", action="store_true", help="print ranges of the fp32 steps instead")
    args = parser.parse_args()
    if args.tokens < 2:
        parser.error(f"--tokens: {args.tokens}, expected 2 and up")
    try:
        source = open_model(args.model)
        ids, bos = encode(args.model, read_text(args.text))
        show = print_ranges if args.ranges else print_costs
        show(source.config, source, ids[: args.tokens], bos, min(512, source.config.max_seq_len))
    except (ValueError, OSError) as error:
        print(f"approximations: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

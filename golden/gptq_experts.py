"""GPTQ of a layer's experts: H of each from the tokens that the router sends to it.

The router decides on the stream of the layers before, quantized already, as it will in the quantized model. An expert's
gate and up have the H of the normalized tokens that go to it, its down that of what its quantized gate and up make of
them.

Routers are uneven: of a short text an expert may see a few tokens or none, and an H of fewer tokens than it has columns
says nothing of the other directions. So H gets, for each column, half a token whose channels are uncorrelated and as
large as they are on average in the layer:

    H = X^T X + PRIOR * n_in * m * I        m: mean square of what the layer's experts read, over tokens and channels

The fewer tokens an expert sees, the nearer this is to H = I, with which GPTQ rounds to nearest on searched grids: that
is what an expert without a token gets. The exporter says how many experts saw fewer tokens than that.
"""

from collections.abc import Callable, Generator, Iterator, Mapping

import numpy as np

from formats.checkpoint import Config, ModelError
from golden.forward import F32, F64, Fp32, load_expert, rmsnorm, swiglu
from golden.gptq import Matrix, stands_for
from golden.routing import route, router_logits

PRIOR = 0.5  # tokens for each column


def hessian(x: np.ndarray, mean_square: float) -> np.ndarray:
    """H of an expert that sees the rows x, (n, n_in) fp32: (n_in, n_in) fp64. mean_square: of all rows of the layer."""
    x = x.astype(F64)
    return x.T @ x + PRIOR * x.shape[1] * mean_square * np.eye(x.shape[1])


def mean_square(name: str, x: np.ndarray) -> float:
    """Of all values. Raises ModelError, naming the step, if that is not finite."""
    found = float(np.square(x, dtype=F64).mean())
    if not np.isfinite(found):
        raise ModelError(f"calibration met a value that is not finite at {name}")
    return found


def quantize_experts(
    config: Config,
    weights: Fp32,
    layer: str,
    x: np.ndarray,
    quantize: Callable[[str, np.ndarray, np.ndarray], Matrix],
) -> Generator[tuple[str, Matrix | np.ndarray], None, np.ndarray]:
    """Every expert's gate_up_proj, then every expert's down_proj, by step name. Returns what the layer makes of x.

    x: (n, dim) fp32, behind attention. First comes `moe.router` with the number of tokens of each expert, (E,). One
    expert's weights are in memory at a time.
    """
    moe, gate_up, down = config.moe, layer + "moe.gate_up_proj", layer + "moe.down_proj"
    assert moe is not None
    normed = rmsnorm(x, weights.vector(layer + "ffn.norm"), config.norm_eps)
    square = mean_square(layer + "ffn.norm", normed)
    logits = router_logits(normed, weights.vector(layer + "moe.router"))
    chosen, share = route(logits, moe.n_active, moe.norm_topk_prob)
    yield layer + "moe.router", np.bincount(chosen.ravel(), minlength=moe.n_experts)
    hidden = []  # of each expert: what its down projection reads
    for expert in range(moe.n_experts):
        rows = normed[np.nonzero(chosen == expert)[0]]
        matrix = quantize(gate_up, load_expert(weights.load, gate_up, expert), hessian(rows, square))
        yield gate_up, matrix
        hidden.append(swiglu(*np.split(Fp32.linear_with(rows, stands_for(matrix)), 2, axis=1)))
    square, mix = mean_square(layer + "moe.swiglu", np.concatenate(hidden)), np.zeros(x.shape, F64)
    for expert, rows in enumerate(hidden):
        matrix = quantize(down, load_expert(weights.load, down, expert), hessian(rows, square))
        yield down, matrix
        token, place = np.nonzero(chosen == expert)
        mix[token] += Fp32.linear_with(rows, stands_for(matrix)) * share[token, place, None]
    return x + mix.astype(F32)


def describe_tokens(config: Config, seen: Mapping[str, np.ndarray]) -> Iterator[str]:
    """A line per layer: how many tokens its experts saw, and how many experts fewer than H has of its own.

    seen: tokens of each expert, (E,), by the step of the layer's router.
    """
    own = round(PRIOR * config.dim)
    yield f"{'tokens of an expert':<20} {'fewest':>7} {'median':>7} {'most':>7}  fewer than {own}"
    for name, tokens in seen.items():
        layer, few = name.removesuffix(".moe.router"), f"{(tokens < own).sum()} of {len(tokens)}"
        yield f"{layer:<20} {tokens.min():7} {np.median(tokens):7.0f} {tokens.max():7}  {few}"

"""GPTQ of a layer's experts: H of each from the tokens that the router sends to it.

The router decides on the stream of the layers before, quantized already, as it will in the quantized model. An expert's
gate and up have the H of the normalized tokens that go to it, its down that of what its quantized gate and up make of
them.

Routers are uneven: of a short text, an expert may see a few tokens or none, and an H of fewer tokens than it has
columns says nothing of the other directions. So an expert that sees fewer than `ENOUGH` takes more: those of the other
tokens for which the router gave it the largest logits. With them it has an H of its own for both matrices, of inputs
like those that it will see. The exporter says how many experts that was.
"""

from collections.abc import Callable, Generator, Iterator, Mapping

import numpy as np

from formats.checkpoint import Config, ModelError
from golden.forward import F32, F64, Fp32, load_expert, rmsnorm, swiglu
from golden.gptq import Matrix, stands_for
from golden.routing import route, router_logits

ENOUGH = 256  # tokens


def calibrating_tokens(logits: np.ndarray, token: np.ndarray, enough: int) -> np.ndarray:
    """The tokens that give an expert's H, of which those that go to it, `token`, come first. logits: its own, (n,)."""
    if len(token) >= enough:
        return token
    others = np.setdiff1d(np.arange(len(logits)), token)
    nearest = others[np.argsort(-logits[others], kind="stable")]
    return np.concatenate([token, nearest[: enough - len(token)]])


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
    if not np.isfinite(normed).all():
        raise ModelError(f"calibration met a value that is not finite at {layer}ffn.norm")
    logits = router_logits(normed, weights.vector(layer + "moe.router"))
    chosen, share = route(logits, moe.n_active, moe.norm_topk_prob)
    yield layer + "moe.router", np.bincount(chosen.ravel(), minlength=moe.n_experts)
    hidden = []  # of each expert: what its down projection reads
    for expert in range(moe.n_experts):
        token, _ = np.nonzero(chosen == expert)
        rows = normed[calibrating_tokens(logits[:, expert], token, ENOUGH)]
        matrix = quantize(gate_up, load_expert(weights.load, gate_up, expert), squares(rows))
        yield gate_up, matrix
        hidden.append(swiglu(*np.split(Fp32.linear_with(rows, stands_for(matrix)), 2, axis=1)))
    mix = np.zeros(x.shape, F64)
    for expert in range(moe.n_experts):
        token, place = np.nonzero(chosen == expert)
        if not np.isfinite(hidden[expert]).all():
            raise ModelError(f"calibration met a value that is not finite at {layer}moe.swiglu")
        matrix = quantize(down, load_expert(weights.load, down, expert), squares(hidden[expert]))
        yield down, matrix
        mix[token] += Fp32.linear_with(hidden[expert][: len(token)], stands_for(matrix)) * share[token, place, None]
    return x + mix.astype(F32)


def describe_tokens(seen: Mapping[str, np.ndarray]) -> Iterator[str]:
    """A line per layer: how many tokens its experts saw, and how many of them took more. seen: by step, (E,)."""
    yield f"{'tokens of an expert':<20} {'fewest':>7} {'median':>7} {'most':>7}  fewer than {ENOUGH}"
    for name, tokens in seen.items():
        layer, few = name.removesuffix(".moe.router"), f"{(tokens < ENOUGH).sum()} of {len(tokens)}"
        yield f"{layer:<20} {tokens.min():7} {np.median(tokens):7.0f} {tokens.max():7}  {few}"


def squares(x: np.ndarray) -> np.ndarray:
    """H = X^T X, (n_in, n_in) fp64."""
    x = x.astype(F64)
    return x.T @ x

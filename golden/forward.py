"""The forward pass of Llama 3, Qwen3 and Qwen3-MoE in numpy, one line an operation.

Shapes: n tokens, `dim` the length of a token's vector, H query heads and G key/value heads of `head_dim` each.
Every operation takes fp32 and returns fp32, as the contract has it, to the bit (docs/numerics.md).

`forward` is the same for every quantization scheme. What a scheme changes, how an activation is prepared for a
matrix and how the two are multiplied, comes in as an object with these members:

    interleaved                 whether the rows of q and k are in adjacent pairs, see `rope`
    steps(step)                 -> step, or one that also rounds what the scheme keeps in less than fp32
    embedding(tokens)           -> (n, dim) fp32
    activation(step, name, x)   -> x, in whatever form `linear` takes; records the form's parts as steps
    linear(x, name, step)       -> (n, n_out) fp32, the product with the weight matrix `name`; may record what it
                                adds up as steps, see golden.q8.ACCUMULATOR_LAYER
    vector(name)                -> a norm's or a router's weight, fp32

and, for models with mixtures of experts,

    expert_activation(step, name, x)    -> x, (n, n_in) or (n, k, n_in), in whatever form `expert_linear` takes, as
                                           rows; records its parts as steps
    expert_linear(x, rows, experts, name, step) -> (n, k, n_out) fp32: row rows[t, r] of x times the matrix `name` of
                                           the expert experts[t, r]; steps as of `linear`

A scheme that computes attention its own way has `attend`, in the place of `attention` below.

`step(name, value)` is called with the result of every operation and returns the value to go on with: a trace
records it, `golden diff --model` puts another program's value in its place.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from formats.checkpoint import Config
from formats.errors import ModelError
from formats.source import Source
from golden.fp32 import F32, F64, exp, fma, softmax, sum_in_lanes
from golden.rotation import rotate, rotate_back
from golden.routing import by_expert, combine, route, router_logits

Step = Callable[[str, np.ndarray], np.ndarray]
Attend = Callable[[Step, str, np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # as `attention`
FMA_VALUES = 1 << 15  # of attention that are added up at a time, so that they stay in the cache


class Scheme(Protocol):
    """How weights are stored and multiplied; the module's docstring gives the shapes."""

    interleaved: bool

    def steps(self, step: Step) -> Step: ...
    def embedding(self, tokens: np.ndarray) -> np.ndarray: ...
    def activation(self, step: Step, name: str, x: np.ndarray) -> Any: ...
    def linear(self, x: Any, name: str, step: Step) -> np.ndarray: ...
    def vector(self, name: str) -> np.ndarray: ...


class MoeScheme(Scheme, Protocol):
    """A scheme that also has experts."""

    def expert_activation(self, step: Step, name: str, x: np.ndarray) -> Any: ...
    def expert_linear(self, x: Any, rows: np.ndarray, experts: np.ndarray, name: str, step: Step) -> np.ndarray: ...


# ----------------------------------------------------------------------------
# The operations


def rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis (Zhang & Sennrich 2019, arXiv 1910.07467), in fp64.

    Squares are summed in 8 lanes, and the result is weight * (x * (1 / sqrt(...))).
    """
    x64 = x.astype(F64)
    inv = 1 / np.sqrt(sum_in_lanes(x64**2, 8) / x.shape[-1] + F64(F32(eps)))
    return (weight * (x64 * inv[..., None])).astype(F32)


def rope_frequencies(config: Config) -> np.ndarray:
    """Angle per position of each pair, (head_dim / 2,) fp32: theta^(-2i / head_dim), rescaled as the model says.

    A rescaling (config.json: rope_scaling) leaves short wavelengths alone, divides the frequencies of long ones by
    `factor`, and goes linearly from one to the other in between: over turns (llama3) or over pairs (yarn). Linear's
    divides them all.
    """
    i = np.arange(0, config.head_dim, 2, dtype=F64)
    freq = F64(F32(config.rope_theta)) ** (-i / config.head_dim)
    s = config.rope_scaling
    if s is not None:
        turns = s.original_max_position_embeddings * freq / (2 * np.pi)  # turns within the original context
        x = turns if s.kind == "llama3" else config.head_dim - i / 2
        smooth = np.clip((x - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
        freq = (1 - smooth) * freq / s.factor + smooth * freq
    return freq.astype(F32)


def rope_table(config: Config, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * frequency, each (n, head_dim / 2) fp32; in yarn times its attention_factor."""
    angle = positions[:, None].astype(F64) * rope_frequencies(config).astype(F64)
    scale = F64(F32(1 if config.rope_scaling is None else config.rope_scaling.attention_factor))
    return (scale * np.cos(angle)).astype(F32), (scale * np.sin(angle)).astype(F32)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotates each pair of each head by its angle (Su et al. 2021, arXiv 2104.09864). x: (n, heads, head_dim).

    Interleaved: pairs are (2i, 2i + 1), as in the paper. Otherwise (i, i + head_dim / 2), as Hugging Face stores
    them. `permute_rows` takes weights from the second order to the first.
    """
    cos, sin = cos[:, None, :], sin[:, None, :]
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    out = np.empty(x.shape, F32)
    first, second = fma(a, cos, -(b * sin)), fma(a, sin, b * cos)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = first, second
    else:
        out[..., :half], out[..., half:] = first, second
    return out


def permute_rows(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders each head's rows from halves (i, i + head_dim / 2) to adjacent pairs (2i, 2i + 1).

    weight: (heads * head_dim, ...) of a q or k projection, or the (head_dim,) of Qwen3's q_norm or k_norm.
    """
    heads = weight.shape[0] // head_dim
    rows = weight.reshape(heads, 2, head_dim // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


def unpermute_rows(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """The inverse of `permute_rows`: each head's rows from adjacent pairs (2i, 2i + 1) to halves."""
    heads = weight.shape[0] // head_dim
    rows = weight.reshape(heads, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


def is_future(n: int, n_keys: int) -> np.ndarray:
    """Whether a key is behind its query, (n, 1, n_keys) bool. The queries are at the last n of n_keys positions."""
    return np.arange(n_keys) > np.arange(n_keys - n, n_keys)[:, None, None]


def head_dots(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q . k for each query and key, (n, H, n_keys) fp64. q: (n, H, head_dim), k: (n_keys, G, head_dim).

    Query head h reads key head h / (H / G) (Ainslie et al. 2023, arXiv 2305.13245).
    """
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    dots = q.astype(F64).transpose(1, 0, 2) @ k.astype(F64).transpose(1, 2, 0)  # (H, n, n_keys)
    return dots.transpose(1, 0, 2)


def head_sums(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The sum over keys of weight * v, (n, H, head_dim) fp64. weights: (n, H, n_keys), v: (n_keys, G, head_dim)."""
    v = np.repeat(v, weights.shape[1] // v.shape[1], axis=1)
    sums = weights.astype(F64).transpose(1, 0, 2) @ v.astype(F64).transpose(1, 0, 2)  # (H, n, head_dim)
    return sums.transpose(1, 0, 2)


def attention_dots(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q . k, (n, H, n_keys) fp32, summed by fma from the first element on. 0 for keys that are behind their query.

    q: (n, H, head_dim), k: (n_keys, G, head_dim).
    """
    n, n_keys = len(q), len(k)
    k = np.ascontiguousarray(np.repeat(k, q.shape[1] // k.shape[1], axis=1).transpose(2, 1, 0))  # (head_dim, H, n_keys)
    dots = np.zeros((n, q.shape[1], n_keys), F32)
    at_once = max(1, FMA_VALUES // k[0].size)
    for first in range(0, n, at_once):
        rows = slice(first, first + at_once)
        seen = min(n_keys, n_keys - n + first + at_once)  # by one of them
        total = dots[rows, :, :seen]
        for d, key in enumerate(k):
            total = fma(q[rows, :, d, None], key[:, :seen], total)
        dots[rows, :, :seen] = total
    return np.where(is_future(n, n_keys), F32(0), dots)


def attention_mix(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The sum of probability * v by fma, first position to last, (n, H, head_dim) fp32. Shapes of both: `head_sums`."""
    v = np.repeat(v, probs.shape[1] // v.shape[1], axis=1)
    first = len(v) - len(probs)
    out = np.zeros((len(probs), *v.shape[1:]), F32)
    for p, value in enumerate(v):  # the queries that see it
        i = max(0, p - first)
        out[i:] = fma(probs[i:, :, p, None], value, out[i:])
    return out


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, silu(z) = z / (1 + exp(-z)) (Shazeer 2020, arXiv 2002.05202), in fp32, left to right."""
    return gate / (F32(1) + exp(-gate)) * up


# ----------------------------------------------------------------------------
# The forward pass


def ignore(_name: str, value: np.ndarray) -> np.ndarray:
    """The step that records nothing."""
    return value


def product(scheme: Scheme, step: Step, x: Any, name: str) -> np.ndarray:
    """x times the weight matrix of a step, (n, n_out) fp32, recorded under its name."""
    return step(name, scheme.linear(x, name, step))


def attention(step: Step, layer: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention, (n, H, head_dim) fp32, of the last n of n_keys positions.

    q: (n, H, head_dim); k and v: (n_keys, G, head_dim). A whole sequence has as many queries as keys.
    """
    future = is_future(len(q), len(k))
    scores = step(layer + "attn.scores", attention_dots(q, k) * (F32(1) / np.sqrt(F32(q.shape[-1]))))  # (n, H, n_keys)
    probs = step(layer + "attn.probs", softmax(np.where(future, F32(-np.inf), scores)))
    return attention_mix(probs, v)


def attention_fp64(step: Step, layer: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """As `attention`, each step in fp64 and rounded once: many times faster, for weights that no program runs."""
    future = is_future(len(q), len(k))
    scores = (head_dots(q, k) / np.sqrt(q.shape[-1])).astype(F32)
    scores = step(layer + "attn.scores", np.where(future, F32(0), scores))
    scores = np.where(future, -np.inf, scores.astype(F64))
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs = step(layer + "attn.probs", (e / e.sum(axis=-1, keepdims=True)).astype(F32))
    return head_sums(probs, v).astype(F32)


def attention_block(
    config: Config,
    scheme: Scheme,
    layer: str,
    x: np.ndarray,
    rotation: tuple[np.ndarray, np.ndarray],
    step: Step,
    attend: Attend | None = None,
) -> np.ndarray:
    """x plus what attention adds to it, (n, dim) fp32. layer: the prefix of its steps, `layers.0.`.

    rotation: cos and sin of each position, from `rope_table`. attend: in the place of the scheme's.
    """
    c, n = config, len(x)
    attend = attend or getattr(scheme, "attend", attention)
    cos, sin = rotation

    normed = step(layer + "attn.norm", rmsnorm(x, scheme.vector(layer + "attn.norm"), c.norm_eps))
    xq = scheme.activation(step, layer + "attn.norm", normed)
    q = product(scheme, step, xq, layer + "attn.q_proj")  # (n, H * head_dim)
    k = product(scheme, step, xq, layer + "attn.k_proj")  # (n, G * head_dim)
    v = product(scheme, step, xq, layer + "attn.v_proj")  # (n, G * head_dim)
    q, k, v = (t.reshape(n, -1, c.head_dim) for t in (q, k, v))
    if c.has_head_norms:
        q = step(layer + "attn.q_norm", rmsnorm(q, scheme.vector(layer + "attn.q_norm"), c.norm_eps))
        k = step(layer + "attn.k_norm", rmsnorm(k, scheme.vector(layer + "attn.k_norm"), c.norm_eps))
    q = step(layer + "attn.q_rope", rope(q, cos, sin, scheme.interleaved))
    k = step(layer + "attn.k_rope", rope(k, cos, sin, scheme.interleaved))
    attn_out = step(layer + "attn.mix", attend(step, layer, q, k, v).reshape(n, -1))  # (n, H * head_dim)
    xq = scheme.activation(step, layer + "attn.mix", attn_out)
    proj = product(scheme, step, xq, layer + "attn.o_proj")  # (n, dim)
    return step(layer + "attn.residual", x + proj)


def feed_forward_block(config: Config, scheme: Scheme, layer: str, x: np.ndarray, step: Step) -> np.ndarray:
    """x plus what the SwiGLU network adds to it, (n, dim) fp32."""
    normed = step(layer + "ffn.norm", rmsnorm(x, scheme.vector(layer + "ffn.norm"), config.norm_eps))
    xq = scheme.activation(step, layer + "ffn.norm", normed)
    gate = product(scheme, step, xq, layer + "ffn.gate_proj")  # (n, hidden_dim)
    up = product(scheme, step, xq, layer + "ffn.up_proj")  # (n, hidden_dim)
    hidden = step(layer + "ffn.swiglu", swiglu(gate, up))
    xq = scheme.activation(step, layer + "ffn.swiglu", hidden)
    proj = product(scheme, step, xq, layer + "ffn.down_proj")  # (n, dim)
    return step(layer + "ffn.residual", x + proj)


def moe_block(config: Config, scheme: MoeScheme, layer: str, x: np.ndarray, step: Step) -> np.ndarray:
    """x plus what its experts add to it, (n, dim) fp32. In the experts' steps each token's best expert stands first.

    E experts, k of them active for each token (Fedus et al. 2021, arXiv 2101.03961; as in Qwen3-MoE).
    """
    assert config.moe is not None
    normed = step(layer + "ffn.norm", rmsnorm(x, scheme.vector(layer + "ffn.norm"), config.norm_eps))
    logits = step(layer + "moe.router", router_logits(normed, scheme.vector(layer + "moe.router")))  # (n, E)
    chosen, weights = route(logits, config.moe.n_active, config.moe.norm_topk_prob)
    chosen = step(layer + "moe.experts", chosen)  # (n, k) int32
    weights = step(layer + "moe.weights", weights)  # (n, k)
    pair = np.arange(chosen.size).reshape(chosen.shape)  # of a token and one of its experts
    token = pair // chosen.shape[1]
    xq = scheme.expert_activation(step, layer + "ffn.norm", normed)
    gate_up = scheme.expert_linear(xq, token, chosen, layer + "moe.gate_up_proj", step)
    gate_up = step(layer + "moe.gate_up_proj", gate_up)  # (n, k, 2 * moe.hidden_dim)
    hidden = step(layer + "moe.swiglu", swiglu(*np.split(gate_up, 2, axis=-1)))  # (n, k, moe.hidden_dim)
    xq = scheme.expert_activation(step, layer + "moe.swiglu", hidden)
    down = scheme.expert_linear(xq, pair, chosen, layer + "moe.down_proj", step)
    down = step(layer + "moe.down_proj", down)  # (n, k, dim)
    mix = step(layer + "moe.mix", combine(down, chosen, weights))  # (n, dim)
    return step(layer + "ffn.residual", x + mix)


def forward_layer(
    config: Config,
    scheme: Scheme,
    i: int,
    x: np.ndarray,
    rotation: tuple[np.ndarray, np.ndarray],
    step: Step = ignore,
    attend: Attend | None = None,
) -> np.ndarray:
    """What layer i makes of x, (n, dim) fp32. rotation and attend: as of `attention_block`.

    step is called as it is, without the scheme's own `steps`.
    """
    x = attention_block(config, scheme, f"layers.{i}.", x, rotation, step, attend)
    block = moe_block if config.has_experts(i) else feed_forward_block
    return block(config, scheme, f"layers.{i}.", x, step)


def rotated(config: Config, scheme: Scheme, x: np.ndarray, step: Step = ignore) -> np.ndarray:
    """Rows of the embedding, (n, dim) fp32, as the layers read them: rotated, if the model is and is tied."""
    return step("rotate", rotate(x, scheme.vector("rotation"), config.rotation_block)) if config.rotation_block else x


def embed(config: Config, scheme: Scheme, tokens: np.ndarray, step: Step = ignore) -> np.ndarray:
    """What the first layer reads, (n, dim) fp32."""
    return rotated(config, scheme, step("embed", scheme.embedding(tokens)), step)


def last_norm(config: Config, scheme: Scheme, x: np.ndarray, step: Step = ignore) -> np.ndarray:
    """What the classifier reads, (n, dim) fp32, of what the last layer gives."""
    if config.rotation_block:
        x = step("rotate_back", rotate_back(x, scheme.vector("rotation"), config.rotation_block))
    return step("norm", rmsnorm(x, scheme.vector("norm"), config.norm_eps))


class Past:
    """The keys, rotated, and values of the positions before those of a pass, of every layer."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def begin_behind(self, n_tokens: int, rows: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Begins behind n_tokens positions of which nothing is known but keys and values, by the layer's prefix."""
        self.n_tokens, self._rows = n_tokens, rows

    def with_past(self, layer: str, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k and v of all positions so far, (n_keys, G, head_dim); the pass brings those of the last."""
        if layer in self._rows:
            k, v = (np.concatenate(both) for both in zip(self._rows[layer], (k, v), strict=True))
        self._rows[layer] = k, v
        return k, v


def forward(
    config: Config, scheme: Scheme, tokens: np.ndarray, step: Step = ignore, past: Past | None = None
) -> np.ndarray:
    """Logits (n, vocab_size) fp32 of each token of a sequence that starts at position 0, or behind `past`."""
    past = past or Past()
    rotation, step = rope_table(config, past.n_tokens + np.arange(len(tokens))), scheme.steps(step)
    own: Attend = getattr(scheme, "attend", attention)

    def attend(step: Step, layer: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return own(step, layer, q, *past.with_past(layer, k, v))

    x = embed(config, scheme, tokens, step)  # (n, dim)
    for i in range(config.n_layers):
        x = forward_layer(config, scheme, i, x, rotation, step, attend)
    past.n_tokens += len(tokens)
    xq = scheme.activation(step, "norm", last_norm(config, scheme, x, step))
    return step("logits", scheme.linear(xq, "classifier", step))


class _NotFiniteError(Exception):
    """A step that is not finite, at a position, and what is there."""


def finite_forward(path: Path, config: Config, scheme: Scheme, tokens: np.ndarray) -> np.ndarray:
    """As `forward`. Raises ModelError, naming `path`, for the first position at which a step is not finite, and it."""

    def look(name: str, value: np.ndarray) -> np.ndarray:
        if value.dtype.kind == "f" and not (finite := np.isfinite(value)).all():
            at = tuple(np.argwhere(~finite)[0])  # in the order of rows: at the first position
            raise _NotFiniteError(int(at[0]), name, value[at])
        return value

    try:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            return forward(config, scheme, tokens, look)
    except _NotFiniteError as error:
        position, name, value = error.args
        if position > 0:  # a later step may be at an earlier one
            finite_forward(path, config, scheme, tokens[:position])
        kind = "fp16, which ends at 65504" if value.dtype == np.float16 else "fp32"
        step = f"position {position}: {name} is the first step that is not finite"
        raise ModelError(f"{path}: {step}: {value} in {kind}") from None


# ----------------------------------------------------------------------------
# Weights, under the names of the steps that use them

_HF_NAME = {
    "attn.norm": "input_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ffn.norm": "post_attention_layernorm",
    "ffn.gate_proj": "mlp.gate_proj",
    "ffn.up_proj": "mlp.up_proj",
    "ffn.down_proj": "mlp.down_proj",
    "moe.router": "mlp.gate",
}
_EXPERT = re.compile(r"moe\.(\d+)\.(\w+)", re.ASCII)
ROTATED = ("attn.q_proj", "attn.k_proj", "attn.q_norm", "attn.k_norm")


def hf_name(config: Config, step_name: str) -> str:
    """The Hugging Face name of the weight that a step uses: `layers.0.attn.q_proj` -> `model.layers.0....weight`.

    An expert's are called `layers.0.moe.5.gate_proj`, with its number.
    """
    if step_name == "embed" or (step_name == "classifier" and config.tied):
        return "model.embed_tokens.weight"
    if step_name == "classifier":
        return "lm_head.weight"
    if step_name == "rotation":
        return step_name  # golden.rotation.Rotated has it
    if step_name == "norm":
        return "model.norm.weight"
    _, layer, part = step_name.split(".", 2)
    if (found := _EXPERT.fullmatch(part)) is not None:
        return f"model.layers.{layer}.mlp.experts.{found[1]}.{found[2]}.weight"
    return f"model.layers.{layer}.{_HF_NAME[part]}.weight"


def in_pairs(config: Config, step_name: str, rows: np.ndarray) -> np.ndarray:
    """A step's weight, or its scales, (n_out, ...), from Hugging Face's order of rows to adjacent pairs if rotated."""
    return permute_rows(rows, config.head_dim) if step_name.split(".", 2)[-1] in ROTATED else rows


def in_halves(config: Config, step_name: str, rows: np.ndarray) -> np.ndarray:
    """The inverse of `in_pairs`: a step's weight, or its scales, with its rows as Hugging Face has them."""
    return unpermute_rows(rows, config.head_dim) if step_name.split(".", 2)[-1] in ROTATED else rows


def load_weight(checkpoint: Source, step_name: str, interleaved: bool) -> np.ndarray:
    """The weight that a step uses, fp32; with `interleaved`, q's and k's rows in the order of adjacent pairs."""
    weight = checkpoint.tensor(hf_name(checkpoint.config, step_name))
    return in_pairs(checkpoint.config, step_name, weight) if interleaved else weight


def expert_steps(name: str, expert: int) -> list[str]:
    """The steps of one expert whose matrices lie in `name`, one behind the other: gate_proj before up_proj."""
    layer, part = name.rsplit(".", 1)
    return [f"{layer}.{expert}.{half}_proj" for half in (("gate", "up") if part == "gate_up_proj" else ("down",))]


def load_expert(load: Callable[[str], np.ndarray], name: str, expert: int) -> np.ndarray:
    """The matrix of one expert: of gate_up_proj (2 * moe.hidden_dim, dim), gate's rows before up's. load: by step."""
    first, *others = (load(step) for step in expert_steps(name, expert))
    if not others:
        return first
    if isinstance(first, tuple):  # codes and scales
        return type(first)(*(np.concatenate(parts) for parts in zip(first, *others, strict=True)))
    return np.concatenate([first, *others])


class Fp32:
    """No quantization: weights as stored, widened to fp32."""

    attend = staticmethod(attention_fp64)

    def __init__(self, checkpoint: Source, interleaved: bool = False):
        self._checkpoint, self.interleaved = checkpoint, interleaved
        self._weights: dict[str, np.ndarray] = {}

    def vector(self, name: str) -> np.ndarray:
        if name not in self._weights:
            self._weights[name] = self.load(name)
        return self._weights[name]

    def dense(self, name: str) -> np.ndarray:
        """A matrix, (n_out, n_in) fp32."""
        return self.vector(name)

    def load(self, name: str) -> np.ndarray:
        """The weight that a step uses."""
        return load_weight(self._checkpoint, name, self.interleaved)

    def steps(self, step: Step) -> Step:
        return step

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        return self.vector("embed")[tokens]

    def activation(self, _step: Step, _name: str, x: np.ndarray) -> np.ndarray:
        return x

    def linear(self, x: np.ndarray, name: str, _step: Step = ignore) -> np.ndarray:
        return self.linear_with(x, self.vector(name))

    def expert_activation(self, _step: Step, _name: str, x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, x.shape[-1])

    def expert_linear(self, x: np.ndarray, rows: np.ndarray, experts: np.ndarray, name: str, _step: Step) -> np.ndarray:
        return by_expert(rows, experts, lambda r, e: self.linear_with(x[r], load_expert(self.vector, name, e)))

    @staticmethod
    def linear_with(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """x @ weight.T, (n, n_out) fp32."""
        return (x.astype(F64) @ weight.astype(F64).T).astype(F32)

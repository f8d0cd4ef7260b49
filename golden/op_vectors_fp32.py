"""Golden vectors of the fp32 operations between products: RMSNorm, RoPE, attention, softmax, SwiGLU, argmax."""

import numpy as np

from formats.checkpoint import Config, RopeScaling, linear, yarn
from golden.forward import F32, attention, rmsnorm, rope, rope_frequencies, rope_table, softmax, swiglu
from golden.op_cases import EXACT, OpVectors
from golden.rotation import random_signs, rotate, rotate_back
from golden.trace import Recorder

BOUNDARIES = 128, 256  # where programs begin another chunk of a prompt, or another page of the KV cache
ROPE_POSITIONS = np.array([0, 1, 2, 127, 128, 511, 4095, 131071])
TINY_SCALING = RopeScaling(8.0, 1.0, 4.0, 128)  # tiny-llama's


def add_fp32_operations(vectors: OpVectors, rng: np.random.Generator) -> None:
    """RMSNorm, RoPE, softmax, SwiGLU and the choice of the most probable token."""
    for n in (128, 2048):
        x, weight = rng.standard_normal((3, n)).astype(F32), rng.standard_normal(n).astype(F32)
        x[1] *= np.exp(rng.uniform(-6, 6, n)).astype(F32)  # a few values that outweigh the rest
        x[2] *= F32(3e-3)  # so small that eps matters
        for eps in (1e-5, 1e-6):
            inputs, out = {"x": x, "weight": weight}, rmsnorm(x, weight, eps)
            vectors.add(f"rmsnorm.{n}eps{eps:g}", "rmsnorm", inputs, {"out": (out, EXACT)}, eps=eps)

    plain = rope_config(head_dim=64, rope_theta=500000.0, scaling=None)
    scaled = rope_config(64, 500000.0, RopeScaling(32.0, 1.0, 4.0, 8192))  # Llama 3.2 1B
    tiny = rope_config(32, 1000000.0, TINY_SCALING)
    for name, config in (("plain", plain), ("llama-3.2-1b", scaled), ("tiny", tiny)):
        add_rope(vectors, f"rope.{name}", config, rng, interleaved=True)

    x = np.stack([rng.standard_normal(77) * 4, np.full(77, -80.0), np.linspace(-100, 100, 77)]).astype(F32)
    vectors.add("softmax", "softmax", {"x": x}, {"out": (softmax(x), EXACT)})

    gate = np.concatenate([rng.standard_normal(100) * 3, [0.0, -0.0, 88.0, -88.0, 200.0, -200.0]]).astype(F32)
    up = rng.standard_normal(len(gate)).astype(F32)
    vectors.add("swiglu", "swiglu", {"gate": gate, "up": up}, {"out": (swiglu(gate, up), EXACT)})

    logits = np.round(rng.standard_normal((8, 300)), 1).astype(F32)
    logits[:4, [7, 40, 128, 299]] = 5.0  # equal ones
    logits[4] = -1.5
    logits[5:, 0] = logits[5:, 299] = 6.0
    ids = logits.argmax(axis=-1).astype(np.int32)  # numpy takes the first of equals
    vectors.add("argmax", "argmax", {"logits": logits}, {"ids": (ids, EXACT)})


def add_rescaled_rope(vectors: OpVectors, rng: np.random.Generator) -> None:
    """RoPE under YaRN, which also scales cos and sin, and under linear rescaling."""
    for name, scaling in (("yarn", yarn(4.0, 32768, 128, 1000000.0)), ("linear", linear(2.0, 8192, 128))):
        add_rope(vectors, f"rope.{name}", rope_config(128, 1000000.0, scaling), rng, interleaved=True)


def add_rotation(vectors: OpVectors, rng: np.random.Generator) -> None:
    """The rotation of tied models, there and back: nine blocks as in SmolLM2, and a root that fp32 has to round."""
    for n, block in ((576, 64), (256, 128)):
        x = rng.standard_normal((2, n)).astype(F32)
        s = random_signs(n, n, block).astype(F32)
        outputs = {"rotated": (rotate(x, s, block), EXACT), "back": (rotate_back(x, s, block), EXACT)}
        vectors.add(f"rotate.{block}", "rotate", {"x": x, "s": s}, outputs, block=block)


def add_rope(
    vectors: OpVectors, case: str, config: Config, rng: np.random.Generator, interleaved: bool,
    positions: np.ndarray = ROPE_POSITIONS, n_heads: int = 2,
) -> None:  # fmt: skip
    """Rotation at some positions, with the tables it takes."""
    cos, sin = rope_table(config, positions)
    x = rng.standard_normal((len(positions), n_heads, config.head_dim)).astype(F32)
    outputs = {
        "frequencies": (rope_frequencies(config), EXACT),
        "cos": (cos, EXACT),
        "sin": (sin, EXACT),
        "out": (rope(x, cos, sin, interleaved), EXACT),
    }
    scaling = None if config.rope_scaling is None else dict(vars(config.rope_scaling))
    if scaling is not None and scaling["kind"] == "llama3":  # which has no more than four numbers
        del scaling["kind"], scaling["attention_factor"]
    vectors.add(
        case, "rope", {"positions": positions.astype(np.int32), "x": x}, outputs,
        head_dim=config.head_dim, theta=config.rope_theta, scaling=scaling,
        pairs="(2i, 2i + 1)" if interleaved else "(i, i + head_dim / 2)",
    )  # fmt: skip


def rope_config(head_dim: int, rope_theta: float, scaling: RopeScaling | None) -> Config:
    """A config of which only the fields that RoPE reads matter."""
    return Config(
        arch="llama", dim=1, hidden_dim=1, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=head_dim, vocab_size=1,
        max_seq_len=1, tied=True, norm_eps=1e-5, rope_theta=rope_theta, rope_scaling=scaling,
    )  # fmt: skip


def around_boundaries(prefix: str) -> list[tuple[str, int, int]]:
    """For each of BOUNDARIES a case's name, tokens and first position: the token before it, at it and behind it."""
    return [(f"{prefix}at{position}", 3, position - 1) for position in BOUNDARIES]


def add_attention(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Grouped-query attention: a prompt from position 0, one token behind 300 others, three around a boundary."""
    for case, n, start in (("attention", 9, 0), ("attention.decode", 1, 300), *around_boundaries("attention.")):
        n_heads, head_dim = (4, 8) if case == "attention.at256" else (6, 32)
        q = rng.standard_normal((n, n_heads, head_dim)).astype(F32)
        k, v = (rng.standard_normal((start + n, 2, head_dim)).astype(F32) for _ in range(2))
        add_attention_case(vectors, case, q, k, v)


def add_attention_case(vectors: OpVectors, case: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Attention of queries at the last positions."""
    recorder = Recorder()
    out = attention(recorder, "", q, k, v)
    values = {"scores": recorder.tensors["attn.scores"], "probs": recorder.tensors["attn.probs"], "out": out}
    outputs = {name: (value, EXACT) for name, value in values.items()}
    vectors.add(case, "attention", {"q": q, "k": k, "v": v}, outputs, first_position=len(k) - len(q))

"""A model in a GGUF file, as `formats.checkpoint.Checkpoint` has it: config, and tensors by Hugging Face's names.

llama.cpp rotates adjacent pairs in models of architecture `llama`, and halves in `qwen3`. So its converter reorders the
rows of Llama's q and k, each head's from halves (i, i + head_dim / 2) to pairs (2i, 2i + 1), and leaves Qwen3's alone.
Here they come back in Hugging Face's order, halves, in which exporters and the reference expect them.

Llama 3's rescaling of RoPE is in the file as a divisor for each frequency, `rope_freqs.weight`, which `rope_scaling`
takes back to the numbers of config.json.
"""

import warnings
from pathlib import Path

import numpy as np

from formats.checkpoint import (
    DENSE,
    SPARSE,
    Config,
    ModelError,
    Moe,
    RopeScaling,
    linear,
    tensor_shapes,
    yarn,
    yarn_attention,
)
from formats.gguf_file import INPUT_SCALE, SCALE, TYPES, GGUFFiles, Metadata
from formats.gguf_tokenizer import TokenizerFiles, end_tokens, tokenizer_files
from formats.limits import LIMITS
from formats.model_file import MAX_EOS_IDS, Generation

# Hugging Face's name of each tensor, without what stands in front of and behind it.
_OUTSIDE_LAYERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",  # the router
}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}  # of all in one
_ARCHS = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}  # llama.cpp's names, and Hugging Face's
ROPE_FREQS = "rope_freqs.weight"
_DTYPES = {"F16": "<f2", "BF16": "bfloat16"}  # numpy's, of types that are stored as they are
# What a model may have beyond the forward pass implemented here, and the value of each that changes nothing.
_UNSUPPORTED = {
    "attention.sliding_window": 0,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.causal": True,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "embedding_scale": 1,
    "residual_scale": 1,
    "logit_scale": 1,
    "expert_shared_count": 0,
    "expert_weights_scale": 1,
    "use_parallel_residual": False,
    "rope.scale_linear": 1,
}
# Ids of the metadata at which llama.cpp ends: of a text, a turn, a message, and of prompts that fill a gap in code.
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
ROPE_TOLERANCE = 1e-5  # of a frequency, relative: the converter computes in fp32


def gguf_name(hf_name: str) -> str:
    """llama.cpp's name of a tensor: `model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    stem = hf_name.removesuffix(".weight")
    if stem in _OUTSIDE_LAYERS:
        return f"{_OUTSIDE_LAYERS[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    if part.startswith("mlp.experts."):
        return f"blk.{layer}.{_EXPERTS[part.rsplit('.', 1)[-1]]}.weight"
    return f"blk.{layer}.{_IN_LAYERS[part]}.weight"


def expert_of(hf_name: str) -> int | None:
    """The number of the expert whose matrix a name is, None for other tensors."""
    parts = hf_name.split(".")
    return int(parts[5]) if parts[4:5] == ["experts"] else None


def pairs_to_halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes llama.cpp's permutation: a head's rows go from pairs (2i, 2i + 1) to halves (i, i + head_dim / 2).

    weight: (heads * head_dim, dim) of a q or k projection.
    """
    rows = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


# ----------------------------------------------------------------------------
# RoPE's rescaling


def rope_divisors(scaling: RopeScaling, freq: np.ndarray) -> np.ndarray:
    """What llama3's rescaling divides each frequency by, (head_dim / 2,) fp64. freq: before rescaling, fp64."""
    s = scaling
    turns = s.original_max_position_embeddings * freq / (2 * np.pi)
    smooth = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / s.factor + smooth)


def find_rope_scaling(divisors: np.ndarray, head_dim: int, theta: float) -> RopeScaling | None:
    """The numbers of config.json that give these divisors of frequencies; None if there are none that do.

    Between the frequencies that stay and those that are divided by `factor`, the multiplier 1 / divisor is
    (1 - s) / factor + s, with s = (turns - low) / (high - low) and turns = context * frequency / (2 pi). That is a
    straight line over the frequency. It fixes high / low and context / low, so low is taken as 1, as Llama 3 has it
    (another low with the others in proportion is the same rescaling).
    """
    d = divisors.astype(np.float64)
    freq = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    factor = round(float(d.max()), 4)
    if factor <= 1 or not (d > 0).all():
        return None
    s = (1 / d - 1 / factor) / (1 - 1 / factor)
    between = (s > 1e-5) & (s < 1 - 1e-5)
    if not between.any():
        return None
    highs = [4.0]  # Llama 3's; one point between does not say
    if between.sum() > 1:
        with warnings.catch_warnings(action="ignore", category=np.exceptions.RankWarning):  # all frequencies alike
            at_zero = np.polyfit(freq[between], s[between], 1)[1]  # -low / (high - low)
        highs = [round(float(1 - 1 / at_zero), 2)] if at_zero < 0 else []
    for high in highs:
        context = np.median(2 * np.pi * (1 + s[between] * (high - 1)) / freq[between])
        scaling = RopeScaling(factor, 1.0, high, round(float(context)))
        if high > 1 and np.allclose(rope_divisors(scaling, freq), d, rtol=ROPE_TOLERANCE, atol=0):
            return scaling
    return None


# ----------------------------------------------------------------------------
# Metadata


def read_config(files: GGUFFiles, archs: tuple[str, ...] = DENSE) -> Config:
    """The config that the metadata gives. Raises ModelError for anything this project does not run, or not in archs."""
    m = files.metadata
    arch = m.text("general.architecture")
    if _ARCHS.get(arch) not in archs:
        hint = "; python -m export moe takes it" if _ARCHS.get(arch) in SPARSE else ""
        names = [name for name, hf in _ARCHS.items() if hf in archs]
        raise m.refuse(
            "general.architecture", f"supported {'is' if len(names) == 1 else 'are'} {' and '.join(names)}{hint}"
        )
    for field, harmless in _UNSUPPORTED.items():
        key = f"{arch}.{field}"
        if key in m and m.value(key) != harmless:
            raise m.refuse(key, "not supported")

    dim, n_heads = m.integer(f"{arch}.embedding_length"), m.integer(f"{arch}.attention.head_count")
    n_kv_heads = m.integer(f"{arch}.attention.head_count_kv", n_heads)
    head_dim = m.integer(f"{arch}.attention.key_length", max(1, dim // n_heads))
    for field in ("attention.value_length", "rope.dimension_count"):
        if m.integer(f"{arch}.{field}", head_dim) != head_dim:
            raise m.refuse(f"{arch}.{field}", f"expected {head_dim}, the length of a head")
    if n_heads % n_kv_heads:
        raise m.refuse(f"{arch}.attention.head_count_kv", f"does not divide the {n_heads} query heads")
    if head_dim % 2:
        raise m.refuse(f"{arch}.attention.key_length", f"heads of {head_dim} values, RoPE needs an even number")
    embedding = files.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{m.path}: tensor token_embd.weight is missing")
    vocab_size = embedding.shape[0]
    if m.integer(f"{arch}.vocab_size", vocab_size) != vocab_size:
        raise m.refuse(f"{arch}.vocab_size", f"token_embd.weight has {vocab_size} rows")
    theta = m.number(f"{arch}.rope.freq_base", 10000.0)
    eps = m.number(f"{arch}.attention.layer_norm_rms_epsilon")
    for key, value in ((f"{arch}.rope.freq_base", theta), (f"{arch}.attention.layer_norm_rms_epsilon", eps)):
        if value == 0:
            raise m.refuse(key, "expected a positive number")
    moe = None
    if _ARCHS[arch] in SPARSE:  # of llama.cpp's qwen3moe all layers have experts, and weights sum to 1
        n_experts = m.integer(f"{arch}.expert_count", most=int(LIMITS["n_experts"].high))
        n_active = m.integer(f"{arch}.expert_used_count", most=n_experts)
        moe = Moe(n_experts, n_active, m.integer(f"{arch}.expert_feed_forward_length"), norm_topk_prob=True)
    elif m.integer(f"{arch}.expert_count", 0, least=0):
        raise m.refuse(f"{arch}.expert_count", "not supported")
    config = Config(
        arch=_ARCHS[arch],
        moe=moe,
        dim=dim,
        hidden_dim=m.integer(f"{arch}.feed_forward_length"),
        n_layers=m.integer(f"{arch}.block_count", most=65535),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_seq_len=m.integer(f"{arch}.context_length"),
        tied="output.weight" not in files.tensors,
        norm_eps=eps,
        rope_theta=theta,
        rope_scaling=read_rope_scaling(files, arch, head_dim, theta),
    )
    for field, value in vars(config).items():
        if field in LIMITS and not LIMITS[field].holds(value):
            raise ModelError(f"{m.path}: {field} is {value}, expected {LIMITS[field]}")
    return config


def read_rope_scaling(files: GGUFFiles, arch: str, head_dim: int, theta: float) -> RopeScaling | None:
    """The rescaling that a file has. Raises ModelError for kinds that no program runs."""
    m = files.metadata
    key = f"{arch}.rope.scaling.type"
    kind = m.text(key, "none")
    if kind in ("linear", "yarn"):
        return read_linear_or_yarn(m, kind, arch, head_dim, theta)
    if kind not in ("none", "llama3"):
        raise m.refuse(key, "supported are none, linear, yarn and, by rope_freqs.weight, llama3")
    tensor = files.tensors.get(ROPE_FREQS)
    if tensor is None:
        if kind == "llama3":
            raise m.refuse(key, f"tensor {ROPE_FREQS} is missing")
        if m.number(f"{arch}.rope.scaling.factor", 1.0) not in (0.0, 1.0):
            raise m.refuse(f"{arch}.rope.scaling.factor", "without rope.scaling.type it is not known what to scale")
        return None
    where = f"{tensor.file}: tensor {ROPE_FREQS}"
    if tensor.shape != (head_dim // 2,) or tensor.type != "F32":
        raise ModelError(
            f"{where} has type {tensor.type} and shape {tensor.shape}, expected F32 and {(head_dim // 2,)}"
        )
    divisors = files.read(ROPE_FREQS)
    if (divisors == 1).all():
        return None
    scaling = find_rope_scaling(divisors, head_dim, theta)
    if scaling is None:
        raise ModelError(f"{where} does not hold the factors of a rescaling of type llama3, others are not supported")
    for field in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        value = getattr(scaling, field)
        limit = LIMITS["rope_scaling factor" if field == "factor" else field]
        if not limit.holds(value):
            raise ModelError(f"{where} is a rescaling whose {field} is {value}, expected {limit}")
    return scaling


def read_linear_or_yarn(m: Metadata, kind: str, arch: str, head_dim: int, theta: float) -> RopeScaling | None:
    """Those two, from the keys that llama.cpp reads; a factor of 0, 1 or none changes nothing.

    llama.cpp takes YaRN's beta_fast and beta_slow as 32 and 1 whatever the file says, in these architectures.
    """
    key, context = f"{arch}.rope.scaling.factor", m.integer(f"{arch}.context_length")
    factor = m.number(key, 1.0)
    if factor in (0.0, 1.0):
        return None
    if not LIMITS["rope_scaling factor"].holds(factor):
        raise m.refuse(key, f"expected {LIMITS['rope_scaling factor']}")
    if kind == "linear":
        return linear(factor, context, head_dim)
    context = m.integer(f"{arch}.rope.scaling.original_context_length", context)
    attention = yarn_attention(factor) * m.number(f"{arch}.rope.scaling.attn_factor", 1.0)
    if theta <= 1:
        raise m.refuse(f"{arch}.rope.freq_base", "YaRN needs more than 1")
    found = yarn(factor, context, head_dim, theta, attention_factor=attention)
    if not (LIMITS["attention_factor"].holds(attention) and found.high_freq_factor > found.low_freq_factor):
        raise m.refuse(key, "a rescaling of type yarn that no program runs")
    return found


def read_generation(m: Metadata, vocab_size: int) -> Generation:
    """Ids that end a text, and how the model likes to be sampled (greedy, unless general.sampling says otherwise)."""

    def token_id(name: str) -> int:
        return m.integer(f"tokenizer.ggml.{name}", -1, least=0, most=vocab_size - 1)

    of_metadata = [i for i in map(token_id, _END_IDS) if i >= 0]
    eos_ids = list(dict.fromkeys(of_metadata + end_tokens(m, vocab_size)))
    if len(eos_ids) > MAX_EOS_IDS:
        ids = ", ".join(map(str, eos_ids[:20]))
        raise ModelError(f"{m.path}: a text ends at {len(eos_ids)} ids ({ids}), at most {MAX_EOS_IDS} fit the header")
    keys = {name: f"general.sampling.{name}" for name in ("temp", "top_p", "top_k", "min_p")}
    sampled = any(key in m for key in keys.values())
    return Generation(
        bos_id=token_id("bos_token_id"),
        eos_ids=eos_ids,
        temperature=m.number(keys["temp"], 1.0, most=100.0) if sampled else 0.0,
        top_p=m.number(keys["top_p"], 1.0, most=1.0),
        top_k=m.integer(keys["top_k"], 50 if sampled else 0, least=0, most=1 << 24),
        min_p=m.number(keys["min_p"], 0.0, most=1.0),
    )


# ----------------------------------------------------------------------------
# The model


class GGUFModel:
    """The config and tensors of a GGUF file, read and dequantized when asked for.

    Opening checks that every tensor is there with the right shape and a type that can be read, and that there are no
    others, such as biases; it reads none but the few numbers of rope_freqs.weight.
    """

    def __init__(self, path: Path | str, archs: tuple[str, ...] = DENSE):
        self.path = self.config_path = Path(path)
        self.forms: dict = {}  # no tensor is kept in the form that it has
        self._files = GGUFFiles(self.path)
        self.metadata = self._files.metadata
        self.config = read_config(self._files, archs)
        self.generation = read_generation(self.metadata, self.config.vocab_size)
        self._check_tensors()

    def _check_tensors(self) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in tensor_shapes(self.config).items():
            experts = () if expert_of(name) is None else (self.config.moe.n_experts,)
            expected[gguf_name(name)] = (*experts, *shape)
        tensors = self._files.tensors
        for name in [name for name, tensor in tensors.items() if tensor.type == "NVFP4" and name in expected]:
            for scale in (name.replace(".weight", SCALE), name.replace(".weight", INPUT_SCALE)):
                expected |= {scale: expected[name][:-2] or (1,)} if scale in tensors else {}
        for name, shape in expected.items():
            if name not in tensors:
                raise ModelError(f"{self.path}: tensor {name} is missing")
            found = tensors[name]
            if found.type not in TYPES:
                raise ModelError(f"{found.file}: tensor {name} has type {found.type}, supported are {', '.join(TYPES)}")
            if found.shape != shape:
                raise ModelError(f"{found.file}: tensor {name} has shape {found.shape}, the metadata implies {shape}")
        others = sorted(tensors.keys() - expected.keys() - {ROPE_FREQS})
        if others:
            raise ModelError(f"{tensors[others[0]].file}: tensor {others[0]} is not supported")

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors as the file has them."""
        return sum(tensor.n_bytes for tensor in self._files.tensors.values())

    def tokenizer_files(self) -> TokenizerFiles:
        """What tokenizer.json and tokenizer_config.json would say. Raises ModelError."""
        return tokenizer_files(self.metadata, self.config.vocab_size)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as fp32, finite, by Hugging Face's name and in Hugging Face's order of rows."""
        value = self._files.read(gguf_name(name), expert_of(name))
        if self.config.arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            return pairs_to_halves(value, self.config.head_dim)
        return value

    def dtype(self, name: str) -> str:
        """The type of numbers that holds a tensor exactly: F16's and BF16's own, fp32 for all others."""
        return _DTYPES.get(self._files.tensors[gguf_name(name)].type, "<f4")

    def stored(self, name: str) -> np.ndarray:
        """The same values in that type, as `Checkpoint.stored` has them."""
        return self.tensor(name).astype(self.dtype(name))

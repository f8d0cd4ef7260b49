"""GGUF files of Hugging Face directories, as llama.cpp's converter would write them, in any type of tensor.

The `gguf` package writes the files and quantizes to all types but the K-quants and IQ4, for which `ENCODERS` has plain
encoders: enough to tell a story, not made for quality. Rows of K-quants and IQ4_XS are whole blocks of 256 values, and
the tiny models' rows have 128 and 384. `widened` makes of one a model with rows of 256 and 512 that computes the same,
`all_experts` of tiny-qwen3-moe one without dense layers.
"""

import json
import shutil

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, quantize
from safetensors.numpy import load_file, save_file

from formats.checkpoint import Checkpoint, tensor_shapes

F32 = np.float32
PRE = {"llama": "llama-bpe", "qwen3": "qwen2"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


# ----------------------------------------------------------------------------
# Encoders of K-quants and IQ4: blocks (n, size) fp32 to bytes


def pack(codes, groups, bits):
    """(n, groups, 8 / bits, width) codes of so many bits into (n, groups * width) bytes, the first lowest."""
    per_byte = 8 // bits
    shifted = codes.astype(int).reshape(len(codes), groups, per_byte, -1) << (bits * np.arange(per_byte))[:, None]
    return shifted.sum(axis=2).astype(np.uint8).reshape(len(codes), -1)


def half(x):
    """(n, 1) as fp16: what is stored, and its bytes."""
    stored = x.astype(np.float16)
    return stored.astype(F32), stored.view(np.uint8)


def divide(a, b):
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), F32), where=b != 0)


def with_minima(x, width, most, scale_most):
    """Each part of `width` values as scale * code - minimum. Codes (n, parts, width), scales, minima, d and dmin."""
    parts = x.reshape(len(x), -1, width)
    low = np.minimum(parts.min(axis=2), 0)
    scale = (parts.max(axis=2) - low) / most
    d, d_bytes = half(scale.max(axis=1, keepdims=True) / scale_most)
    dmin, dmin_bytes = half(-low.min(axis=1, keepdims=True) / scale_most)
    scales, minima = np.rint(divide(scale, d)), np.rint(divide(-low, dmin))
    codes = np.rint(divide(parts + (dmin * minima)[..., None], (d * scales)[..., None]))
    return codes.clip(0, most), scales.clip(0, scale_most).astype(int), minima.clip(0, scale_most).astype(int), \
        d_bytes, dmin_bytes  # fmt: skip


def without_minima(x, width, lowest, scale_most, nearest):
    """Each part of `width` values as scale * code, its largest value as `lowest`. Codes, signed scales, d."""
    parts = x.reshape(len(x), -1, width)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=2)[..., None], axis=2)[..., 0]
    scale = largest / lowest
    if scale_most is None:  # one part a block, its scale is d
        d, d_bytes = half(scale)
        return nearest(divide(parts, d[..., None])), None, d_bytes
    d, d_bytes = half(np.abs(scale).max(axis=1, keepdims=True) / scale_most)
    scales = np.rint(divide(scale, d)).clip(-scale_most, scale_most)
    return nearest(divide(parts, (d * scales)[..., None])), scales.astype(int), d_bytes


def signed(lowest):
    return lambda x: np.rint(x).clip(lowest, -lowest - 1).astype(int) - lowest


def iq4(x):
    levels = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    return np.abs(x[..., None] - levels).argmin(axis=-1)


def six_bits(scales, minima):
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    s, m = scales, minima
    return np.concatenate(
        [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=1
    ).astype(np.uint8)


def q2_k(x):
    codes, scales, minima, d, dmin = with_minima(x, 16, 3, 15)
    return [(scales | minima << 4).astype(np.uint8), pack(codes, 2, 2), d, dmin]


def q3_k(x):
    codes, scales, d = without_minima(x, 16, -4, 31, signed(-4))
    s = scales + 32
    high = (s >> 4).reshape(len(s), 4, 4)
    packed = np.concatenate([s[:, :8] & 15 | (s[:, 8:] & 15) << 4, (high << 2 * np.arange(4)[:, None]).sum(axis=1)], 1)
    return [pack(codes >> 2, 1, 1), pack(codes & 3, 2, 2), packed.astype(np.uint8), d]


def q4_k(x):
    codes, scales, minima, d, dmin = with_minima(x, 32, 15, 63)
    return [d, dmin, six_bits(scales, minima), pack(codes, 4, 4)]


def q5_k(x):
    codes, scales, minima, d, dmin = with_minima(x, 32, 31, 63)
    codes = codes.astype(int)
    return [d, dmin, six_bits(scales, minima), pack(codes >> 4, 1, 1), pack(codes & 15, 4, 4)]


def q6_k(x):
    codes, scales, d = without_minima(x, 16, -32, 127, signed(-32))
    return [pack(codes & 15, 2, 4), pack(codes >> 4, 2, 2), scales.astype(np.int8).view(np.uint8), d]


def iq4_nl(x):
    codes, _, d = without_minima(x, 32, -127, None, iq4)
    return [d, pack(codes, 1, 4)]


def iq4_xs(x):
    codes, scales, d = without_minima(x, 32, -127, 31, iq4)
    s = scales + 32
    high = ((s >> 4) << 2 * np.arange(8)).sum(axis=1, keepdims=True).astype("<u2").view(np.uint8)
    return [d, high, pack(s & 15, 4, 4), pack(codes, 8, 4)]


ENCODERS = {"Q2_K": (256, q2_k), "Q3_K": (256, q3_k), "Q4_K": (256, q4_k), "Q5_K": (256, q5_k), "Q6_K": (256, q6_k),
            "IQ4_NL": (32, iq4_nl), "IQ4_XS": (256, iq4_xs)}  # fmt: skip


# Types without an encoder: of these `encode` makes random blocks.
NOT_ENCODED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")


def encode(values, kind):
    """fp32 values (rows, n) as the bytes, or fp32 or fp16, of a type of tensor."""
    if kind == "I8":  # no weights
        return values.astype(np.int8)
    if kind in NOT_ENCODED:  # a byte below 0x3c makes no number of fp16 that is not finite
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        return np.random.default_rng(0).integers(0, 0x3C, (len(values), values.shape[1] // block * size), np.uint8)
    if kind not in ENCODERS:
        return quantize(values, GGMLQuantizationType[kind])
    size, encoder = ENCODERS[kind]
    return np.concatenate(encoder(values.reshape(-1, size)), axis=1).reshape(len(values), -1)


# ----------------------------------------------------------------------------
# Files


def permuted(weight, n_heads):
    """Rows of q or k as llama.cpp keeps them for Llama: rows 2i and 2i + 1 of a head are i and i + head_dim / 2."""
    out, head_dim = np.empty_like(weight), len(weight) // n_heads
    for head in range(n_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + i + head_dim // 2]
    return out


def rope_factors(config):
    """rope_freqs.weight of llama3's rescaling, in fp32 like the converter."""
    s, c = config.rope_scaling, config
    freq = (1 / F32(c.rope_theta) ** (np.arange(0, c.head_dim, 2, dtype=F32) / F32(c.head_dim))).astype(F32)
    factors = []
    for wavelength in 2 * np.pi / freq.astype(float):
        turns = s.original_max_position_embeddings / wavelength
        if turns > s.high_freq_factor:
            factors.append(1.0)
        elif turns < s.low_freq_factor:
            factors.append(s.factor)
        else:
            part = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            factors.append(1 / ((1 - part) / s.factor + part))
    return np.array(factors, F32)


def tensors_of(hf_dir, kind):
    """llama.cpp's name of every tensor, its data and its type: `kind` for matrices, fp32 for vectors."""
    checkpoint = Checkpoint(hf_dir)
    config = checkpoint.config
    for name in tensor_shapes(config):
        value, stem = checkpoint.tensor(name), name.removesuffix(".weight")
        if config.arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            value = permuted(value, config.n_heads if stem.endswith("q_proj") else config.n_kv_heads)
        layer = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            layer = f"blk.{layer}."
        stored = kind if value.ndim == 2 else "F32"
        yield f"{layer}{NAMES[stem]}.weight", encode(value, stored), stored
    if config.rope_scaling:
        yield "rope_freqs.weight", rope_factors(config), "F32"


def metadata_of(hf_dir):
    """Everything that the converter writes of config.json, generation_config.json and the tokenizer: key -> value."""
    c = Checkpoint(hf_dir).config
    m = {
        "context_length": c.max_seq_len, "embedding_length": c.dim, "block_count": c.n_layers,
        "feed_forward_length": c.hidden_dim, "attention.head_count": c.n_heads,
        "attention.head_count_kv": c.n_kv_heads, "rope.freq_base": c.rope_theta,
        "attention.layer_norm_rms_epsilon": c.norm_eps, "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
    }  # fmt: skip
    if c.arch == "llama":
        m |= {"vocab_size": c.vocab_size, "rope.dimension_count": c.head_dim}
    metadata = {f"{c.arch}.{key}": value for key, value in m.items()}
    if not (hf_dir / "tokenizer.json").exists():
        return c.arch, metadata | {"tokenizer.ggml.model": "none"}

    tokenizer = json.loads((hf_dir / "tokenizer.json").read_text())
    config = json.loads((hf_dir / "tokenizer_config.json").read_text())
    names = {i: (name, 1) for name, i in tokenizer["model"]["vocab"].items()}
    names |= {t["id"]: (t["content"], 3 if t["special"] else 4) for t in tokenizer["added_tokens"]}
    tokens = [names.get(i, (f"[PAD{i}]", 5)) for i in range(c.vocab_size)]
    ids = {name: i for i, (name, _) in names.items()}
    metadata |= {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": PRE[c.arch],
        "tokenizer.ggml.tokens": [name for name, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": config["add_bos_token"],
        "tokenizer.chat_template": config["chat_template"],
        "tokenizer.ggml.padding_token_id": ids[config["pad_token"]],
    }  # fmt: skip
    generation = json.loads((hf_dir / "generation_config.json").read_text())
    for kind, i in zip(("eos", "eot", "eom"), generation["eos_token_id"], strict=False):
        metadata[f"tokenizer.ggml.{kind}_token_id"] = i
    if config["bos_token"]:
        metadata["tokenizer.ggml.bos_token_id"] = ids[config["bos_token"]]
    sampling = {"temp": generation["temperature"], "top_p": generation["top_p"], "top_k": generation["top_k"]}
    return c.arch, metadata | {f"general.sampling.{key}": value for key, value in sampling.items()}


FLOATS = ("freq_base", "epsilon", "temp", "top_p", "scaling.factor")


def add(writer, key, value):
    """One value of metadata, of the type that llama.cpp gives it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, tuple):  # of a type that is not the usual one
        writer.add_key_value(key, value[1], GGUFValueType[value[0]])
    elif key.endswith(FLOATS):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def write_gguf(hf_dir, out, kind="F32", tensors=None, types=None, parts=0, **metadata):
    """Writes a GGUF file of the model.

    tensors: others in the place of some, or besides them: name -> fp32 values, or None to leave one out; types: their
    type, where it is not F32. metadata: likewise, with `__` for a dot and `arch` for the architecture's name. parts:
    tensors in each file of a split model.
    """
    arch, values = metadata_of(hf_dir)
    for key, value in metadata.items():
        values[key.replace("__", ".").replace("arch.", f"{arch}.")] = value
    writer = GGUFWriter(out, values.pop("general.architecture", arch), split_max_tensors=parts)
    for key, value in values.items():
        if value is not None:
            add(writer, key, value)
    written = {name: (data, stored) for name, data, stored in tensors_of(hf_dir, kind)}
    for name, value in (tensors or {}).items():
        stored = (types or {}).get(name, "F32")
        written[name] = None if value is None else (encode(value, stored), stored)
    for name, item in written.items():
        if item is not None:
            writer.add_tensor(name, item[0], raw_dtype=GGMLQuantizationType[item[1]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def widened(hf_dir, out):
    """A model with rows of 256 and 512 values that computes what a tiny Llama does: the rest is zeros.

    A mean of squares over twice the channels is half as large; so are eps and, by a factor sqrt(2), the norms' weights.
    Further heads have keys, queries and values of zero, so they add nothing.
    """
    config, weights = json.loads((hf_dir / "config.json").read_text()), load_file(hf_dir / "model.safetensors")
    wide = config | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
                     "rms_norm_eps": config["rms_norm_eps"] / 2}  # fmt: skip
    out.mkdir()
    for file in hf_dir.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    (out / "config.json").write_text(json.dumps(wide))
    padded = {}
    for name, shape in tensor_shapes(Checkpoint(hf_dir).config).items():
        value = weights[name].astype(F32)
        assert value.shape == shape
        if name.endswith("norm.weight"):
            value = value / F32(np.sqrt(2))
        widths = {128: 256, 384: 512, 64: 128}
        target = tuple(widths.get(n, n) for n in shape)
        padded[name] = np.pad(value, [(0, t - n) for n, t in zip(shape, target, strict=True)])
    save_file(padded, out / "model.safetensors")
    return out


def all_experts(hf_dir, out):
    """tiny-qwen3-moe with experts in its dense layer, too, as llama.cpp has it, that computes the same.

    That layer's are all alike: two of them weigh 1 in sum. The others' are as wide by zeros.
    """
    shutil.copytree(hf_dir, out)
    config, weights = json.loads((hf_dir / "config.json").read_text()), load_file(hf_dir / "model.safetensors")
    wide = config["intermediate_size"]
    for name in [name for name in weights if ".0.mlp." in name]:
        value = weights.pop(name)
        weights |= {name.replace("mlp.", f"mlp.experts.{i}."): value for i in range(config["num_experts"])}
    for name in [name for name in weights if ".experts." in name]:
        n_out, n_in = weights[name].shape
        zeros = (0, wide - n_in) if "down_proj" in name else (wide - n_out, 0)
        weights[name] = np.pad(weights[name], [(0, n) for n in zeros])
    weights["model.layers.0.mlp.gate.weight"] = weights["model.layers.1.mlp.gate.weight"]
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [], "moe_intermediate_size": wide}))
    return out

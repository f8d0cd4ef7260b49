"""Twelve random mixtures of experts, each with a ladder of its own: 3 to 128 experts, some of them without a token."""

import json

import numpy as np
from safetensors.numpy import save_file

from formats.checkpoint import SPARSE, read_config, tensor_shapes

# Experts, active ones, routing; options of export.moe.export_ladder. "empty": half of the experts get no token. "all":
# one expert gets every token.
ALL = ("embed", "attn", "ffn", "experts", "classifier")
CASES = [
    (3, 1, "even", {}),
    (3, 3, "even", {"bits": dict.fromkeys(ALL, 8)}),
    (5, 2, "empty", {"bits": dict.fromkeys(ALL, 4)}),
    (8, 2, "all", {"bits": {"experts": 4}, "sparse": True}),
    (8, 1, "all", {}),
    (16, 4, "even", {"bits": {"experts": 8, "attn": 8, "ffn": 8}, "group": 64}),
    (17, 3, "empty", {"bits": {"gate_up": 2, "down": 4}, "group": 64, "sparse": True}),
    (32, 8, "even", {"bits": dict.fromkeys(ALL, 2)}),
    (33, 5, "empty", {"bits": {"experts": 4, "embed": 4}, "group": 32}),
    (64, 8, "all", {"bits": {"gate_up": 4, "down": 2}}),
    (128, 8, "even", {}),
    (128, 1, "empty", {"bits": {"experts": 8}}),
]
TOKENS = 24


def write_case(folder, which):
    """The Hugging Face directory of a case. Channel 0 of a token is 1: the router reads from it who gets none."""
    n_experts, n_active, routing, _ = CASES[which]
    rng = np.random.default_rng(which)
    n_layers, heads = 2 + which % 2, int(rng.choice([2, 4]))
    config = {
        "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": int(rng.integers(60, 120)),
        "max_position_embeddings": 128, "hidden_size": int(rng.choice([64, 128, 192])), "num_hidden_layers": n_layers,
        "intermediate_size": int(rng.choice([64, 192])), "moe_intermediate_size": int(rng.choice([64, 128])),
        "num_attention_heads": heads, "num_key_value_heads": int(rng.choice([1, 2])), "head_dim": 128 // heads,
        "tie_word_embeddings": which % 3 == 0, "num_experts": n_experts, "num_experts_per_tok": n_active,
        "norm_topk_prob": which % 2 == 0, "decoder_sparse_step": 1, "mlp_only_layers": [0] if n_layers == 3 else [],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, shape in tensor_shapes(read_config(folder, archs=SPARSE)).items():
        is_norm = len(shape) == 1
        value = rng.standard_normal(shape) * (0.2 if is_norm else 0.1) + is_norm
        if name.endswith("embed_tokens.weight"):
            value[:, 0] = 1
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            value[0] = 0
        elif name.endswith("mlp.gate.weight") and routing != "even":
            value[:, 0] = -30
            value[: n_experts // 2 if routing == "empty" else 1, 0] = 30
        elif name.endswith("post_attention_layernorm.weight"):
            value[0] = 1
        tensors[name] = value.astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

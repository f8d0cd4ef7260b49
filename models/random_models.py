"""Writes models/random-llama and models/random-qwen3-moe: small random models with what no trained one has.

    python -m models.random_models [DIR]

random-llama is a GPTQ checkpoint of 4 bits whose groups are scattered over the inputs (desc_act): its file has an
order in which activations are gathered. random-qwen3-moe has `norm_topk_prob` false: the weights of a token's experts
do not add up to 1. Neither has a tokenizer. Golden traces of two tokens are made of them (golden/make.py).
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from formats.checkpoint import DENSE, SPARSE, read_config, tensor_shapes
from formats.packing import pack_words

MODELS = Path(__file__).resolve().parent
SMALL = {
    "num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
BITS, GROUP = 4, 64
LLAMA = {
    "model_type": "llama", **SMALL, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "quantization_config": {
        "quant_method": "gptq", "checkpoint_format": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": True,
        "sym": False,
    },
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", **SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SAME_INPUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Weights large enough that every part of the model matters, norms around 1; fp16."""
    is_norm = len(shape) == 1
    return (rng.standard_normal(shape) * (0.2 if is_norm else 0.12) + is_norm).astype(np.float16)


def random_gptq(rng: np.random.Generator, n_out: int, g_idx: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a matrix as a GPTQ checkpoint has them. g_idx: (n_in,), the group of each input."""
    codes = rng.integers(0, 1 << BITS, (len(g_idx), n_out))
    zeros = rng.integers(5, 11, (len(g_idx) // GROUP, n_out))
    return {
        "qweight": pack_words(codes, BITS),
        "qzeros": np.ascontiguousarray(pack_words(zeros.T - 1, BITS).T),
        "scales": (rng.uniform(0.5, 1.5, zeros.shape) * 0.025).astype(np.float16),
        "g_idx": g_idx.astype(np.int32),
    }


def write_model(out: Path, fields: dict, seed: int) -> None:
    """Writes a directory: config.json and model.safetensors; matrices of layers are packed if the config says so."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    is_packed = "quantization_config" in fields
    config = read_config(out, quantized=is_packed, archs=(*DENSE, *SPARSE))
    rng, tensors = np.random.default_rng(seed), {}
    groups: dict[str, np.ndarray] = {}  # of the inputs that some matrices share
    for name, shape in tensor_shapes(config).items():
        module = name.removesuffix(".weight")
        if not is_packed or ".layers." not in name or len(shape) == 1:
            tensors[name] = random_tensor(rng, shape)
            continue
        block, _, matrix = module.rpartition(".")
        place = block + next(names[0] for names in SAME_INPUT if matrix in names)
        groups.setdefault(place, rng.permutation(np.arange(shape[1]) // GROUP))
        tensors |= {f"{module}.{part}": t for part, t in random_gptq(rng, shape[0], groups[place]).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def write_random_models(folder: Path) -> None:
    """Writes both directories."""
    for seed, (name, fields) in enumerate((("random-llama", LLAMA), ("random-qwen3-moe", QWEN3_MOE))):
        write_model(folder / name, fields, seed)


if __name__ == "__main__":
    write_random_models(Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS)

"""Random small models and what Hugging Face `transformers` computes for them: the oracle of the forward pass.

    python -m tests.hf_fixtures write [NAME...]    make tests/hf/ anew, or some of it (needs torch and transformers)
    python -m tests.hf_fixtures check [NAME...]    compute the logits again and compare with the stored ones

Each fixture is a Hugging Face directory (config.json, model.safetensors) with expected.safetensors beside it: token
ids and the fp32 logits under eager attention. Together they exercise GQA and MHA, tied and untied classifiers,
head_dim other than dim / n_heads, llama3 RoPE scaling past original_max_position_embeddings, and a config that
contradicts itself and its weights. MOE_FIXTURES are mixtures of experts: one expert active, all of them, some with
equal logits, dense layers by list and by step, weights normalized or not.

rope_scalings.safetensors has logits of two of these models under the rescalings of RoPE in ROPE_SCALINGS, at positions
up to four times the original context.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "safetensors", "torch", "transformers")

import numpy as np
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).resolve().parent / "hf"

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 160,
         "max_position_embeddings": 128}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}


def heads(n_heads: int, n_kv_heads: int, head_dim: int, tied: bool) -> dict:
    """The attention fields of a config."""
    return {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "head_dim": head_dim,
            "tie_word_embeddings": tied}  # fmt: skip


FIXTURES = {
    "llama-gqa-tied": SMALL | LLAMA | heads(4, 2, 16, tied=True),
    "llama-mha-untied": SMALL | LLAMA | heads(4, 4, 16, tied=False) | {"rope_theta": 10000.0},
    "llama-wide-heads": SMALL | LLAMA | heads(4, 1, 32, tied=False),
    "llama-scaled-rope": SMALL | LLAMA | heads(4, 2, 32, tied=True) | {"rope_scaling": LLAMA3},
    "qwen3-gqa-untied": SMALL | QWEN3 | heads(4, 2, 32, tied=False),
    "qwen3-mha-tied": SMALL | QWEN3 | heads(2, 2, 64, tied=True),
    # rope_scaling replaces all of rope_parameters; tied, it says, but OWN_CLASSIFIER has another classifier.
    "llama-contradictory": SMALL | LLAMA | heads(4, 2, 16, tied=True)
    | {"num_hidden_layers": 1, "rope_scaling": LLAMA3, "rope_theta": 20000.0,
       "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
}  # fmt: skip
MOE = {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_size": 32,
       "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 128,
       "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip


def experts(n: int, active: int, hidden: int, normalize: bool) -> dict:
    """The experts' fields of a config."""
    return {"num_experts": n, "num_experts_per_tok": active, "moe_intermediate_size": hidden,
            "norm_topk_prob": normalize}  # fmt: skip


MOE_FIXTURES = {
    "qwen3-moe-2-of-8": MOE | heads(4, 2, 16, tied=False) | experts(8, 2, 24, True),
    "qwen3-moe-one-active": MOE | heads(2, 2, 16, tied=True) | experts(6, 1, 16, False),
    "qwen3-moe-all-active": MOE | heads(4, 1, 8, tied=True) | experts(4, 4, 16, True),
    "qwen3-moe-listed-dense": MOE | heads(4, 2, 8, tied=False) | experts(5, 3, 16, False)
    | {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen3-moe-every-second": MOE | heads(4, 2, 8, tied=True) | experts(4, 2, 16, True)
    | {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "qwen3-moe-ties": MOE | heads(4, 2, 8, tied=True) | experts(8, 3, 16, True),
}  # fmt: skip
# Experts 5 and 6 have the routers' rows of 1 and 2, so that logits are equal, and their weights: which of equals
# torch.topk takes is not defined; here all are right. The op vectors have ties with one right answer.
TIED_EXPERTS = ("qwen3-moe-ties",)
OWN_CLASSIFIER = ("llama-contradictory",)
# Rescalings of RoPE: original context, factor, and other fields of YaRN; linear has none.
ROPE_SCALINGS = {
    f"{base}.{name}": (base, context, {"original_max_position_embeddings": context, "factor": factor, **fields})
    for base in ("llama-scaled-rope", "qwen3-gqa-untied")
    for name, context, factor, fields in (
        ("linear", 256, 4.0, {"rope_type": "linear"}),
        ("yarn", 256, 4.0, {"rope_type": "yarn"}),
        ("yarn-type", 100, 2.5, {"type": "yarn"}),  # as older files call it
        ("yarn-betas", 128, 4.0, {"rope_type": "yarn", "beta_fast": 8, "beta_slow": 2}),
        ("yarn-not-truncated", 192, 4.0, {"rope_type": "yarn", "truncate": False}),
        ("yarn-attention", 64, 4.0, {"rope_type": "yarn", "attention_factor": 0.9}),
        ("yarn-mscale", 100, 4.0, {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5}),
    )
}
N_TOKENS = 48  # three times the original context of the scaled fixture


def transformers_logits(hf_dir: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits (n, vocab_size) fp32 that transformers computes with the directory's weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()


def with_rope_scaling(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Makes the directory of one of ROPE_SCALINGS; its tokens, and the positions whose logits are stored."""
    base, context, scaling = ROPE_SCALINGS[name]
    n = 4 * context
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(FIXTURES[base] | {"rope_scaling": scaling, "max_position_embeddings": n})
    )
    (folder / "model.safetensors").symlink_to(FOLDER / base / "model.safetensors")
    tokens = np.random.default_rng(n).integers(0, FIXTURES[base]["vocab_size"], n).astype(np.int32)
    return tokens, np.array([1, context - 1, context, 2 * context, 3 * context, n - 1])


def rope_logits(name: str) -> np.ndarray:
    """Logits (6, vocab_size) fp32 that transformers computes at those positions, all in fp64.

    In fp32 frequencies and angles are off by so much that at position 1000 logits are by 1e-5 of the largest.
    """
    import torch

    in_fp64 = patch.multiple(torch, float=torch.float64, float32=torch.float64)  # what its code asks for by name
    with tempfile.TemporaryDirectory() as folder, in_fp64, patch.object(torch.Tensor, "float", torch.Tensor.double):
        tokens, positions = with_rope_scaling(name, Path(folder) / "hf")
        logits = transformers_logits(Path(folder) / "hf", tokens)[positions]
    assert logits.dtype == np.float64
    return logits.astype(np.float32)


def random_weights(config: dict, seed: int, own_classifier: bool) -> dict[str, np.ndarray]:
    """fp16 weights large enough that every part of the model matters, norms around 1.

    own_classifier: there is one even if the config says that it is the embedding.
    """
    from formats.checkpoint import DENSE, SPARSE, read_config, tensor_shapes

    path = FOLDER / "config.tmp"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    parsed = read_config(path, archs=(*DENSE, *SPARSE))
    shapes = tensor_shapes(replace(parsed, tied=parsed.tied and not own_classifier))
    (path / "config.json").unlink()
    path.rmdir()
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        norm = len(shape) == 1
        weights[name] = (rng.standard_normal(shape) * (0.2 if norm else 0.15) + norm).astype(np.float16)
    return weights


def main() -> int:
    command, names = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command not in ("write", "check"):
        print(__doc__)
        return 2
    worst = 0.0
    for seed, (name, config) in enumerate((FIXTURES | MOE_FIXTURES).items()):
        if names and name not in names:
            continue
        hf_dir = FOLDER / name
        if command == "write":
            hf_dir.mkdir(parents=True, exist_ok=True)
            (hf_dir / "config.json").write_text(json.dumps(config, indent=1) + "\n")
            weights = random_weights(config, seed, name in OWN_CLASSIFIER)
            for key in weights if name in TIED_EXPERTS else ():
                if key.endswith("mlp.gate.weight"):
                    weights[key][5:7] = weights[key][1:3]
                for one, other in (("5", "1"), ("6", "2")):
                    weights[key] = weights[key.replace(f".experts.{one}.", f".experts.{other}.")]
            save_file(weights, hf_dir / "model.safetensors", metadata={"format": "pt"})
            tokens = np.random.default_rng(seed).integers(0, config["vocab_size"], N_TOKENS).astype(np.int32)
            save_file(
                {"tokens": tokens, "logits": transformers_logits(hf_dir, tokens)}, hf_dir / "expected.safetensors"
            )
        expected = load_file(hf_dir / "expected.safetensors")
        error = float(np.abs(transformers_logits(hf_dir, expected["tokens"]) - expected["logits"]).max())
        worst = max(worst, error)
        print(
            f"{name}: largest logit {np.abs(expected['logits']).max():.2f}, stored and computed differ by {error:.1e}"
        )
    stored = FOLDER / "rope_scalings.safetensors"
    if not names or "rope_scalings" in names:
        found = {name: rope_logits(name) for name in ROPE_SCALINGS}
        if command == "write":
            save_file(found, stored)
        error = max(float(np.abs(found[name] - logits).max()) for name, logits in load_file(stored).items())
        worst = max(worst, error)
        print(f"rope_scalings: {len(found)} configs, stored and computed differ by {error:.1e}")
    return 0 if worst <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())

"""A Hugging Face directory of a real model's shape with random bf16 weights, in two shards.

    python -m bench.random_checkpoint llama-3.2-1b OUT_DIR

For measuring what an export takes, and the speed and memory of the programs, without downloading anything. There is
no tokenizer: export with --no-tokenizer.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from formats.checkpoint import DENSE, SPARSE, Config, read_config, tensor_shapes

# From each model's published config.json.
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
         "max_position_embeddings": 131072, "tie_word_embeddings": True, "bos_token_id": 128000,
         "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936,
         "max_position_embeddings": 40960, "head_dim": 128}  # fmt: skip


def shape(dim: int, hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    """The size fields of a config."""
    return {"hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads}  # fmt: skip


MODELS = {
    "llama-3.2-1b": LLAMA | shape(2048, 8192, 16, 32, 8) | {"head_dim": 64},
    "llama-3.2-3b": LLAMA | shape(3072, 8192, 28, 24, 8) | {"head_dim": 128},
    "qwen3-0.6b": QWEN3 | shape(1024, 3072, 28, 16, 8) | {"tie_word_embeddings": True},
    "qwen3-1.7b": QWEN3 | shape(2048, 6144, 28, 16, 8) | {"tie_word_embeddings": True},
    "qwen3-4b": QWEN3 | shape(2560, 9728, 36, 32, 8) | {"tie_word_embeddings": True},
    "qwen3-8b": QWEN3 | shape(4096, 12288, 36, 32, 8) | {"tie_word_embeddings": False},
    "qwen3-14b": QWEN3 | shape(5120, 17408, 40, 40, 8) | {"tie_word_embeddings": False},
}


MIXTURES = {  # of experts; of these, models/by_rule.py makes files
    "qwen3-30b-a3b": QWEN3 | shape(2048, 6144, 48, 32, 4) | {
        "model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip


def config_of(name: str, layers: int | None = None) -> Config:
    """The config of one of MODELS or MIXTURES, read as an export would read it. layers: how many, if not all."""
    config = (MODELS | MIXTURES)[name] | ({} if layers is None else {"num_hidden_layers": layers})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return read_config(Path(folder), archs=(*DENSE, *SPARSE))


def write_checkpoint(name: str, out: Path) -> None:
    """Writes config.json, two shards of about the same size and their index."""
    import ml_dtypes  # here, because models/by_rule.py takes the shapes from this module and has numpy alone
    from safetensors.numpy import save_file
    from tqdm import tqdm

    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(MODELS[name], indent=1) + "\n", encoding="utf-8")
    shapes = tensor_shapes(read_config(out))
    rng = np.random.default_rng(0)
    # A large pool read from random places: as good as fresh numbers here, and far quicker to make.
    pool = (rng.standard_normal(1 << 24, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    total, done, shards = sum(int(np.prod(s)) for s in shapes.values()), 0, [{}, {}]
    for tensor, dims in tqdm(shapes.items(), unit="tensor"):
        n = int(np.prod(dims))
        if len(dims) == 1:
            value = np.ones(dims, ml_dtypes.bfloat16)
        else:
            start = int(rng.integers(len(pool)))
            value = np.resize(np.roll(pool, -start), n).reshape(dims)
        shards[1 if done > total // 2 else 0][tensor] = value
        done += n
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 2 * total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.random_checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write_checkpoint(args.model, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

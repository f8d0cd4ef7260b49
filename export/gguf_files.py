"""What a Hugging Face directory has beside its weights, made of a GGUF file's metadata.

`source_config` of export/hf_directory.py asks for config.json, `write_directory` for the other files:

    tokenizer.json           vocabulary, merges, added tokens, pre-tokenizer: formats/gguf_tokenizer.py
    tokenizer_config.json    special tokens and chat template, for a class that takes tokenizer.json as it is
    special_tokens_map.json  special tokens once more, for readers that look there
    generation_config.json   ids that begin and end a text, and how the model likes to be sampled

Read back, they give the same Config, Generation and ids of texts as the GGUF file itself. docs/gguf.md says what such a
file does not keep.
"""

import json
from typing import Any

import numpy as np

from formats.checkpoint import EMBEDDING
from formats.gguf_model import GGUFModel
from formats.gguf_tokenizer import SPECIAL_TOKENS

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
DTYPES = {"<f4": "float32", "<f2": "float16", "bfloat16": "bfloat16"}  # as config.json calls what is stored


def shortest(value: float) -> float:
    """The fp64 number of the fewest digits that is the same in fp32: 1e-05 for the fp32 number next to it."""
    return float(str(np.float32(value)))


def config_json(model: GGUFModel) -> dict[str, Any]:
    """config.json of the unquantized model, in fields that transformers 4 and 5 read."""
    c, rope, experts = model.config, None, {}
    if c.moe is not None:
        experts = {
            "num_experts": c.moe.n_experts,
            "num_experts_per_tok": c.moe.n_active,
            "moe_intermediate_size": c.moe.hidden_dim,
            "norm_topk_prob": c.moe.norm_topk_prob,
        }
    if (s := c.rope_scaling) is not None:
        rope = {"rope_type": s.kind, "factor": shortest(s.factor)}
        if s.kind != "linear":
            rope["original_max_position_embeddings"] = s.original_max_position_embeddings
        if s.kind == "llama3":
            rope |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
        elif s.kind == "yarn":
            rope["attention_factor"] = s.attention_factor
    return {
        "architectures": [ARCHITECTURES[c.arch]],
        "model_type": c.arch,
        "hidden_size": c.dim,
        "intermediate_size": c.hidden_dim,
        **experts,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_seq_len,
        "tie_word_embeddings": c.tied,
        "rms_norm_eps": shortest(c.norm_eps),
        "rope_theta": shortest(c.rope_theta),
        "rope_scaling": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        **({"mlp_bias": False} if c.arch == "llama" else {}),
        **ids(model),
        "torch_dtype": DTYPES[model.dtype(EMBEDDING)],
    }


def ids(model: GGUFModel) -> dict[str, Any]:
    """The ids that begin and end a text, as config.json and generation_config.json name them."""
    g = model.generation
    return {"bos_token_id": g.bos_id if g.bos_id >= 0 else None, "eos_token_id": g.eos_ids or None}


def generation_json(model: GGUFModel) -> dict[str, Any]:
    """generation_config.json; greedy where the metadata says nothing of sampling, as the programs are."""
    g = model.generation
    if g.temperature == 0:
        return {**ids(model), "do_sample": False}
    sampling = {"temperature": shortest(g.temperature), "top_p": shortest(g.top_p), "top_k": g.top_k}
    return {**ids(model), "do_sample": True, **sampling, **({"min_p": shortest(g.min_p)} if g.min_p else {})}


def metadata_files(model: GGUFModel) -> dict[str, bytes]:
    """The files by name, without config.json. Raises ModelError for a tokenizer that cannot be expressed."""
    files = model.tokenizer_files()
    special = {name: files.config[name] for name in SPECIAL_TOKENS if name in files.config}
    config = special | {
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_seq_len,
        "tokenizer_class": TOKENIZER_CLASS,
    }
    if files.config["chat_template"]:
        config["chat_template"] = files.config["chat_template"]
    contents = {
        "tokenizer.json": files.tokenizer,
        "tokenizer_config.json": config,
        "special_tokens_map.json": special,
        "generation_config.json": generation_json(model),
    }
    return {name: (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode() for name, value in contents.items()}

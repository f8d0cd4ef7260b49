"""GGUF files with the metadata that llama.cpp's convert_hf_to_gguf.py writes of a Hugging Face directory.

Unlike tests/gguf_fixture.py, which is made to vary what the reader sees, this follows the converter step by step, and
takes nothing from formats/: names of tensors, special tokens, merges, chat template and sampling come out of the `gguf`
package, as in the converter, and what is left does what its classes TextModel, LlamaModel and Qwen3Model do. Two of
its habits matter to a reader: the only id that ends a text is `eos_token_id`, and the original context of Llama 3's
RoPE is 8192 unless config.json has it at its top level, outside of `rope_scaling`.
"""

import json

import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFType,
    GGUFWriter,
    LlamaFileType,
    Metadata,
    SpecialVocab,
    TokenType,
    get_tensor_name_map,
    quantize,
)
from safetensors import safe_open

F32 = np.float32
ARCHS = {"LlamaForCausalLM": MODEL_ARCH.LLAMA, "Qwen3ForCausalLM": MODEL_ARCH.QWEN3}
PRE = {"LlamaForCausalLM": "llama-bpe", "Qwen3ForCausalLM": "qwen2"}  # the converter knows tokenizers by a hash
FILE_TYPES = {"F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16,
              "Q8_0": LlamaFileType.MOSTLY_Q8_0}  # fmt: skip


def read(hf_dir, name):
    return json.loads((hf_dir / name).read_text())


def rope_of(config):
    """The parameters of RoPE, with rope_theta among them."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    return {"rope_theta": config.get("rope_theta")} | rope


def head_dim_of(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def permuted(weight, n_heads):
    """Rows of q or k in the order of a rotation of adjacent pairs."""
    halves = weight.reshape(n_heads, 2, len(weight) // n_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama3_divisors(config):
    """The values of rope_freqs.weight; every step in fp32, as the converter's are."""
    rope, head_dim = rope_of(config), head_dim_of(config)
    context = config.get("original_max_position_embeddings", 8192)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for freq in 1 / F32(rope["rope_theta"]) ** (np.arange(0, head_dim, 2, dtype=F32) / F32(head_dim)):
        wavelength = F32(2 * np.pi) / freq
        smooth = (F32(context) / wavelength - F32(low)) / F32(high - low)
        if wavelength < context / high:
            divisors.append(1)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / F32(factor) + smooth))
    return np.array(divisors, F32)


def tensors_of(hf_dir, config):
    """Name and fp32 values of every tensor, in the order of the file."""
    is_llama = config["architectures"] == ["LlamaForCausalLM"]
    names = get_tensor_name_map(ARCHS[config["architectures"][0]], config["num_hidden_layers"])
    if is_llama and rope_of(config).get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_divisors(config)
    with safe_open(hf_dir / "model.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118, an open file is no dict
            value = file.get_tensor(name).astype(F32)
            for part, n_heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if is_llama and name.endswith(f"{part}.weight"):
                    value = permuted(value, config[n_heads])
            yield names.get_name(name, try_suffixes=(".weight", ".bias")), value


def looks_special(token):
    """Tokens that the converter takes for control tokens whatever tokenizer.json says of them."""
    return (token.startswith(("<|", "<｜")) and token.endswith(("|>", "｜>"))) or token in ("<pad>", "<mask>")


def tokens_of(hf_dir, vocab_size):
    """Names and types of all ids."""
    tokenizer = read(hf_dir, "tokenizer.json")
    names = {i: name for name, i in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens, types = [], []
    for i in range(vocab_size):
        if i in added:
            name = added[i]["content"]
            is_control = added[i]["special"] or looks_special(name)
            types.append(TokenType.CONTROL if is_control else TokenType.USER_DEFINED)
        else:
            name = names.get(i, f"[PAD{i}]")
            types.append(TokenType.NORMAL if i in names else TokenType.UNUSED)
        tokens.append(name)
    return tokens, types


def add_vocabulary(writer, hf_dir, config):
    tokens, types = tokens_of(hf_dir, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE[config["architectures"][0]])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    SpecialVocab(hf_dir, load_merges=True).add_to_gguf(writer, quiet=True)


def add_parameters(writer, config, kind):
    rope = rope_of(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_file_type(FILE_TYPES[kind])
    if config["architectures"] == ["LlamaForCausalLM"]:
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim_of(config))


def convert(hf_dir, out, kind="BF16"):
    """Writes the GGUF file of a Hugging Face directory. kind: the type of matrices; vectors are F32."""
    config = read(hf_dir, "config.json")
    writer = GGUFWriter(out, MODEL_ARCH_NAMES[ARCHS[config["architectures"][0]]])
    for name, value in tensors_of(hf_dir, config):
        stored = GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(value, stored), raw_dtype=stored)
    writer.add_type(GGUFType.MODEL)
    Metadata.load(None, hf_dir, hf_dir.name, writer.get_total_parameter_count()[0]).set_gguf_meta_model(writer)
    add_parameters(writer, config, kind)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    add_vocabulary(writer, hf_dir, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out

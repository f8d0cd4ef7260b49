"""AutoAWQ's checkpoints: a Hugging Face directory with packed int4 matrices, as vLLM and transformers read it.

What is in such a directory beside the tensors of the unquantized model, for each matrix of a layer (golden/awq.py):

    model.layers.0.self_attn.q_proj.qweight   int32, for .weight
    model.layers.0.self_attn.q_proj.qzeros    int32
    model.layers.0.self_attn.q_proj.scales    fp16

and in config.json `quantization_config`, with quant_method "awq". The version "gemm" is the packing that golden/awq.py
describes; others pack in other ways.
"""

import json
from pathlib import Path
from typing import Any

from formats import safetensors
from formats.checkpoint import Config, ModelError
from formats.errors import shown
from formats.files import new_directory, read_json
from formats.model_file import write_array
from formats.tensors import awq_tensors
from golden.awq import AWQ, GROUP_SIZES, Packed
from golden.forward import hf_name

COPIED = ("tokenizer*", "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "chat_template*")  # fmt: skip
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def read_group_size(hf_dir: Path) -> int | None:
    """The group size of an AutoAWQ checkpoint, None for unquantized weights. Raises ModelError for other kinds."""
    path = Path(hf_dir) / "config.json"
    if not Path(hf_dir).is_dir():
        raise ModelError(f"{hf_dir}: no such directory")
    quantization = read_json(path).get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise ModelError(f"{path}: quantization_config is {shown(quantization)}, expected an object")
    quantization = {"zero_point": True, **quantization}  # transformers' defaults
    if quantization.get("version") is None:
        quantization["version"] = "gemm"

    def check(field: str, allowed: tuple) -> Any:
        value = quantization.get(field)
        known = value.lower() if isinstance(value, str) else value
        if not any(known == a and type(known) is type(a) for a in allowed):
            supported = " or ".join(map(shown, allowed))
            raise ModelError(f"{path}: quantization_config.{field} is {shown(value)}, supported is {supported}")
        return value

    check("quant_method", ("awq",))
    check("version", ("gemm",))
    check("bits", (4,))
    check("zero_point", (True,))
    excluded = quantization.get("modules_to_not_convert")
    if excluded is not None and (not isinstance(excluded, list) or any(map(names_matrices, excluded))):
        raise ModelError(
            f"{path}: quantization_config.modules_to_not_convert is {shown(excluded)}, "
            "supported are names of modules outside the layers"
        )
    return check("group_size", GROUP_SIZES)


def names_matrices(module: object) -> bool:
    """Whether an entry of modules_to_not_convert, part of a module's name, can be about a layer's matrix."""
    return not isinstance(module, str) or "layers" in module or any(module in matrix for matrix in MATRICES)


def stored_name(config: Config, name: str) -> str:
    """The name in an AutoAWQ checkpoint of a tensor of a model file."""
    stem, _, part = name.rpartition(".")
    if part in Packed._fields:
        return hf_name(config, stem).removesuffix("weight") + part
    return hf_name(config, name)


def check_destination(out: Path) -> None:
    """Refuses a directory that exists, or that nothing can be written beside."""
    if out.exists() or out.is_symlink():
        raise ModelError(f"{out}: exists already")
    if not out.parent.is_dir():
        raise ModelError(f"{out}: cannot write: {out.parent} is no directory")


def write_directory(source: Path, model_file: Path, out: Path) -> None:
    """Writes `out`, which must not exist, from a model file and the Hugging Face directory that it was made from.

    The tensors are those of the file, to the bit. They are written one after another, whatever the model's size.
    """
    check_destination(out)
    files = sorted({file for pattern in COPIED for file in source.glob(pattern) if file.is_file()})
    copied = {file.name: file.read_bytes() for file in files}
    model = AWQ(model_file)
    config = read_json(source / "config.json")
    if config.get("tie_word_embeddings", False) != model.config.tied:  # lm_head.weight was another matrix: Checkpoint
        config["tie_word_embeddings"] = model.config.tied
    config["torch_dtype"] = "float16"
    if "dtype" in config:  # what newer versions of transformers call it
        config["dtype"] = "float16"
    config.setdefault(
        "quantization_config",
        {
            "bits": 4,
            "group_size": model.group_size,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
    )
    with new_directory(out) as temporary:
        for name, content in copied.items():
            (temporary / name).write_bytes(content)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        with (temporary / "model.safetensors").open("wb") as f:
            tensors = list(awq_tensors(model.config, model.group_size))
            f.write(safetensors.header(t._replace(name=stored_name(model.config, t.name)) for t in tensors))
            for name, dtype, _ in tensors:
                write_array(f, model.tensor(name), dtype)
        temporary.chmod(source.stat().st_mode | 0o700)

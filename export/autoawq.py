"""AutoAWQ's checkpoints: a Hugging Face directory with packed int4 matrices, as vLLM and transformers read it.

What is in such a directory beside the tensors of the unquantized model, for each matrix of a layer (golden/awq.py):

    model.layers.0.self_attn.q_proj.qweight   int32, for .weight
    model.layers.0.self_attn.q_proj.qzeros    int32
    model.layers.0.self_attn.q_proj.scales    fp16

and in config.json `quantization_config`, with quant_method "awq". The version "gemm" is the packing that golden/awq.py
describes; others pack in other ways.
"""

from functools import partial
from pathlib import Path

from export.hf_directory import part_name, quantization_of, read_source_config, write_directory
from formats.checkpoint import Config, ModelError
from formats.errors import shown
from formats.tensors import awq_tensors
from golden.awq import AWQ, GROUP_SIZES, Packed
from golden.forward import hf_name

MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def read_group_size(hf_dir: Path) -> int | None:
    """The group size of an AutoAWQ checkpoint, None for unquantized weights. Raises ModelError for other kinds."""
    found = quantization_of(hf_dir)
    if found is None:
        return None
    found.one_of("quant_method", ("awq",))
    found.one_of("version", ("gemm",), "gemm")
    found.one_of("bits", (4,))
    found.one_of("zero_point", (True,), None if "zero_point" in found.values else True)
    excluded = found.values.get("modules_to_not_convert")
    if excluded is not None and (not isinstance(excluded, list) or any(map(names_matrices, excluded))):
        raise ModelError(
            f"{found.path}: quantization_config.modules_to_not_convert is {shown(excluded)}, "
            "supported are names of modules outside the layers"
        )
    return found.one_of("group_size", GROUP_SIZES)


def names_matrices(module: object) -> bool:
    """Whether an entry of modules_to_not_convert, part of a module's name, can be about a layer's matrix."""
    return not isinstance(module, str) or "layers" in module or any(module in matrix for matrix in MATRICES)


def stored_name(config: Config, name: str) -> str:
    """The name in an AutoAWQ checkpoint of a tensor of a model file."""
    stem, _, part = name.rpartition(".")
    if part in Packed._fields:
        return part_name(config, stem, part)
    return hf_name(config, name)


def write_autoawq(source: Path, model_file: Path, hf_out: Path) -> None:
    """Writes `hf_out`, which must not exist, from a model file and the directory or GGUF file that it was made from.

    The tensors are those of the file, to the bit.
    """
    model = AWQ(model_file)
    config = read_source_config(source, model.config.tied)
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
    contents = (
        (tensor._replace(name=stored_name(model.config, tensor.name)), partial(model.tensor, tensor.name))
        for tensor in awq_tensors(model.config, model.group_size)
    )
    write_directory(source, hf_out, config, contents)

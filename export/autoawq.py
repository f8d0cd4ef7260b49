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

from export.hf_directory import part_name, read_source_config, write_directory
from formats.checkpoint import Config
from formats.packing import Packing
from formats.source import Source
from formats.tensors import awq_tensors
from golden.awq import AWQ, GROUP_SIZES, Packed
from golden.forward import hf_name


def read_group_size(checkpoint: Source) -> int | None:
    """The group size of a checkpoint in AutoAWQ's packing that an AWQ file has room for; None for all others."""
    found = {(form.method, form.group_size) for form in checkpoint.forms.values() if isinstance(form, Packing)}
    if len(found) != 1 or not all(isinstance(form, Packing) for form in checkpoint.forms.values()):
        return None
    ((method, group_size),) = found
    return group_size if method == "awq" and group_size in GROUP_SIZES else None


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
    ours = {
        "bits": 4,
        "group_size": model.group_size,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    theirs = config.get("quantization_config") or {}
    if theirs.get("quant_method") != "awq" or "layers" in str(theirs.get("modules_to_not_convert")):
        config["quantization_config"] = ours
    contents = (
        (tensor._replace(name=stored_name(model.config, tensor.name)), partial(model.tensor, tensor.name))
        for tensor in awq_tensors(model.config, model.group_size)
    )
    write_directory(source, hf_out, config, contents)
